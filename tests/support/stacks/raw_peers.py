"""The two sides of a proxy: a client's bare connection, and a real replica in this process."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator

from serve_common.runtime.request_context import set_replica_context
from serve_replica_host.replica.process import ReplicaProcess, StartReplicaRequest
from tests.support.stacks.replica_runner import NoMetrics


@contextlib.asynccontextmanager
async def raw_connection(
    url: str, *, limit: int = 1 << 16, local_address: str = "127.0.0.1"
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection to ``http://host:port``, closed in the end; ``limit`` is the reader's, in bytes."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(
        host, int(port), limit=limit, local_addr=(local_address, 0)
    )
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


@contextlib.asynccontextmanager
async def running_replica(
    order: StartReplicaRequest, *, drains: bool = True
) -> AsyncIterator[ReplicaProcess]:
    """Its application's module is imported from ``app_dir`` anew; not ``drains``: the test does that."""
    process = ReplicaProcess(order, NoMetrics())
    error = await asyncio.to_thread(process.start)
    assert error is None, error
    try:
        yield process
    finally:
        if drains:
            await asyncio.to_thread(process.drain)
        set_replica_context(None)
        sys.modules.pop(order.goal.replica_config.import_path.partition(":")[0], None)
        sys.path[:] = [entry for entry in sys.path if entry != order.app_dir]

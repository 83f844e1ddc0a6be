"""The control plane's client where the server is away."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop

from serve_common.nats.client import close_nats
from serve_common.protocol.subjects import Subjects
from tests.support.servers.nats_server import NatsServer, connected


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_client_that_holds_messages_for_a_server_that_is_gone_closes_all_the_same(
    tmp_path: Path, new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    async def main() -> None:
        with NatsServer(tmp_path) as server:
            lost = asyncio.Event()
            client = await connected(server, Subjects("serve"), on_disconnect=lost.set)
            server.kill()
            await lost.wait()
            await client.publish("test", b"kept until it is back")
            await close_nats(client)
            assert asyncio.all_tasks() == {asyncio.current_task()}

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())

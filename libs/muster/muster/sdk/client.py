"""This process' connection to the stack that it deploys on, or to one within it.

Why on a thread of its own: `serve.run` and its relatives block, and may be called on any thread, within a running event
loop too.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final, TypeVar, final

from muster.cli.session import StackChoice, find_stack
from muster.client.admin import Stack, connect_stack
from muster.client.contexts import LOCAL
from muster.client.requests import StackAddress
from muster.config import HTTPOptions, ProxyLocation
from muster.handles import disconnect
from muster.library_logs import use_library_logs
from muster.schema import LoggingConfig
from muster.sdk.replica_lines import show_replica_lines
from serve_common.errors import BusUnavailable, PermanentError
from serve_common.runtime.request_context import current_replica
from serve_common.runtime.threads import LoopThread

_CLOSE_TIMEOUT_S: Final = 10.0
_STOP_TIMEOUT_S: Final = 60.0
_ADMINS_VARIABLES: Final = (
    "MUSTER_NATS_CREDS_FILE",
    "MUSTER_NATS_PASSWORD",
    "MUSTER_NATS_PASSWORD_FILE",
    "MUSTER_STATE_DIR",
)

Result = TypeVar("Result")


def find_address() -> StackAddress:
    """The stack that the command line would find; in a replica its own, with the credentials of its ``env_vars``.

    Raises `BusUnavailable` when there is none, and `PermanentError` in a replica without credentials: the identity that
    a replica has may call deployments and not change them.
    """
    replica = current_replica()
    if replica is None:
        return find_stack(StackChoice(), os.environ, Path.cwd())
    if not any(os.environ.get(name) for name in _ADMINS_VARIABLES):
        raise PermanentError(
            "a replica may not deploy, delete, shut down or ask for the status by itself: give it an admin's "
            "credentials in env_vars of its runtime_env, such as MUSTER_NATS_CREDS_FILE, a file on the hosts"
        )
    own = {"MUSTER_SUBJECT_PREFIX": replica.bus.subject_prefix}
    if not os.environ.get("MUSTER_STATE_DIR"):
        own["MUSTER_NATS_URL"] = ",".join(replica.bus.servers)
    if replica.bus.tls_ca_file:
        own["MUSTER_NATS_TLS_CA_FILE"] = replica.bus.tls_ca_file
    return find_stack(StackChoice(context=LOCAL), {**own, **os.environ}, Path.cwd())


def is_connected() -> bool:
    """Whether this process has a connection."""
    return _client is not None


@final
class _Embedded:
    """A stack within this process, from `start` to the process' end or `stop`."""

    def __init__(self, http: HTTPOptions) -> None:
        try:
            # Only here: the servers need not be installed where a stack is found.
            from muster.embedded.options import StackOptions, share_ray  # noqa: PLC0415 - as above
            from muster.embedded.stack import EmbeddedStack  # noqa: PLC0415 - as above
        except ImportError as error:
            raise BusUnavailable(
                f"no stack was found, and none can be started here ({error}): install muster[embedded], start one "
                "with 'muster up' or compose, or say where one is with MUSTER_NATS_URL"
            ) from error
        self._directory = Path(tempfile.mkdtemp(prefix="muster-"))
        own = StackOptions(
            has_proxy=http.location is not ProxyLocation.Disabled,
            http_host=http.host or "127.0.0.1",
            http_port=http.port,
            http_cert_file=http.ssl_certfile or "",
            http_key_file=http.ssl_keyfile or "",
            http_key_password=http.ssl_keyfile_password or "",
        )
        self._has_proxy = own.has_proxy
        options = share_ray(own)
        self._ray_address = options.ray_address
        self._stack = EmbeddedStack(self._directory, options)
        self._former = os.environ.get("MUSTER_STATE_DIR")

    @property
    def has_lost_ray(self) -> bool:
        """Whether the program ended the Ray that the replicas run in."""
        if not self._ray_address:
            return False
        from muster.embedded.options import find_ray  # noqa: PLC0415 - as above

        return find_ray() != self._ray_address

    async def start(self) -> None:
        try:
            await self._stack.start()
        except BaseException:
            await asyncio.to_thread(shutil.rmtree, self._directory, ignore_errors=True)
            raise
        os.environ["MUSTER_STATE_DIR"] = str(self._directory)  # for handles, and for commands of this process
        if self._ray_address:
            from muster.embedded.options import announce_in_ray  # noqa: PLC0415 - as above

            announce_in_ray(str(self._directory))
        where = f"at {self._stack.record.http_url}" if self._has_proxy else "without HTTP"
        sys.stderr.write(
            f"Muster runs within this process, {where}; it ends with it. For the command line: "
            f"MUSTER_STATE_DIR={self._directory}\n"
        )

    async def stop(self) -> None:
        await self._stack.stop()
        if self._ray_address and not self.has_lost_ray:
            from muster.embedded.options import announce_in_ray  # noqa: PLC0415 - as above

            announce_in_ray(None)
        if self._former is None:
            os.environ.pop("MUSTER_STATE_DIR", None)
        else:
            os.environ["MUSTER_STATE_DIR"] = self._former
        shutil.rmtree(
            self._directory, ignore_errors=True
        )  # in no thread: an interpreter that ends starts none


@final
class Client:
    """This process' connection to the admin API of one stack."""

    def __init__(self) -> None:
        """Connects in the first `call`."""
        self.logging_config: LoggingConfig | None = None
        """For the applications that this process runs and that have none; set by `muster.start`."""
        if current_replica() is None:
            use_library_logs()
        self._thread = LoopThread("muster-sdk")
        self._exits = AsyncExitStack()
        self._stack: Stack | None = None
        self._embedded: _Embedded | None = None
        self._http = HTTPOptions()
        self._opening: asyncio.Lock | None = None

    def call(self, work: Callable[[Stack], Awaitable[Result]], http: HTTPOptions | None = None) -> Result:
        """Do ``work`` on the client's thread; finds or starts a stack before the first."""

        async def run() -> Result:
            return await work(await self._open(http))

        future = self._thread.submit(run())
        try:
            return future.result()
        except BaseException:
            future.cancel()  # of Ctrl-C, which is not the work's own
            raise

    @property
    def is_embedded(self) -> bool:
        """True when the stack belongs to this process."""
        return self._embedded is not None

    async def _open(self, http: HTTPOptions | None) -> Stack:
        self._opening = self._opening or asyncio.Lock()
        async with self._opening:
            if self._embedded is not None and self._embedded.has_lost_ray:
                self._stack = self._embedded = None
                await asyncio.to_thread(disconnect)  # handles find the next stack
                await self._exits.aclose()
            if self._stack is None:
                try:
                    address = find_address()
                except BusUnavailable:
                    if current_replica() is not None:
                        raise  # a replica is within a stack, and starts none
                    self._http = http or self._http
                    embedded = await asyncio.to_thread(_Embedded, self._http)
                    await embedded.start()
                    self._embedded = embedded
                    self._exits.push_async_callback(embedded.stop)
                    address = find_address()
                self._stack = await self._exits.enter_async_context(connect_stack(address))
                if self._embedded is not None:
                    await self._exits.enter_async_context(show_replica_lines(address))
            return self._stack

    def close(self) -> None:
        """Disconnect, and stop a stack of this process."""
        if self._thread.loop.is_closed():
            return
        self._thread.submit(self._exits.aclose()).result(_STOP_TIMEOUT_S)
        self._thread.stop(_CLOSE_TIMEOUT_S)


_lock = threading.Lock()
_client: Client | None = None


def get_client() -> Client:
    """The client of this process, made with the first call."""
    global _client  # noqa: PLW0603 - one for the process
    with _lock:
        if _client is None:
            _client = Client()
        return _client


def close_client() -> None:
    """Disconnect, and end a stack within this process."""
    global _client
    with _lock:
        client, _client = _client, None
    if client is not None:
        disconnect()
        client.close()


def _reset_after_fork() -> None:
    """Forget the client in a forked child: its thread does not exist there, and its stack is the parent's."""
    global _client, _lock  # noqa: PLW0603 - as above
    _client = None
    _lock = threading.Lock()


atexit.register(close_client)
os.register_at_fork(after_in_child=_reset_after_fork)

"""A router and a replica with direct links between them, whose bus only carries dials."""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import random
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import uvloop

from serve_common.direct import tcp
from serve_common.direct.dialing import DirectLinks
from serve_common.direct.link import DirectLink
from serve_common.direct.listening import LinkListener
from serve_common.direct.tcp import TcpEndpoint
from serve_common.errors import BusUnavailable
from serve_common.names import ReplicaTag
from serve_common.protocol.frames import DialHead, LinkHead, SplitFrame, decode_frame, encode_frame
from serve_common.runtime.settings import DirectMode
from serve_common.runtime.tasks import TaskOwner
from tests.support.waiting import eventually

REPLICA = ReplicaTag("d/a#1")
SUBJECT = b"serve.replica.d.a.1"
INBOX = b"_INBOX_proxy.p1.x."
MACHINE = "this-machine"


def whole_frame(frame: bytes | memoryview | SplitFrame) -> bytes:
    """The bytes of a frame as they were sent."""
    return b"".join(frame) if isinstance(frame, SplitFrame) else bytes(frame)


class Inbox:
    """Callbacks by token, as the router's."""

    def __init__(self) -> None:
        self.receivers: dict[bytes, Callable[[bytes, bytes, bytes | None], None]] = {}
        self.delivered: list[tuple[bytes, bytes]] = []

    def new_reply(self, on_reply, on_no_responders) -> tuple[bytes, bytes]:
        token = random.randbytes(8).hex().encode()
        self.receivers[token] = on_reply
        return token, INBOX + token

    def forget(self, token: bytes) -> None:
        del self.receivers[token]

    def deliver(self, token: bytes, payload: bytes | memoryview | SplitFrame) -> None:
        self.delivered.append((token, whole_frame(payload)))


class World:
    """A router and a replica whose bus only carries dials."""

    def __init__(
        self,
        directory: Path | None,
        mode: DirectMode = DirectMode.BODIES,
        uids: tuple[int, ...] | None = None,
        host: str = "127.0.0.1",
    ) -> None:
        """Without a directory, links take TCP at ``host``."""
        self.inbox = Inbox()
        self.taken: list[tuple[DirectLink, bytes, bytes]] = []
        self.ended: list[DirectLink] = []
        self.lost: list[DirectLink] = []
        self.dialled: list[bytes] = []
        self.is_bus_away = False
        self.listener = LinkListener(
            directory,
            (0, os.getuid()) if uids is None else uids,
            tcp=None if directory else TcpEndpoint(host, (0, 0), lambda: host),
            on_frame=lambda link, token, frame: self.taken.append((link, token, whole_frame(frame))),
            on_end=self.ended.append,
            on_batch_end=lambda: None,
            machine=MACHINE,
        )
        self.answer: Callable[[bytes, str], LinkHead] = self.listener.offer
        self.links = DirectLinks(mode, self.inbox, self._publish, self.lost.append, machine=MACHINE)
        self.tasks = TaskOwner("test")

    def _publish(self, subject: bytes, frame: bytes, reply: bytes) -> None:
        if self.is_bus_away:
            raise BusUnavailable("away")
        self.dialled.append(subject)
        head, _ = decode_frame(frame)
        assert isinstance(head, DialHead)
        answer = encode_frame(self.answer(reply, head.machine))
        asyncio.get_running_loop().call_soon(self.inbox.receivers[reply[len(INBOX) :]], answer, b"", None)

    async def dial(self) -> DirectLink:
        """Open a link, and wait until both ends have it."""
        assert self.links.for_request(REPLICA, SUBJECT, is_large=True) is None, "the first takes the bus"
        await eventually(lambda: self.links.open_links == self.listener.open_links == 1)
        link = self.links.get(REPLICA)
        assert link is not None
        return link

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection to the replica that has sent nothing yet."""
        listener = self.listener
        if listener._path is not None:
            return await asyncio.open_unix_connection(listener._path)
        context = tcp._pinned(listener._certificate)
        return await asyncio.open_connection("127.0.0.1", listener._port, ssl=context, server_hostname="")

    async def close(self) -> None:
        """End both, and check that nothing is left."""
        await self.links.close()
        await self.listener.close()
        await self.tasks.close(5)
        await eventually(lambda: not self.listener._unknown)

    @property
    def other_end(self) -> DirectLink:
        link = self.listener.link_to(INBOX)
        assert link is not None
        return link


_LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
_LIMIT_S = 50.0


def with_links(scenario: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run a test with a `World` of each transport, on each kind of loop: the services' own is uvloop."""

    @pytest.mark.parametrize("transport", ["unix", "tcp"])
    @pytest.mark.parametrize("loop_name", _LOOPS)
    @functools.wraps(scenario)
    def test(transport: str, loop_name: str, **fixtures: object) -> None:
        async def run(directory: Path) -> None:
            world = World(directory if transport == "unix" else None)
            await world.listener.start(world.tasks)
            try:
                await scenario(world, **fixtures)
            finally:
                await world.close()

        with tempfile.TemporaryDirectory(prefix="links-") as name:  # short, as paths of sockets must be
            with asyncio.Runner(loop_factory=_LOOPS[loop_name]) as runner:
                runner.run(asyncio.wait_for(run(Path(name) / "direct"), _LIMIT_S))
            assert [path for path in Path(name).rglob("*") if not path.is_dir()] == []

    parameters = [each for each in inspect.signature(scenario).parameters.values() if each.name != "world"]
    own = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in ("transport", "loop_name")]
    test.__signature__ = inspect.Signature([*parameters, *own])  # type: ignore[attr-defined] - pytest reads it
    return test

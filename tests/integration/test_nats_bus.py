"""The controller's adapter to NATS by itself, with answers and ears of the test's own."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
import time
import uuid
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any

import msgspec
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from serve_common.api.queries import PRINCIPAL_HEADER, PRINCIPAL_LENGTH_MAX
from serve_common.api.views import EndpointView, ErrorView, EventView
from serve_common.names import BackendTag, HostId, ProxyId
from serve_common.nats.client import close_nats
from serve_common.protocol.reports import HostReport, LeaderNotice, ProxyReport, Wake
from serve_common.protocol.subjects import Subjects
from serve_common.telemetry.log_lines import RefusedMessages
from serve_controller.adapters.nats_bus import NatsBus
from tests.support.servers.nats_server import NatsServer, connected, until_known
from tests.support.waiting import eventually


class Ears:
    def __init__(self) -> None:
        self.reports: asyncio.Queue[HostReport | ProxyReport] = asyncio.Queue()

    def on_report(self, report: HostReport | ProxyReport) -> None:
        self.reports.put_nowait(report)

    def on_bucket_entries(self, entries: Mapping[str, tuple[int, int | None]], *, whole: bool) -> None:
        """Not of interest here."""

    def on_leader_notice(self, notice: LeaderNotice) -> None:
        """Not of interest here."""

    def on_wake_message(self, wake: Wake) -> None:
        """Not of interest here."""

    def sleeping(self) -> Iterable[BackendTag]:
        """None."""
        return ()


class Answers:
    def __init__(self) -> None:
        self.who: list[str] = []
        self.size = 2

    async def handle(self, verb: str, payload: bytes, principal: str) -> bytes:
        self.who.append(principal)
        if verb == "wait_for_goal":
            await asyncio.sleep(60)
        return b" " * self.size

    def list_endpoints(self) -> list[EndpointView]:
        return []


class Side:
    def __init__(self, server: NatsServer) -> None:
        self.server = server
        self.subjects = Subjects(f"t{uuid.uuid4().hex[:10]}")
        self.ears, self.answers = Ears(), Answers()
        self._opened = contextlib.AsyncExitStack()

    async def open(self) -> None:
        self.client = await self._connect()
        self.caller = await self._connect()
        self.bus = NatsBus(self.client, self.subjects, "0.0.1", RefusedMessages(time.monotonic))
        self._opened.push_async_callback(self.bus.close)
        await self.bus.start(self.ears, self.answers)

    async def _connect(self) -> Client:
        client = await connected(self.server, self.subjects)
        self._opened.push_async_callback(close_nats, client)
        return client

    async def close(self) -> None:
        """Also what `open` left where it failed: a client that nobody closes keeps the loop from its end."""
        await self._opened.aclose()

    async def lead(self) -> None:
        await self.bus.start_term(LeaderNotice(controller_id="c", epoch=1))
        await until_known(self.client)

    async def ask(self, verb: str, headers: dict[str, str] | None = None) -> Msg:
        return await self.caller.request(self.subjects.admin(verb), b"", timeout=20, headers=headers)


@pytest.fixture
async def side(shared_server: NatsServer) -> AsyncIterator[Side]:
    side = Side(shared_server)
    try:
        await side.open()
        yield side
    finally:
        await side.close()


@pytest.mark.parametrize(
    ("headers", "who"),
    [
        (None, ""),
        ({"Other": "x"}, ""),
        ({PRINCIPAL_HEADER: "ann@laptop"}, "ann@laptop"),
        ({PRINCIPAL_HEADER: "Zoë \t\x1b[31m\x00red"}, "Zoë [31m red"),
        ({PRINCIPAL_HEADER: "x" * 5000}, "x" * PRINCIPAL_LENGTH_MAX),
    ],
)
async def test_who_asks_is_told_in_printable_characters(
    side: Side, headers: dict[str, str] | None, who: str
) -> None:
    await side.lead()
    assert (await side.ask("list_deployments", headers)).data == b"  "
    assert side.answers.who == [who]


async def test_headers_that_are_no_text_do_not_cut_the_connection(side: Side) -> None:
    await side.lead()
    block = b"NATS/1.0\r\n" + PRINCIPAL_HEADER.encode() + b": \xff\xfe\r\n\xff: x\r\nno colon\r\n\r\n"
    inbox = side.caller.new_inbox()
    answers = await side.caller.subscribe(inbox)
    subject = side.subjects.admin("list_deployments")
    line = f"HPUB {subject} {inbox} {len(block)} {len(block)}\r\n".encode()
    await side.caller._send_command(line + block + b"\r\n")
    await until_known(side.caller)
    assert (await answers.next_msg(timeout=20)).data == b"  "
    assert side.answers.who == ["\ufffd\ufffd"]
    assert (await side.ask("list_deployments")).data == b"  "


async def test_an_answer_that_is_too_large_says_how_to_ask_for_less(side: Side) -> None:
    await side.lead()
    side.answers.size = side.caller.max_payload + 1
    message = await side.ask("list_deployments")
    assert message.headers is not None
    assert message.headers["Nats-Service-Error"]
    view = msgspec.json.decode(message.data, type=ErrorView)
    assert view.code == "limit_reached"
    assert "use limit and after" in view.message
    side.answers.size = side.caller.max_payload
    assert len((await side.ask("list_deployments")).data) == side.caller.max_payload


async def test_who_waits_while_the_controller_stops_is_told_to_ask_the_next_one(side: Side) -> None:
    await side.lead()
    async with asyncio.TaskGroup() as tasks:
        asking = tasks.create_task(side.ask("wait_for_goal"))
        await eventually(lambda: side.answers.who == [""])
        await side.bus.close()
    assert msgspec.json.decode(asking.result().data, type=ErrorView).code == "not_leading"


async def test_events_go_out_during_a_term_only(side: Side) -> None:
    heard = await side.caller.subscribe(side.subjects.events)
    await until_known(side.caller)
    side.bus.publish_event("host", "before", b"{}")
    await side.lead()
    payload = msgspec.json.encode(EventView(at=1.0, kind="host", subject="h1", message="came"))
    side.bus.publish_event("host", "h1", payload)
    assert (await heard.next_msg(timeout=20)).subject == side.subjects.event("host", "h1")
    side.bus.publish_event("host", "h1", payload)
    await side.bus.end_term()
    assert (await heard.next_msg(timeout=20)).data == payload
    side.bus.publish_event("host", "after", b"{}")
    views: list[EventView] = []
    async with asyncio.timeout(30):
        while len(views) < 2:  # the stream hears them beside the listener
            views = await side.bus.recent_events(10)
    assert [view.subject for view in views] == ["h1", "h1"]
    await side.lead()
    side.bus.publish_event("host", "h2", payload)
    assert (await heard.next_msg(timeout=20)).subject == side.subjects.event("host", "h2")


def host_report(**changes: Any) -> bytes:
    fields = {
        "host_id": "h1",
        "incarnation": "1",
        "sequence": 1,
        "started_at": 1.0,
        "epoch": 0,
        "generation": 0,
        "resources": {},
        "replicas": [],
    }
    return msgspec.json.encode({**fields, **changes})


async def test_of_many_reports_the_good_ones_are_heard_in_order(side: Side) -> None:
    host, proxy = side.subjects.host_report(HostId("h1")), side.subjects.proxy_report(ProxyId("p1"))
    await until_known(side.client)
    bottomless = b'{"x":' + b"[" * 100_000
    others = [host_report(host_id=name) for name in ("h2", "", "h 1\r\nPUB x 0\r\n")]
    for payload in (b"nonsense", b"\xff", *others, bottomless):
        await side.caller.publish(host, payload)
    for number in range(1000):
        await side.caller.publish(host, host_report(sequence=number))
        await side.caller.publish(
            proxy,
            msgspec.json.encode(
                ProxyReport(
                    proxy_id=ProxyId("p1"),
                    incarnation="i",
                    sequence=number,
                    started_at=1.0,
                    applied_snapshot_id=2,
                )
            ),
        )
    reports = [await asyncio.wait_for(side.ears.reports.get(), 30) for _ in range(2000)]
    for kind in (HostReport, ProxyReport):
        assert [r.sequence for r in reports if isinstance(r, kind)] == list(range(1000))


async def test_a_client_whose_server_takes_nothing_is_closed_with_its_socket(server: NatsServer) -> None:
    assert server.process is not None
    client = await connected(server, Subjects())
    writer = client._transport._io_writer
    server.process.send_signal(signal.SIGSTOP)
    for _ in range(20):  # more than what the system takes for the server
        client._pending.append(bytes(1_000_000))
        client._pending_data_size += 1_000_000
    async with asyncio.timeout(30):  # for ever otherwise
        await close_nats(client)
    assert writer.get_extra_info("socket").fileno() == -1


async def test_who_is_told_to_stop_while_it_connects_stops(shared_server: NatsServer) -> None:
    """At whatever turn of the loop: the library loses a cancellation that comes together with a result."""
    for turns in itertools.count():
        connecting = asyncio.create_task(connected(shared_server, Subjects()))  # noqa: TID251 - the test is its owner
        for _ in range(turns):
            await asyncio.sleep(0)
        if not connecting.cancel():
            await close_nats(await connecting)
            break
        async with asyncio.timeout(30):
            await asyncio.wait([connecting])
        if not connecting.cancelled():
            await close_nats(connecting.result())
        assert connecting.cancelled(), f"cancelled after {turns} turns of the loop"
    assert turns > 5, "it was cut short"

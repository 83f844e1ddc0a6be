"""The lean client against a real nats-server that is strict, slow, restarted or unreachable."""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from serve_common.errors import BusUnavailable
from serve_common.nats.connection import BusConnection
from serve_common.nats.options import BusOptions, PayloadTooLarge
from serve_common.runtime.tasks import TaskOwner
from tests.integration.test_bus_connection import (
    _ONE_TRY,
    Collector,
    NatsServer,
    _is_refused,
    _next_call,
    _options,
    _self_signed_certificate,
    _tls,
    _usable,
    connected,
    on_each_loop,
)
from tests.support.waiting import eventually


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    server = NatsServer(tmp_path)
    yield server
    server.kill()


def _disconnects(logs: list[dict[str, object]]) -> list[str]:
    return [str(line["reason"]) for line in logs if line["event"] == "bus_disconnected"]


@on_each_loop
async def test_a_reader_that_the_server_cuts_off_for_being_slow_says_what_may_be_wrong_and_comes_back(
    server: NatsServer,
) -> None:
    server.extra = 'max_pending: 2MB\nwrite_deadline: "2s"\n'
    server.start()
    async with connected(server) as sender, connected(server, ping_interval_s=60) as reader:
        heard = Collector()
        reader.subscribe("t.flood", heard)
        await reader.flush(5)
        back, lost = _next_call(reader.on_connected), _next_call(reader.on_disconnected)
        link = reader._link
        assert link is not None
        assert link._transport is not None
        with capture_logs() as logs:
            link._transport.pause_reading()  # as a loop that is too busy to read
            for _ in range(40):
                sender.publish("t.flood", b"x" * 1_000_000)
                await sender.wait_writable()
            await sender.flush(10)
            link._transport.resume_reading()
            await lost
            await back
        assert "Slow Consumer Detected" in (server.directory / "log").read_text()
        [reason] = _disconnects(logs)
        # The last depends on whether an answer to a ping of the server's was under way.
        assert any(words in reason for words in ("reads too slowly", "reset", "Broken pipe"))
        assert reader.reconnects == 1
        assert len(heard.messages) < 40
        heard.messages.clear()
        await reader.flush(5)
        sender.publish("t.flood", b"again")
        await heard.until(1)
        assert heard.payloads == [b"again"]


@on_each_loop
async def test_thousands_of_subscriptions_are_back_after_a_restart_of_the_server(server: NatsServer) -> None:
    server.start()
    async with connected(server) as connection:
        collectors = [Collector() for _ in range(3000)]
        subscriptions = [
            connection.subscribe(
                f"t.many.{number}.of.a.rather.long.subject", collector, "group" if number % 2 else ""
            )
            for number, collector in enumerate(collectors)
        ]
        for subscription in subscriptions[::10] * 2:  # to end it twice is as once
            subscription.unsubscribe()
        back = _next_call(connection.on_connected)
        server.kill()
        server.start()
        await back
        for number in range(3000):
            connection.publish(f"t.many.{number}.of.a.rather.long.subject", b"%d" % number)
        await connection.flush(5)
        for number, collector in enumerate(collectors):
            assert collector.payloads == ([] if number % 10 == 0 else [b"%d" % number])


@on_each_loop
async def test_the_limit_of_a_payload_is_that_of_the_server_of_the_moment(server: NatsServer) -> None:
    server.extra = "max_payload: 1000"
    server.start()
    async with connected(server) as connection:
        heard = Collector()
        connection.subscribe("t.a", heard)
        connection.publish("t.a", b"x" * 1000)
        with pytest.raises(PayloadTooLarge, match="message of 1001 bytes: the server takes at most 1000"):
            connection.publish("t.a", b"x" * 1001)
        await heard.until(1)
        back = _next_call(connection.on_connected)
        server.kill()
        server.extra = "max_payload: 2000"
        server.start()
        await back
        connection.publish("t.a", b"x" * 2000)
        await heard.until(2)


@on_each_loop
async def test_what_the_server_finds_too_large_ends_the_connection_with_its_words(server: NatsServer) -> None:
    server.extra = "max_payload: 1000"
    server.start()
    async with connected(server) as connection:
        back = _next_call(connection.on_connected)
        assert connection._link is not None
        connection._link._outbox.max_payload = 10_000  # as if it had been lowered since
        with capture_logs() as logs:
            connection.publish("t.a", b"x" * 2000)
            await back
        assert "Maximum Payload Violation" in _disconnects(logs)[0]
        assert connection.max_payload == 1000
        await connection.flush(5)


@on_each_loop
async def test_a_user_whose_password_changes_while_connected_is_put_out_and_let_in_again(
    server: NatsServer,
) -> None:
    server.start()
    async with connected(server) as connection:
        heard = Collector()
        connection.subscribe("t.a", heard)
        await connection.flush(5)
        lost, back = _next_call(connection.on_disconnected), _next_call(connection.on_connected)
        with capture_logs() as logs:
            server.password = "changed"
            server.reload()
            await lost
            await eventually(lambda: "bus_dial_failed" in {line["event"] for line in logs})
            assert not connection.is_connected
            server.password = "app-secret"
            server.reload()
            await back
        assert connection.reconnects == 1
        assert _disconnects(logs)[0]
        connection.publish("t.a", b"1")
        await heard.until(1)


@on_each_loop
async def test_a_permission_that_is_taken_away_later_ends_what_it_allowed_and_nothing_else(
    server: NatsServer,
) -> None:
    server.start()
    async with connected(server) as connection:
        kept, taken = Collector(), Collector()
        connection.subscribe("t.kept.a", kept)
        connection.subscribe("t.taken.a", taken)
        await connection.flush(5)
        server.allowed = "t.kept.>"
        with capture_logs() as logs:
            server.reload()
            while not connection.permission_violations:
                with contextlib.suppress(BusUnavailable):
                    connection.publish("t.taken.a", b"no")
                    await connection.flush(5)
                await asyncio.sleep(0)
        connection.publish("t.kept.a", b"yes")
        await kept.until(1)
        assert any("taken" in str(line.get("error")) for line in logs)
        held_before = len(taken.messages)
        server.allowed = "t.>"
        server.kill()
        server.start()
        await _next_call(connection.on_connected)
        connection.publish("t.taken.a", b"again")
        await taken.until(held_before + 1)


class Relay:
    """Between client and server; can swallow everything without a word, as a broken network does."""

    def __init__(self, server: NatsServer) -> None:
        self._server = server
        self._tasks = TaskOwner("relay")
        self._is_swallowing: set[int] = set()
        self._count = 0
        self.url = ""

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Relay]:
        listener = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        self.url = f"nats://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            listener.close()
            await self._tasks.close(2)

    def swallow(self) -> None:
        """Swallow what comes over the connections of now; new ones work."""
        self._is_swallowing.update(range(1, self._count + 1))

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._count += 1
        number = self._count
        upstream_reader, upstream_writer = await asyncio.open_connection("127.0.0.1", self._server.port)
        self._tasks.start(self._pump(number, reader, upstream_writer), "up")
        self._tasks.start(self._pump(number, upstream_reader, writer), "down")

    async def _pump(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(OSError):
                while data := await reader.read(65536):
                    if number not in self._is_swallowing:
                        writer.write(data)
                        await writer.drain()
        finally:
            writer.close()


@on_each_loop
async def test_a_connection_that_is_open_on_one_side_only_is_given_up_and_made_anew(
    server: NatsServer,
) -> None:
    server.start()
    async with (
        connected(server) as peer,
        Relay(server).running() as relay,
        connected(server, servers=[relay.url], ping_interval_s=0.05) as connection,
    ):
        heard = Collector()
        connection.subscribe("t.a", heard)
        await _usable(connection)
        back = _next_call(connection.on_connected)
        with capture_logs() as logs:
            relay.swallow()
            with pytest.raises(BusUnavailable):
                await connection.flush(5)
            await back
        assert _disconnects(logs)[0] == "the server did not answer 2 pings"
        while not heard.messages:  # a moment without an answer is taken for the same again
            await _usable(connection)
            peer.publish("t.a", b"hello")
            await peer.flush(5)
            await _usable(connection)


@on_each_loop
async def test_a_flood_that_waits_for_room_arrives_whole_and_in_bounded_memory(server: NatsServer) -> None:
    server.start()
    async with connected(server, pending_bytes_max=1_000_000) as sender, connected(server) as reader:
        heard = Collector()
        reader.subscribe("t.flood", heard)
        await reader.flush(5)
        most = 0
        for number in range(20_000):
            sender.publish("t.flood", b"%d" % number + b" " * 1000)
            most = max(most, sender.pending_bytes)
            if number % 100 == 99:
                await sender.wait_writable()
        await heard.until(20_000)
        assert most < 1_000_000
        assert [int(payload) for payload in heard.payloads] == list(range(20_000))


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")
@on_each_loop
async def test_a_server_that_wants_the_handshake_first_is_spoken_to_when_that_was_said(
    tmp_path: Path,
) -> None:
    certificate, key = _self_signed_certificate(tmp_path)
    with NatsServer(tmp_path, _tls(certificate, key, "handshake_first: true")) as server:
        secure = {"servers": [server.url.replace("nats:", "tls:")], "tls_ca_file": str(certificate)}
        async with connected(server, **secure, tls_first=True) as connection:
            heard = Collector()
            connection.subscribe("t.a", heard)
            back = _next_call(connection.on_connected)
            server.kill()
            server.start()
            await back
            connection.publish("t.a", b"hello")
            await heard.until(1)
        waits = BusConnection(_options(server, **secure, connect_timeout_s=0.2), random.Random(0))
        with pytest.raises(BusUnavailable, match="no answer within"):
            await waits.connect(0.2)
        distrusts = {**secure, **_ONE_TRY, "tls_ca_file": None}
        await _is_refused(_options(server, **distrusts, tls_first=True), "certificate")


@on_each_loop
async def test_no_bytes_of_a_hostile_server_keep_the_client_from_coming_back() -> None:
    chance = random.Random(3)
    served = 0
    enough = asyncio.Event()

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal served
        served += 1
        with contextlib.suppress(OSError):
            writer.write(b'INFO {"max_payload":1000}\r\n')
            while not (await reader.readline()).startswith(b"PING"):
                pass
            good = b"PONG\r\nMSG t.a 1 5\r\nhello\r\nHMSG t.a 1 12 12\r\nNATS/1.0\r\n\r\n\r\n+OK\r\n-ERR 'no'\r\n"
            at = chance.randrange(6, len(good))
            writer.write(good[:at] + chance.randbytes(20) + good[at:])
            await writer.drain()
            writer.write_eof()
            await reader.read()
        writer.close()
        if served >= 100:
            enough.set()

    listener = await asyncio.start_server(greet, "127.0.0.1", 0)
    options = BusOptions(
        servers=[f"nats://127.0.0.1:{listener.sockets[0].getsockname()[1]}"],
        reconnect_wait_min_s=0.001,
        reconnect_wait_max_s=0.002,
    )
    async with listener:
        connection = BusConnection(options, chance)
        with capture_logs() as logs:
            await connection.connect(5)
            connection.subscribe("t.a", Collector())
            await enough.wait()
        assert connection.reconnects >= 10
        assert "bus_callback_failed" not in {line["event"] for line in logs}
        await connection.close()


@on_each_loop
async def test_a_server_that_hangs_is_noticed_and_what_it_held_comes_with_its_thaw(
    server: NatsServer,
) -> None:
    """No connection breaks by it, and nothing that was sent meanwhile is lost."""
    server.start()
    loop = asyncio.get_running_loop()
    quick = {"ping_interval_s": 0.2, "outstanding_pings_max": 1_000}
    async with connected(server, **quick) as here, connected(server, **quick) as there:
        heard, again = Collector(), []
        there.subscribe("t.held", heard)
        await there.flush(5)
        here.on_bus_responds_again.append(again.append)
        assert here.is_responding
        started_at = loop.time()
        server.send(signal.SIGSTOP)
        try:
            await eventually(lambda: not here.is_responding and not there.is_responding)
            assert here.is_connected
            here.publish("t.held", b"1")
            await asyncio.sleep(0.3)  # what must not come has no event
            assert not heard.payloads
        finally:
            server.send(signal.SIGCONT)
        await eventually(lambda: here.is_responding and there.is_responding and heard.payloads)
        assert heard.payloads == [b"1"]
        assert here.reconnects == there.reconnects == 0
        assert len(again) == 1
        assert started_at - 0.5 < again[0] < loop.time() - 0.2


@on_each_loop
async def test_who_dials_a_server_that_hangs_is_let_in_in_the_moment_of_its_thaw(server: NatsServer) -> None:
    server.start()
    options = {"ping_interval_s": 0.1, "outstanding_pings_max": 3, "connect_timeout_s": 0.5}
    async with connected(server, **options, reconnect_wait_max_s=60.0) as client:
        again: list[float] = []
        client.on_bus_responds_again.append(again.append)
        back = _next_call(client.on_connected)
        server.send(signal.SIGSTOP)
        try:
            await eventually(lambda: not client.is_connected)
            # With waits that double up to a minute it would knock seldom by now.
            await asyncio.sleep(3.0)
        finally:
            server.send(signal.SIGCONT)
        async with asyncio.timeout(5):
            await back
        assert len(again) == 1

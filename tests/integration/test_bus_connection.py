"""The lean client against a real nats-server, on asyncio's own loop and on uvloop."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import random
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import uvloop
from structlog.testing import capture_logs

from serve_common.errors import BusAuthorizationFailed, BusUnavailable
from serve_common.nats.connection import BusConnection, Inbox, generate_tokens
from serve_common.nats.options import (
    BusOptions,
    InboxFull,
    InvalidSubject,
    NotConnected,
    OutboundFull,
    PayloadTooLarge,
)
from serve_common.nats.protocol import MessageCallback, encode_headers, parse_headers
from tests.support.servers import nats_server
from tests.support.servers.reserved_port import HeldPort
from tests.support.waiting import eventually

_LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
_LIMIT_S = 50.0
"""For what takes a moment on a quiet machine, and has no limit of its own on a busy one."""
_FAST = {"reconnect_wait_min_s": 0.01, "reconnect_wait_max_s": 0.05}
_ONE_TRY = {"connect_timeout_s": _LIMIT_S, "reconnect_wait_min_s": 1000.0, "reconnect_wait_max_s": 1000.0}
"""For `connect` to tell what the first try ended with: there is all the time for it, and none for another one."""


def on_each_loop(scenario: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run an async test once per kind of event loop."""

    @pytest.mark.parametrize("loop_name", _LOOPS)
    @functools.wraps(scenario)
    def test(loop_name: str, **fixtures: object) -> None:
        with asyncio.Runner(loop_factory=_LOOPS[loop_name]) as runner:
            runner.run(asyncio.wait_for(scenario(**fixtures), _LIMIT_S))

    signature = inspect.signature(scenario)
    loop_parameter = inspect.Parameter("loop_name", inspect.Parameter.KEYWORD_ONLY)
    test.__signature__ = signature.replace(parameters=[*signature.parameters.values(), loop_parameter])
    return test


class NatsServer(nats_server.NatsServer):
    """One with a user, whose password and permissions may change while it runs."""

    def __init__(self, directory: Path, extra: str = "") -> None:
        super().__init__(directory)
        self.password = "app-secret"
        self.allowed = "t.>"
        self.extra = extra
        """Of the configuration."""

    def start(self) -> None:
        self._configure()
        super().start()

    def reload(self) -> None:
        """Let the running server read its configuration, password and permissions included, again."""
        self._configure()
        (self.directory / "nats.conf").write_text(self._config)
        self.send(signal.SIGHUP)

    def _configure(self) -> None:
        subjects = f'["{self.allowed}", "_INBOX_app.>"]'
        permissions = f"{{ publish: {subjects}, subscribe: {subjects} }}"
        users = f'users: [{{ user: app, password: "{self.password}", permissions: {permissions} }}]'
        # Who connects may stand still before it says who it is.
        self._config = f"authorization {{ timeout: {_LIMIT_S:g}, {users} }}\n{self.extra}\n"

    def send(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    with NatsServer(tmp_path) as server:
        yield server


def _options(server: NatsServer, **changes: object) -> BusOptions:
    settings: dict[str, object] = {
        "servers": [server.url],
        "user": "app",
        "password": "app-secret",
        "inbox_prefix": "_INBOX_app",
    }
    return BusOptions(**(settings | _FAST | changes))


@contextlib.asynccontextmanager
async def connected(server: NatsServer, **changes: object) -> AsyncIterator[BusConnection]:
    connection = BusConnection(_options(server, **changes), random.Random(0))
    await connection.connect(10)
    try:
        yield connection
    finally:
        await connection.close()


async def _is_refused(options: BusOptions, reason: str) -> None:
    """That the first try to connect ends so."""
    with pytest.raises(BusUnavailable, match=reason):
        await BusConnection(options, random.Random(0)).connect(_LIMIT_S)


class Collector:
    """Keeps what a subscription heard, and can be waited on."""

    def __init__(self) -> None:
        self.messages: list[tuple[bytes, bytes, bytes, bytes | None]] = []
        self._came = asyncio.Event()

    def __call__(self, subject: bytes, reply: bytes, payload: bytes, headers: bytes | None) -> None:
        self.messages.append((subject, reply, payload, headers))
        self._came.set()

    @property
    def payloads(self) -> list[bytes]:
        return [payload for _, _, payload, _ in self.messages]

    async def until(self, count: int) -> None:
        while len(self.messages) < count:
            self._came.clear()
            await self._came.wait()


def _next_call(listeners: list[Callable[[], None]]) -> Awaitable[None]:
    """Resolves the next time that the connection calls its listeners."""
    called: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def listener() -> None:
        listeners.remove(listener)
        called.set_result(None)

    listeners.append(listener)
    return called


async def _usable(connection: BusConnection) -> None:
    """Until the server has answered; of a connection that is given up early, and so by mistake now and then."""
    while True:
        with contextlib.suppress(BusUnavailable):
            await connection.flush(_LIMIT_S)
            return
        await asyncio.sleep(0.01)


def _echo(connection: BusConnection) -> MessageCallback:
    return lambda _subject, reply, payload, headers: connection.publish(reply, payload, headers=headers)


@on_each_loop
async def test_messages_arrive_in_order_with_reply_and_headers(server: NatsServer) -> None:
    async with connected(server) as sender, connected(server) as receiver:
        heard = Collector()
        receiver.subscribe("t.a.*", heard)
        await receiver.flush(5)
        headers = encode_headers([("traceparent", "00-1"), ("x", "y")])
        for number in range(1000):
            sender.publish(b"t.a.1", b"%d" % number)
        sender.publish("t.a.2", b"last", b"t.back", headers)
        await heard.until(1001)
        assert heard.messages[0] == (b"t.a.1", b"", b"0", None)
        assert heard.payloads[:-1] == [b"%d" % number for number in range(1000)]
        subject, reply, payload, block = heard.messages[-1]
        assert (subject, reply, payload) == (b"t.a.2", b"t.back", b"last")
        assert parse_headers(block or b"") == [("traceparent", "00-1"), ("x", "y")]


@on_each_loop
async def test_a_large_payload_comes_back_whole_between_small_ones(server: NatsServer) -> None:
    async with connected(server) as connection:
        heard = Collector()
        connection.subscribe("t.echo", _echo(connection))
        connection.subscribe("t.back", heard)
        large = random.Random(1).randbytes(800 * 1024)
        for payload in (b"before", large, b"after", b"", large):
            connection.publish("t.echo", payload, b"t.back")
        await heard.until(5)
        assert heard.payloads == [b"before", large, b"after", b"", large]


@on_each_loop
async def test_a_payload_above_the_servers_limit_is_refused_here_and_the_connection_stays(
    server: NatsServer,
) -> None:
    async with connected(server) as connection:
        assert connection.max_payload == 1024 * 1024
        with pytest.raises(
            PayloadTooLarge, match="message of 1048577 bytes: the server takes at most 1048576"
        ):
            connection.publish("t.a", b"x" * (1024 * 1024 + 1))
        with pytest.raises(PayloadTooLarge):
            connection.publish("t.a", b"x" * (1024 * 1024 - 5), headers=encode_headers([]))
        with pytest.raises(InvalidSubject):
            connection.publish("t.a\r\nPUB t.b 0\r\n", b"")
        await connection.flush(5)


@on_each_loop
async def test_replies_reach_the_request_that_they_belong_to(server: NatsServer) -> None:
    async with connected(server) as client, connected(server) as replica:
        replica.subscribe("t.echo", _echo(replica))
        await replica.flush(5)
        inbox = Inbox(client, "client1", open_max=3)
        first, second = Collector(), Collector()
        no_responders: list[str] = []

        def request(collector: Collector, payload: bytes) -> bytes:
            token, reply = inbox.new_reply(
                lambda payload, reply, headers: collector(b"", reply, payload, headers),
                lambda: no_responders.append("unexpected"),
            )
            client.publish("t.echo", payload, reply)
            return token

        first_token, second_token = request(first, b"1"), request(second, b"2")
        await asyncio.gather(first.until(1), second.until(1))
        assert (first.payloads, second.payloads, no_responders) == ([b"1"], [b"2"], [])
        assert len(first_token) == len(second_token) == 16
        request(first, b"3")
        with pytest.raises(InboxFull):
            request(first, b"4")
        inbox.forget(first_token)
        inbox.forget(first_token)
        assert len(inbox) == 2
        client.publish(b"_INBOX_app.client1." + first_token, b"late")
        client.publish("_INBOX_app.client1.nonsense", b"odd")
        await client.flush(5)
        await first.until(2)
        assert first.payloads == [b"1", b"3"]


@on_each_loop
async def test_who_gets_one_request_cannot_answer_another(server: NatsServer) -> None:
    """A replica learns the reply subject of what it is sent, and tries those around it."""
    async with connected(server) as client, connected(server) as replica:
        asked: asyncio.Queue[bytes] = asyncio.Queue()
        replica.subscribe("t.mine", lambda _subject, reply, _payload, _headers: asked.put_nowait(reply))
        await replica.flush(5)
        inbox = Inbox(client, "client1")
        own, others = Collector(), Collector()

        def request(subject: str, collector: Collector) -> None:
            _, reply = inbox.new_reply(
                lambda payload, reply, headers: collector(b"", reply, payload, headers), lambda: None
            )
            client.publish(subject, b"?", reply)

        for _ in range(20):
            request("t.other", others)
        request("t.mine", own)
        for _ in range(20):
            request("t.other", others)
        learnt = await asked.get()
        prefix, _, token = learnt.rpartition(b".")
        near = [*range(-50, 0), *range(1, 51)]
        base = 10 if token.isdigit() and len(token) < 16 else 16
        for guess in (int(token, base) + step for step in near):
            text = b"%d" % guess if base == 10 else b"%016x" % guess
            replica.publish(prefix + b"." + text, b"forged")
        replica.publish(learnt, b"mine")
        await own.until(1)
        await client.flush(5)
        assert own.payloads == [b"mine"]
        assert others.payloads == []


def test_reply_tokens_are_of_64_random_bits_and_never_meet() -> None:
    tokens = [token for _ in range(40) for token in generate_tokens()]
    assert len({*tokens}) == len(tokens) == 40 * 256
    assert {len(token) for token in tokens} == {16}
    ones = [int(token, 16).bit_count() for token in tokens]
    assert 31 < sum(ones) / len(ones) < 33
    for bit in range(64):
        share = sum(int(token, 16) >> bit & 1 for token in tokens) / len(tokens)
        assert 0.45 < share < 0.55, f"bit {bit} hardly changes"


@on_each_loop
async def test_a_request_that_nobody_hears_is_told_so_at_once(server: NatsServer) -> None:
    async with connected(server) as connection:
        inbox = Inbox(connection, "client1")
        told: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        _, reply = inbox.new_reply(
            lambda *_message: told.set_result("reply"), lambda: told.set_result("no responders")
        )
        connection.publish("t.nobody", b"hello", reply)
        assert await told == "no responders"
        inbox.close()
        assert len(inbox) == 0


@on_each_loop
async def test_a_server_that_is_killed_and_restarted_is_found_again(server: NatsServer) -> None:
    async with connected(server) as connection:
        heard = Collector()
        connection.subscribe("t.a", heard)
        lost = _next_call(connection.on_disconnected)
        server.kill()
        await lost
        assert not connection.is_connected
        with pytest.raises(NotConnected):
            connection.publish("t.a", b"lost")
        with pytest.raises(NotConnected):
            await connection.flush(1)
        while_away = Collector()
        connection.subscribe("t.b", while_away)
        back = _next_call(connection.on_connected)
        server.start()
        await back
        assert (connection.is_connected, connection.reconnects) == (True, 1)
        connection.publish("t.a", b"1")
        connection.publish("t.b", b"2")
        await asyncio.gather(heard.until(1), while_away.until(1))
        assert (heard.payloads, while_away.payloads) == ([b"1"], [b"2"])


@on_each_loop
async def test_what_a_listener_publishes_on_reconnect_follows_the_subscriptions(server: NatsServer) -> None:
    async with connected(server) as connection:
        heard = Collector()
        connection.subscribe("t.a", heard)
        connection.on_connected.append(lambda: connection.publish("t.a", b"hello again"))
        server.kill()
        server.start()
        await heard.until(1)
        assert heard.payloads == [b"hello again"]


@on_each_loop
async def test_a_wrong_password_and_none_fail_connect_at_once(server: NatsServer) -> None:
    for changes in ({"password": "guess"}, {"user": None, "password": None}):
        connection = BusConnection(_options(server, **changes), random.Random(0))
        with pytest.raises(BusAuthorizationFailed, match="Authorization Violation"):
            await connection.connect(60)
        assert not connection.is_connected
        await connection.close()


async def test_connecting_to_nobody_fails_when_the_time_is_over_and_names_the_reason() -> None:
    nobody = HeldPort()
    servers = [f"nats://127.0.0.1:{nobody.port}"]
    with pytest.raises(BusUnavailable, match=r"no NATS server let us in for 0.2 s: nats://127.0.0.1:\d+: "):
        await BusConnection(BusOptions(servers=servers, **_FAST), random.Random(0)).connect(0.2)
    reason = rf"no NATS server let us in for {_LIMIT_S} s: nats://127.0.0.1:\d+: .*Errno 111"
    await _is_refused(BusOptions(servers=servers, **_ONE_TRY), reason)


@on_each_loop
async def test_a_refused_permission_is_counted_and_the_connection_stays(server: NatsServer) -> None:
    async with connected(server) as connection:
        with capture_logs() as logs:
            connection.publish("serve.admin.deploy", b"{}")
            connection.subscribe("serve.admin.deploy", Collector())
            await connection.flush(5)
        assert connection.permission_violations == 2
        assert connection.is_connected
        assert "serve.admin.deploy" in next(
            line["error"] for line in logs if line["event"] == "bus_server_error"
        )


@on_each_loop
async def test_a_callback_that_raises_is_logged_and_later_messages_still_arrive(server: NatsServer) -> None:
    async with connected(server) as connection:
        heard = Collector()

        def raises_on_odd(subject: bytes, reply: bytes, payload: bytes, headers: bytes | None) -> None:
            if int(payload) % 2:
                raise ValueError(payload)
            heard(subject, reply, payload, headers)

        connection.subscribe("t.a", raises_on_odd)
        loop = asyncio.get_running_loop()
        began = loop.time()
        with capture_logs() as logs:
            for number in range(6):
                connection.publish("t.a", b"%d" % number)
            await connection.flush(5)
        assert heard.payloads == [b"0", b"2", b"4"]
        failures = [line for line in logs if line["event"] == "bus_callback_failed"]
        assert str(failures[0]["exc_info"]) == str(ValueError(b"1"))
        assert len(failures) <= 1 + int(loop.time() - began)  # one a second


@on_each_loop
async def test_a_queue_group_gives_each_message_to_one_member(server: NatsServer) -> None:
    async with connected(server) as connection:
        first, second = Collector(), Collector()
        connection.subscribe("t.a", first, queue="group")
        connection.subscribe("t.a", second, queue=b"group")
        for number in range(200):
            connection.publish("t.a", b"%d" % number)
        await connection.flush(5)
        assert sorted(first.payloads + second.payloads, key=int) == [b"%d" % number for number in range(200)]
        assert first.payloads
        assert second.payloads


@on_each_loop
async def test_draining_loses_nothing_that_the_server_has_taken(server: NatsServer) -> None:
    async with connected(server) as sender:
        receiver = BusConnection(_options(server), random.Random(0))
        await receiver.connect(10)
        one, all_others = Collector(), Collector()
        subscription = receiver.subscribe("t.one", one)
        other = receiver.subscribe("t.other", all_others)
        await receiver.flush(5)
        for _ in range(500):
            sender.publish("t.one", b"x" * 100)
            sender.publish("t.other", b"x" * 100)
        await sender.flush(5)
        await subscription.drain(5)
        assert len(one.messages) == 500
        sender.publish("t.one", b"after")
        sender.publish("t.other", b"before")
        await sender.flush(5)
        await other.drain(5)
        await receiver.close()
        assert (len(one.messages), len(all_others.messages)) == (500, 501)
        assert not receiver.is_connected
        with pytest.raises(NotConnected):
            receiver.subscribe("t.one", one)


@on_each_loop
async def test_what_was_published_before_close_still_arrives(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A server that takes nothing for a second is not waited for; this one may be that slow.
    monkeypatch.setattr("serve_common.nats.connection._CLOSE_TIMEOUT_S", _LIMIT_S)
    async with connected(server) as receiver:
        heard = Collector()
        receiver.subscribe("t.a", heard)
        await receiver.flush(5)
        async with connected(server) as sender:
            for _ in range(10):
                sender.publish("t.a", b"x" * 500_000)
            await sender.close()
        await heard.until(10)


@on_each_loop
async def test_a_server_that_falls_silent_is_noticed_by_pings(server: NatsServer) -> None:
    async with connected(server, ping_interval_s=0.05, connect_timeout_s=0.1) as connection:
        lost = _next_call(connection.on_disconnected)
        back = _next_call(connection.on_connected)
        with capture_logs() as logs:
            server.send(signal.SIGSTOP)
            await lost
        [line] = [line for line in logs if line["event"] == "bus_disconnected"]
        assert line["reason"] == "the server did not answer 2 pings"
        server.send(signal.SIGCONT)
        await back
        await _usable(connection)


@on_each_loop
async def test_a_quiet_but_living_server_keeps_its_connection(server: NatsServer) -> None:
    async with connected(server, ping_interval_s=60) as connection:
        link = connection._link
        assert link is not None
        for _ in range(10):
            link._ping()  # as its timer does, but never before the server could answer the last one
            await connection.flush(5)
        assert connection._link is link
        assert connection.reconnects == 0


@on_each_loop
async def test_a_slow_server_pauses_writers_and_never_fills_memory(server: NatsServer) -> None:
    limit = 20 * 1024 * 1024
    async with connected(server, pending_bytes_max=limit, ping_interval_s=60) as connection:
        heard = Collector()
        connection.subscribe("t.a", heard)
        await connection.wait_writable()
        server.send(signal.SIGSTOP)
        sent = 0
        while connection.pending_bytes + 1_000_000 <= limit:
            connection.publish("t.a", b"x" * 1_000_000)
            sent += 1
        with pytest.raises(OutboundFull, match="bytes wait for the server to take them"):
            connection.publish("t.a", b"x" * 1_000_000)
        assert limit - 1_100_000 < connection.pending_bytes <= limit
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(connection.wait_writable(), 0.05)
        server.send(signal.SIGCONT)
        await connection.wait_writable()
        await heard.until(sent)
        assert connection.pending_bytes < 1_000_000


@on_each_loop
async def test_a_writer_that_waits_is_woken_by_the_loss_of_the_connection(server: NatsServer) -> None:
    async with connected(server, ping_interval_s=60) as connection:
        server.send(signal.SIGSTOP)
        for _ in range(20):
            connection.publish("t.a", b"x" * 1_000_000)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(connection.wait_writable(), 0.05)
        server.kill()
        with pytest.raises(NotConnected):
            await connection.wait_writable()


@on_each_loop
async def test_a_lame_duck_is_left_for_another_server(server: NatsServer, tmp_path: Path) -> None:
    with NatsServer(tmp_path / "other") as other:
        # The first of them is the one that leaves, however slow it is.
        both = {"servers": [server.url, other.url], "connect_timeout_s": _LIMIT_S}
        async with connected(server, **both) as connection, connected(other) as peer:
            back = _next_call(connection.on_connected)
            heard = Collector()
            connection.subscribe("t.a", heard)
            server.send(signal.SIGUSR2)
            await back
            await connection.flush(5)
            peer.publish("t.a", b"hello from the other")
            await heard.until(1)


@on_each_loop
async def test_a_lone_lame_duck_is_kept_while_it_lives(server: NatsServer) -> None:
    async with connected(server) as connection:
        with capture_logs() as logs:
            server.send(signal.SIGUSR2)
            while not any(line["event"] == "bus_server_leaves" for line in logs):
                await connection.flush(5)
        assert connection.is_connected


@on_each_loop
async def test_a_first_server_that_is_away_does_not_keep_the_second_from_being_used(
    server: NatsServer,
) -> None:
    away = HeldPort()
    servers = [f"nats://127.0.0.1:{away.port}", server.url]
    async with connected(server, servers=servers) as connection:
        await connection.flush(5)


@on_each_loop
async def test_a_closed_connection_stays_closed(server: NatsServer) -> None:
    async with connected(server) as connection:
        with pytest.raises(RuntimeError, match="connect succeeds once"):
            await connection.connect(1)
        await connection.close()
        await connection.close()
        assert (connection.is_connected, connection.max_payload, connection.pending_bytes) == (False, 0, 0)
        with pytest.raises(NotConnected):
            connection.publish("t.a", b"")


@contextlib.asynccontextmanager
async def _peer_that_says(greeting: bytes) -> AsyncIterator[str]:
    async def greet(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting)
        writer.close()  # when it is written; at once, so that it is closed whatever ends this task
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    listener = await asyncio.start_server(greet, "127.0.0.1", 0)
    async with listener:
        yield f"127.0.0.1:{listener.sockets[0].getsockname()[1]}"


@on_each_loop
async def test_a_peer_that_does_not_speak_nats_is_named_as_such() -> None:
    async with _peer_that_says(b"SSH-2.0-OpenSSH_9.2\r\n") as address:
        await _is_refused(BusOptions(servers=[f"nats://{address}"], **_ONE_TRY), "unknown verb b'SSH-2")


@on_each_loop
async def test_credentials_are_not_sent_in_the_clear_where_tls_was_asked_for(server: NatsServer) -> None:
    url = server.url.replace("nats:", "tls:")
    await _is_refused(_options(server, servers=[url], **_ONE_TRY), "the server does not offer TLS")


def _self_signed_certificate(directory: Path) -> tuple[Path, Path]:
    certificate, key = directory / "cert.pem", directory / "key.pem"
    request = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    where = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate]
    subprocess.run([*request.split(), *where], check=True, capture_output=True)
    return certificate, key


def _tls(certificate: Path, key: Path, more: str = "") -> str:
    """Of the server's configuration; a client that stands still in the handshake is waited for."""
    return f'tls {{ cert_file: "{certificate}", key_file: "{key}", timeout: {_LIMIT_S:g}, {more} }}'


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")
@on_each_loop
async def test_a_tls_server_is_spoken_to_when_its_authority_is_trusted(tmp_path: Path) -> None:
    certificate, key = _self_signed_certificate(tmp_path)
    with NatsServer(tmp_path, _tls(certificate, key)) as server:
        secure_url = server.url.replace("nats:", "tls:")
        async with connected(server, servers=[secure_url], tls_ca_file=str(certificate)) as connection:
            heard = Collector()
            connection.subscribe("t.a", heard)
            large = random.Random(1).randbytes(800 * 1024)
            connection.publish("t.a", large)
            await heard.until(1)
            assert heard.payloads == [large]
        await _is_refused(_options(server, servers=[secure_url], **_ONE_TRY), "certificate")
        await _is_refused(_options(server, **_ONE_TRY), "requires TLS")


# A bus connection that logs in anew while messages go both ways: none is lost, doubled or overtaken.

_RENEWALS = 20


@pytest.mark.parametrize("is_shared", [False, True])
async def test_renewals_lose_double_and_reorder_nothing(server: NatsServer, *, is_shared: bool) -> None:
    """Two peers count towards each other as fast as they can, in bursts, while one of them renews."""
    heard_here: list[int] = []
    heard_there: list[int] = []
    async with connected(server, is_shared=is_shared) as here, connected(server) as there:
        here.subscribe("t.here.>", lambda _s, _r, payload, _h: heard_here.append(int(payload)))
        here.subscribe("t.queue", lambda _s, _r, payload, _h: heard_here.append(int(payload)), queue="group")
        there.subscribe("t.there", lambda _s, _r, payload, _h: heard_there.append(int(payload)))
        await here.flush(_LIMIT_S)
        await there.flush(_LIMIT_S)
        losses = 0

        def lost() -> None:
            nonlocal losses
            losses += 1

        here.on_disconnected.append(lost)
        is_over = False
        sent = 0

        async def talk() -> None:
            nonlocal sent
            while not is_over:
                for _ in range(20):
                    there.publish("t.here.x", b"%d" % sent)
                    here.publish("t.there", b"%d" % sent)
                    sent += 1
                await asyncio.sleep(0)

        async with asyncio.timeout(_LIMIT_S), asyncio.TaskGroup() as tasks:
            tasks.create_task(talk())
            for _ in range(_RENEWALS):
                before = sent
                assert await here.renew()
                while sent < before + 200:  # noqa: ASYNC110 - the other task tells nobody
                    await asyncio.sleep(0)
            is_over = True
        await there.flush(_LIMIT_S)
        await here.flush(_LIMIT_S)
        await there.flush(_LIMIT_S)
        await eventually(lambda: len(heard_here) >= sent and len(heard_there) >= sent, within_s=_LIMIT_S)
        assert heard_here == list(range(sent))
        assert heard_there == list(range(sent))
        assert losses == 0
        assert here.reconnects == 0


class _ServerWithAStalledThread:
    """Speaks as nats-server when it stalls between looking up a message's subscribers and delivering it.

    The message goes to the first connection alone, if that still subscribes, though a second one has meanwhile
    subscribed too.
    """

    def __init__(self) -> None:
        self._connections = 0
        self._first: asyncio.StreamWriter | None = None
        self._first_subscribes = False

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections += 1
        is_first = self._connections == 1
        if is_first:
            self._first = writer
        has_subscribed = False
        writer.write(b'INFO {"server_id":"x","version":"2.12.0","max_payload":1048576,"headers":true}\r\n')
        while line := await reader.readline():
            verb = line.split()[0]
            if verb == b"SUB":
                has_subscribed = True
            elif verb == b"PING":
                writer.write(b"PONG\r\n")
                if has_subscribed and not is_first:
                    asyncio.get_running_loop().call_later(0.1, self._deliver)
            if is_first:
                self._first_subscribes = has_subscribed and verb != b"UNSUB"
        writer.close()

    def _deliver(self) -> None:
        assert self._first is not None
        if self._first_subscribes:
            self._first.write(b"MSG t.x 1 4\r\nlate\r\n")
            self._first_subscribes = False


@on_each_loop
async def test_a_renewal_does_not_outrun_a_thread_of_the_server() -> None:
    listener = await asyncio.start_server(_ServerWithAStalledThread().serve, "127.0.0.1", 0)
    async with listener:
        url = f"nats://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        connection = BusConnection(BusOptions(servers=[url], **_FAST), random.Random(0))
        await connection.connect(_LIMIT_S)
        heard: list[bytes] = []
        connection.subscribe("t.x", lambda _s, _r, payload, _h: heard.append(payload))
        await connection.flush(_LIMIT_S)
        assert await connection.renew()
        await connection.close()
        assert heard == [b"late"]


async def test_what_is_subscribed_meanwhile_is_heard_and_what_was_ended_is_not(server: NatsServer) -> None:
    heard: list[bytes] = []
    async with connected(server) as here, connected(server) as there:
        ended = here.subscribe("t.ended", lambda _s, _r, payload, _h: heard.append(payload))
        async with asyncio.timeout(_LIMIT_S), asyncio.TaskGroup() as tasks:
            renewing = tasks.create_task(here.renew())
            await asyncio.sleep(0)
            ended.unsubscribe()
            here.subscribe("t.begun", lambda _s, _r, payload, _h: heard.append(payload))
        assert renewing.result()
        await here.flush(_LIMIT_S)
        there.publish("t.ended", b"ended")
        there.publish("t.begun", b"begun")
        await there.flush(_LIMIT_S)
        await here.flush(_LIMIT_S)
        assert heard == [b"begun"]


async def test_a_renewal_that_is_refused_leaves_the_old_link_in_use(server: NatsServer) -> None:
    async with connected(server) as here:
        heard = asyncio.Event()
        here.subscribe("t.x", lambda *_: heard.set())
        await here.flush(_LIMIT_S)
        server.send(signal.SIGSTOP)
        assert not await asyncio.wait_for(here.renew(), _LIMIT_S)
        server.send(signal.SIGCONT)
        here.publish("t.x", b"")
        await asyncio.wait_for(heard.wait(), _LIMIT_S)
        assert here.reconnects == 0

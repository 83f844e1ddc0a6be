"""The admin client's retries, waits and errors against a bus that a test plays."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from enum import Enum
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import pytest

from muster.client.admin import AdminClient, Caller, default_principal
from muster.client.nats import NatsRequests
from muster.client.requests import (
    ERRORS_BY_CODE,
    AdminReply,
    NoListeners,
    NoReply,
    StackAddress,
    UnknownError,
    parse_urls,
    restore_error,
)
from serve_common.api.commands import ChangeReply, Deploy, Request, SetTraffic
from serve_common.api.queries import (
    COMMANDS,
    PRINCIPAL_LENGTH_MAX,
    VERBS,
    GetHosts,
    GetStatus,
    PagedQuery,
    Plan,
    WaitForGoal,
)
from serve_common.api.views import ErrorView, GoalStatus, GoalView, HostView, PlanView
from serve_common.config.backend import ReplicaConfig
from serve_common.errors import (
    BadField,
    BusAuthorizationFailed,
    BusUnavailable,
    CheckpointUnreadable,
    Conflict,
    DeadlineExceeded,
    FencedOut,
    LimitReached,
    NotFound,
    NotLeading,
    ServeError,
    StoreUnavailable,
    TransientError,
    UserCodeRaised,
)
from serve_common.names import GoalId
from serve_common.nats.protocol import Message
from serve_common.protocol.subjects import Subjects

Reply = AdminReply | Exception
DEPLOY = Deploy(name="digits", replica_config=ReplicaConfig(import_path="digits:Digits"))


class PlayedBus:
    """Answers each request as the test says, and remembers what was sent."""

    def __init__(self, *replies: Reply | Callable[[bytes], Reply]) -> None:
        self._replies = list(replies)
        self.sent: list[tuple[str, bytes, float]] = []
        self.headers: list[Mapping[str, str] | None] = []

    @property
    def where(self) -> str:
        return "nats://played:4222"

    async def request(
        self, subject: str, body: bytes, *, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> AdminReply:
        self.sent.append((subject, body, timeout_s))
        self.headers.append(headers)
        reply = self._replies.pop(0) if len(self._replies) > 1 else self._replies[0]
        await asyncio.sleep(0)
        answer = reply if isinstance(reply, AdminReply | Exception) else reply(body)
        if isinstance(answer, Exception):
            raise answer
        return answer


def ok(value: Any) -> AdminReply:
    return AdminReply(msgspec.json.encode(value))


def failed(code: str, message: str, field: str = "") -> AdminReply:
    view = ErrorView(code=code, message=message, field=field)
    headers = {"Nats-Service-Error": "short", "Nats-Service-Error-Code": "400"}
    return AdminReply(msgspec.json.encode(view), headers)


def client(bus: PlayedBus, **options: Any) -> AdminClient:
    return AdminClient(bus, Subjects(), **{"retry_pause_s": 0.001, "retry_for_s": 5.0, **options})


async def test_a_deploy_is_sent_again_with_the_same_request_id_while_no_controller_answers() -> None:
    reply = ChangeReply(goal_id=GoalId("g1"), updating=True)
    bus = PlayedBus(
        NoListeners("nobody"),
        NoReply("nothing came"),
        BusUnavailable("NATS is away"),
        failed("not_leading", "try again"),
        failed("store_unavailable", "Postgres is away"),
        failed("fenced_out", "epoch 7 began"),
        ok(reply),
    )
    troubles: list[str] = []

    assert await client(bus, on_retry=troubles.append).call(DEPLOY) == reply

    requests = [msgspec.json.decode(body, type=Deploy) for _subject, body, _timeout in bus.sent]
    assert {subject for subject, _body, _timeout in bus.sent} == {"serve.admin.deploy"}
    assert len({request.request_id for request in requests}) == 1
    assert requests[0].request_id
    assert len(troubles) == 6
    assert troubles[0] == "no controller answers at nats://played:4222; is one running?"


async def test_each_deploy_has_a_request_id_of_its_own_unless_the_caller_gives_one() -> None:
    bus = PlayedBus(ok(ChangeReply(goal_id=GoalId("g1"), updating=True)))
    admin = client(bus)
    await admin.call(DEPLOY)
    await admin.call(DEPLOY)
    await admin.call(msgspec.structs.replace(DEPLOY, request_id="mine"))
    ids = [msgspec.json.decode(body, type=Deploy).request_id for _subject, body, _timeout in bus.sent]
    assert len(set(ids)) == 3
    assert ids[2] == "mine"


@pytest.mark.parametrize(
    ("reply", "kind", "text"),
    [
        (NoListeners("nobody"), TransientError, "no controller answers at nats://played:4222"),
        (NoReply("nothing came"), TransientError, "no controller answered in time at nats://played:4222"),
        (failed("store_unavailable", "Postgres is away"), StoreUnavailable, "Postgres is away"),
        (failed("not_leading", "try again"), NotLeading, "try again"),
        (failed("fenced_out", "epoch 7 began"), FencedOut, "epoch 7"),
        (BusUnavailable("NATS is away"), BusUnavailable, "NATS is away"),
    ],
)
async def test_what_may_pass_is_raised_when_the_time_to_retry_is_over(
    reply: Reply, kind: type[ServeError], text: str
) -> None:
    bus = PlayedBus(reply)
    with pytest.raises(kind, match=text):
        await client(bus, retry_for_s=0.02).call(GetStatus())
    assert len(bus.sent) > 1


@pytest.mark.parametrize(
    ("reply", "kind", "text"),
    [
        (failed("not_found", "name: there is no deployment 'x'"), NotFound, "there is no deployment"),
        (failed("conflict", "route_prefix: taken"), Conflict, "taken"),
        (failed("limit_reached", "too many"), LimitReached, "too many"),
        (failed("checkpoint_unreadable", "row 3"), CheckpointUnreadable, "row 3"),
        (failed("of_a_later_version", "something new"), UnknownError, "something new"),
        (BusAuthorizationFailed("refused"), BusAuthorizationFailed, "refused"),
        (AdminReply(b"boom", {"Nats-Service-Error-Code": "500"}), ServeError, "error 500: boom"),
        (AdminReply(b"\xff", {"Nats-Service-Error-Code": "500"}), ServeError, "error 500"),
        (
            AdminReply(
                b'{"error": {"code": "not_found", "message": "no such endpoint", "request_id": "7"}}',
                {"Nats-Service-Error": "short", "Nats-Service-Error-Code": "404"},
            ),
            NotFound,
            "no such endpoint",
        ),
        (
            AdminReply(
                b'{"type": "urn:muster:problem:not_found", "title": "Not Found", "status": 404, '
                b'"detail": "no such endpoint", "code": "not_found", "message": "of whatever", '
                b'"error": {"code": "not_found", "message": "no such endpoint", "request_id": "7"}}',
                {"Nats-Service-Error": "short", "Nats-Service-Error-Code": "404"},
            ),
            NotFound,
            "no such endpoint",
        ),
        (
            AdminReply(b"", {"Nats-Service-Error": "KeyError()", "Nats-Service-Error-Code": "500"}),
            ServeError,
            "KeyError",
        ),
        (AdminReply(b"not json"), ServeError, "the answer to get_status cannot be read"),
    ],
)
async def test_what_cannot_pass_is_raised_at_once(reply: Reply, kind: type[ServeError], text: str) -> None:
    bus = PlayedBus(reply)
    with pytest.raises(ServeError, match=text) as caught:
        await client(bus).call(GetStatus())
    assert type(caught.value) is kind
    assert len(bus.sent) == 1


async def test_a_bad_field_comes_back_with_its_path() -> None:
    bus = PlayedBus(
        failed("bad_field", "backend_config.num_replicas: is -1", field="backend_config.num_replicas")
    )
    with pytest.raises(BadField) as caught:
        await client(bus).call(DEPLOY)
    assert caught.value.field == "backend_config.num_replicas"
    assert str(caught.value) == "backend_config.num_replicas: is -1"


@pytest.mark.parametrize("code", sorted(ERRORS_BY_CODE))
def test_every_error_that_is_sent_comes_back_as_itself(code: str) -> None:
    error = restore_error(ErrorView(code=code, message="f: why", field="f"))
    assert type(error) is ERRORS_BY_CODE[code]
    assert error.error_code == code
    assert str(error) == "f: why"


async def test_waiting_asks_in_slices_and_tells_the_progress_of_each() -> None:
    def pending(message: str) -> AdminReply:
        return ok(GoalView(goal_id=GoalId("g1"), status=GoalStatus.PENDING, message=message))

    done = GoalView(goal_id=GoalId("g1"), status=GoalStatus.SUCCEEDED)
    bus = PlayedBus(pending("0 of 2"), NoListeners("nobody"), pending("1 of 2"), ok(done))
    heard: list[GoalView] = []

    assert await client(bus).wait_for_goal(GoalId("g1"), deadline_s=60, on_progress=heard.append) == done

    assert [view.message for view in heard] == ["0 of 2", "1 of 2", ""]
    for _subject, body, timeout_s in bus.sent:
        asked = msgspec.json.decode(body, type=WaitForGoal)
        assert asked.timeout_s <= 1.0 < timeout_s


async def test_waiting_ends_pending_when_the_deadline_has_passed() -> None:
    bus = PlayedBus(ok(GoalView(goal_id=GoalId("g1"), status=GoalStatus.PENDING, message="needs 4 CPU")))
    view = await client(bus).wait_for_goal(GoalId("g1"), deadline_s=0.02)
    assert view.status is GoalStatus.PENDING
    assert view.message == "needs 4 CPU"


def sample(kind: Any) -> Any:
    """A value of a request's or reply's type, made of what JSON needs at least."""
    simple: dict[Any, Any] = {str: "x", bytes: b"x", int: 1, float: 0.5, bool: True, Any: None}
    if kind in simple or is_named_text(kind):
        return simple.get(kind, "x")
    if isinstance(kind, type) and issubclass(kind, Enum):
        return next(iter(kind))
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Literal:
        return inner[0]
    if origin is list:
        return [sample(inner[0])]
    if origin is dict:
        return {"x": sample(inner[1])}
    if origin in (Union, UnionType):
        return None if type(None) in inner else sample(inner[0])
    required = [field for field in msgspec.structs.fields(kind) if field.required]
    return kind(**{field.name: sample(field.type) for field in required})


def is_named_text(kind: Any) -> bool:
    return getattr(kind, "__supertype__", None) is str


@pytest.mark.parametrize("verb", sorted(VERBS))
async def test_every_request_is_sent_to_its_verb_and_answered_with_its_reply(verb: str) -> None:
    request_type = VERBS[verb]
    request, reply = sample(request_type), sample(request_type.reply_type())
    bus = PlayedBus(ok(reply))
    assert await client(bus).call(request) == reply
    [(subject, body, _timeout)] = bus.sent
    assert subject == f"serve.admin.{verb}"
    sent = msgspec.json.decode(body, type=request_type)
    if getattr(sent, "request_id", None):
        sent = msgspec.structs.replace(sent, request_id=None)
    expected = request if verb not in LISTS else msgspec.structs.replace(request, limit=500)
    assert sent == expected


LISTS = {verb for verb, request_type in VERBS.items() if issubclass(request_type, PagedQuery)}


def test_the_table_has_every_request_once_under_its_own_verb() -> None:
    def concrete(kind: type[Request[Any]]) -> Iterator[type[Request[Any]]]:
        if "verb" in vars(kind) and kind.__module__.startswith("serve_common."):
            yield kind
        for each in kind.__subclasses__():
            yield from concrete(each)

    assert {kind.verb: kind for kind in VERBS.values()} == VERBS
    assert set(concrete(Request)) == set(VERBS.values())
    assert len(VERBS) == 48


@pytest.mark.parametrize("verb", sorted(LISTS))
def test_every_list_is_ordered_by_a_field_of_its_items(verb: str) -> None:
    query = VERBS[verb]
    assert issubclass(query, PagedQuery)
    [item] = get_args(query.reply_type())
    assert get_type_hints(item)[query.ordered_by] is str


@pytest.mark.parametrize("verb", sorted(COMMANDS))
async def test_every_command_says_who_sends_it_and_keeps_its_id_over_retries(verb: str) -> None:
    request_type = COMMANDS[verb]
    bus = PlayedBus(NoListeners("nobody"), ok(sample(request_type.reply_type())))
    await client(bus, principal="ada@desk").call(sample(request_type))
    assert bus.headers == [{"Muster-Principal": "ada@desk"}] * 2
    first, second = (body for _subject, body, _timeout in bus.sent)
    assert first == second
    if "request_id" in request_type.__struct_fields__:
        assert msgspec.json.decode(first)["request_id"]


async def test_queries_say_nothing_of_who_asks() -> None:
    bus = PlayedBus(ok([]))
    await client(bus, principal="ada@desk").call(GetHosts())
    assert bus.headers == [None]


def test_who_we_are_fits_into_a_header() -> None:
    user, _, host = default_principal().partition("@")
    assert user
    assert host
    assert len(default_principal()) <= PRINCIPAL_LENGTH_MAX
    assert default_principal().isascii()


def test_a_user_without_a_name_is_known_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def nameless() -> str:
        raise KeyError("uid not found")

    monkeypatch.setattr("getpass.getuser", nameless)
    monkeypatch.setattr("socket.gethostname", lambda: "h\u00e9\n" + "x" * 300)
    assert default_principal().startswith(f"uid-{os.getuid()}@h??xxx")
    assert len(default_principal()) == PRINCIPAL_LENGTH_MAX


def hosts_after(bus_limit: int, count: int) -> Callable[[bytes], Reply]:
    """A controller with ``count`` hosts, whose bus carries ``bus_limit`` of them at once."""
    names = [f"host-{number:05}" for number in range(count)]

    def answer(body: bytes) -> Reply:
        query = msgspec.json.decode(body, type=GetHosts)
        page = [name for name in names if name > query.after][: query.limit]
        if len(page) > bus_limit:
            return failed("limit_reached", "the answer is too large")
        return ok([msgspec.structs.replace(sample(HostView), host_id=name) for name in page])

    return answer


@pytest.mark.parametrize(("count", "requests"), [(0, 1), (499, 1), (500, 2), (1234, 3)])
async def test_a_long_list_is_fetched_page_by_page(count: int, requests: int) -> None:
    bus = PlayedBus(hosts_after(500, count))
    hosts = await client(bus).call(GetHosts())
    assert [host.host_id for host in hosts] == [f"host-{number:05}" for number in range(count)]
    assert len(bus.sent) == requests


async def test_pages_that_are_too_large_are_asked_for_in_smaller_ones() -> None:
    bus = PlayedBus(hosts_after(40, 100))
    assert len(await client(bus).call(GetHosts())) == 100
    with pytest.raises(LimitReached):
        await client(PlayedBus(hosts_after(0, 100))).call(GetHosts())


async def test_one_page_is_fetched_when_one_is_asked_for() -> None:
    bus = PlayedBus(hosts_after(500, 1234))
    hosts = await client(bus).call(GetHosts(limit=2, after="host-00010"))
    assert [host.host_id for host in hosts] == ["host-00011", "host-00012"]
    assert len(bus.sent) == 1


async def test_a_controller_that_repeats_its_pages_is_not_asked_for_ever() -> None:
    page = [sample(HostView)] * 500
    with pytest.raises(ServeError, match="get_hosts repeats itself"):
        await client(PlayedBus(ok(page))).call(GetHosts())


async def test_a_plan_carries_the_command_as_it_would_be_sent() -> None:
    bus = PlayedBus(ok(PlanView(updating=False, replicas=[], notes=[])))
    await client(bus).call(Plan.for_command(SetTraffic(endpoint="e", weights={"b": 1.0})))
    [(_subject, body, _timeout)] = bus.sent
    assert msgspec.json.decode(body) == {
        "verb": "set_traffic",
        "request": {"endpoint": "e", "weights": {"b": 1.0}},
    }


def caller(bus: PlayedBus, *, retry_for_s: float = 0.02) -> Caller:
    return Caller(bus, Subjects(), retry_for_s=retry_for_s, retry_pause_s=0.001)


async def test_a_call_goes_to_the_endpoints_subject_and_comes_back_raw() -> None:
    bus = PlayedBus(AdminReply(b"\x00raw", {"X-Request-ID": "7"}))
    answer = await caller(bus).call("shop/digits", b"body", headers={}, timeout_s=1)
    assert answer.body == b"\x00raw"
    assert bus.sent[0][:2] == ("serve.call.shop.digits", b"body")


async def test_a_call_that_nobody_heard_is_sent_again_and_any_other_is_not() -> None:
    heard_late = PlayedBus(NoListeners("nobody"), AdminReply(b"7"))
    reply = await caller(heard_late, retry_for_s=5.0).call("digits", b"", headers={}, timeout_s=5)
    assert reply.body == b"7"

    never_heard = PlayedBus(NoListeners("nobody"))
    with pytest.raises(TransientError, match="no proxy answers calls at nats://played:4222"):
        await caller(never_heard).call("digits", b"", headers={}, timeout_s=1)

    lost = PlayedBus(NoReply("nothing came"))
    with pytest.raises(DeadlineExceeded, match="digits did not answer within 1 s"):
        await caller(lost).call("digits", b"", headers={}, timeout_s=1)
    assert len(lost.sent) == 1

    raised = PlayedBus(failed("user_code_raised", "ValueError: no"))
    with pytest.raises(UserCodeRaised, match="ValueError: no"):
        await caller(raised).call("digits", b"", headers={}, timeout_s=1)


def test_urls_are_taken_apart_and_never_show_a_password() -> None:
    parsed = parse_urls("nats://me:p%40ss@a.example, tls://b.example:4333,[::1]", "--nats")
    assert parsed.urls == ("nats://a.example:4222", "tls://b.example:4333", "nats://[::1]:4222")
    assert (parsed.user, parsed.password) == ("me", "p@ss")
    assert "p@ss" not in repr(StackAddress(urls=parsed.urls, password=parsed.password))


@pytest.mark.parametrize(
    "url", ["", "http://a", "nats://", "nats://me:secret@h:port", "nats://me:secret@h:70000"]
)
def test_what_is_no_url_is_refused_by_name_and_without_its_password(url: str) -> None:
    with pytest.raises(BadField, match="--nats") as caught:
        parse_urls(url, "--nats")
    assert "secret" not in str(caught.value)


# Over a bus that a test plays: bytes of NATS' protocol.

INFO = b'INFO {"max_payload": 1048576}\r\n'


class PlayedNats:
    """A server for one client at a time, which lets everybody in and leaves requests to the test."""

    def __init__(self) -> None:
        self.requests: asyncio.Queue[tuple[bytes, asyncio.StreamWriter]] = asyncio.Queue()
        """The subject of each reply, and where to write it."""
        self.connections: list[asyncio.StreamWriter] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections.append(writer)
        writer.write(INFO)
        while line := await reader.readline():
            if line.startswith(b"PING"):
                writer.write(b"PONG\r\n")
            elif line.startswith(b"PUB"):
                self.requests.put_nowait((line.split()[2], writer))
                await reader.readline()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[NatsRequests]:
        async with await asyncio.start_server(self.serve, "127.0.0.1", 0) as server:
            url = f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            requests = NatsRequests(StackAddress(urls=(url,)))
            try:
                yield requests
            finally:
                await requests.close()
                for writer in self.connections:
                    writer.close()


def reply(subject: bytes, payload: bytes) -> bytes:
    return b"MSG %b 1 %d\r\n%b\r\n" % (subject, len(payload), payload)


async def test_who_is_cancelled_as_the_answer_comes_is_cancelled() -> None:
    nats = PlayedNats()
    async with nats.running() as requests:
        asking = asyncio.get_running_loop().create_task(requests.request("s", b"", timeout_s=5.0))
        subject, _writer = await nats.requests.get()
        requests.take_message(Message(subject, 1, b"", b"x"))
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking


async def test_who_was_cancelled_earlier_and_cleans_up_is_answered() -> None:
    nats = PlayedNats()
    async with nats.running() as requests:

        async def clean_up() -> bytes:
            try:
                await asyncio.sleep(30)
            except asyncio.CancelledError:
                answer = await requests.request("s", b"", timeout_s=5.0)
                return answer.body
            raise AssertionError

        cleaning = asyncio.get_running_loop().create_task(clean_up())
        await asyncio.sleep(0)
        cleaning.cancel()
        subject, writer = await nats.requests.get()
        writer.write(reply(subject, b"gone"))
        assert await cleaning == b"gone"


async def test_replies_reach_their_requests_and_late_ones_nobody() -> None:
    nats = PlayedNats()
    async with nats.running() as requests:
        asked = [
            asyncio.get_running_loop().create_task(requests.request("s", b"", timeout_s=5.0))
            for _ in range(2)
        ]
        first, writer = await nats.requests.get()
        second, _writer = await nats.requests.get()
        writer.write(reply(second, b"2") + reply(first, b"1") + reply(first, b"again"))
        assert [each.body for each in await asyncio.gather(*asked)] == [b"1", b"2"]
        with pytest.raises(NoReply, match="nothing came within"):
            await requests.request("s", b"", timeout_s=0.05)
        assert not requests._waiting


async def test_a_lost_connection_ends_its_requests_and_the_next_one_opens_another() -> None:
    nats = PlayedNats()
    async with nats.running() as requests:
        asking = asyncio.get_running_loop().create_task(requests.request("s", b"", timeout_s=60.0))
        _subject, writer = await nats.requests.get()
        writer.transport.abort()
        with pytest.raises(NoReply, match="was lost"):
            await asking
        again = asyncio.get_running_loop().create_task(requests.request("s", b"", timeout_s=60.0))
        subject, writer = await nats.requests.get()
        writer.write(reply(subject, b"here"))
        assert (await again).body == b"here"
        assert len(nats.connections) == 2


async def test_connecting_ends_with_its_cancellation_where_nats_accepts_and_says_nothing() -> None:
    accepted = asyncio.Event()
    connections: list[asyncio.StreamWriter] = []

    async def accept(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        accepted.set()

    async with await asyncio.start_server(accept, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        requests = NatsRequests(StackAddress(urls=(f"nats://127.0.0.1:{port}",)))
        async with asyncio.TaskGroup() as tasks:
            connecting = tasks.create_task(requests.connect(within_s=60.0))
            await accepted.wait()
            await asyncio.sleep(0.05)
            connecting.cancel()
        assert connecting.cancelled()
        assert len(connections) == 1, "it did not try again"
        for writer in connections:
            writer.transport.abort()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

"""What each role may say and hear on the bus, proven on a real server with the very files that compose uses, and with
the plain users of a NATS that has no identities."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import msgspec
import nats
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import NoRespondersError
from nats.js.api import ConsumerConfig
from nats.js.errors import APIError
from nats.js.kv import KeyValue
from nats.micro import ServiceConfig, add_service
from nats.micro.request import Request
from nats.micro.service import EndpointConfig

from muster.secrets import NATS_ROLES, Secrets, generate
from serve_common.api.queries import COMMANDS, OPERATE_VERBS, VIEW_VERBS
from serve_common.api.views import EventView
from serve_common.identities.credentials import (
    SEED_BYTES,
    KeyKind,
    NatsKey,
    encode_base64,
    mint_user,
    parse_credentials_file,
    sign_nonce,
)
from serve_common.identities.roles import ACCOUNT_LIMITS, AccountName, Role, call_tags, inbox_prefix
from serve_common.names import BackendTag, EndpointTag, HostId, ProxyId, replica_tag
from serve_common.nats.bucket_watch import BucketWatch, Entries
from serve_common.nats.client import connect_nats, login_arguments
from serve_common.nats.login import build_login, mint_now
from serve_common.protocol.captures import CapturedMessage, CapturedPair
from serve_common.protocol.subjects import ADMIN_SERVICE, GATEWAY_QUEUE, Subjects, tokens
from serve_common.runtime.settings import BusSettings
from serve_controller.adapters.jetstream import (
    EventStream,
    bucket_config,
    capture_stream_config,
    recent_events,
)
from tests.support.identities import NAMES, bus_settings, lay_out_nats, signing_key
from tests.support.servers.nats_server import NatsServer, until_known
from tests.support.waiting import eventually

SUBJECTS = Subjects()
STREAM = f"KV_{SUBJECTS.bucket}"
ENDPOINT = EndpointTag("shop/digits")
REPLICA_TAG = replica_tag(BackendTag("shop/digits"), 7)
REPLICA = SUBJECTS.replica(REPLICA_TAG)
OTHER_REPLICA_TAG = replica_tag(BackendTag("bank/ledger"), 8)
OTHER_REPLICA = SUBJECTS.replica(OTHER_REPLICA_TAG)
HOST_GOAL = SUBJECTS.host_goal(HostId("host-1"))
HOST_REPORT = SUBJECTS.host_report(HostId("host-1"))
CAPTURE = SUBJECTS.capture(ENDPOINT)
READ_CAPTURES = f"$JS.API.DIRECT.GET.{SUBJECTS.capture_stream}"
EVALUATE = SUBJECTS.host_evaluation(HostId("host-1"))
EVALUATED = SUBJECTS.evaluation_report(HostId("host-1"))
GATE = SUBJECTS.gate("accuracy")
PROXY_REPORT = SUBJECTS.proxy_report(ProxyId("proxy-1"))
OPERATIONS = OPERATE_VERBS - VIEW_VERBS
KEY = f"$KV.{SUBJECTS.bucket}.endpoints.shop.digits"
SNAPSHOT = SUBJECTS.snapshots.replace(">", "endpoints.shop.digits")
EVENT = SUBJECTS.event("goal", "g7")
WAKE = SUBJECTS.wake(BackendTag("shop/digits"))
LOGGING = ("controller", "proxy", "host", "replica")
ROLES = ("controller", "proxy", "host", "replica", "client", "caller", "admin", "view", "operate")
PEOPLE = ("view", "operate")
"""Who may not deploy, and yet see and do what admins do."""
ALL_BUT_CONTROLLER = ROLES[1:]
NAMES_HERE = {**NAMES, Role.REPLICA: tokens(REPLICA_TAG)}
PROCESS_OF = {"controller": "c1", "proxy": "proxy-1", "host": "host-1", "replica": REPLICA_TAG}
"""Of each kind that logs: the one that the tests come as."""

Connect = Callable[..., Awaitable[Client]]


class Server:
    """A nats-server of this module's own, with identities or with plain users."""

    def __init__(self, server: NatsServer, secrets: Secrets, *, is_plain: bool) -> None:
        self.port = server.port
        self.url = server.url
        self.log = server.directory / "log"
        self.secrets = secrets
        self.is_plain = is_plain

    def settings(self, role: str, name: str | None = None) -> BusSettings:
        """As a process of that role has them; replicas may call what is in the application shop."""
        known = Role(role)
        return bus_settings(
            self.secrets,
            self.url,
            known,
            name=NAMES_HERE.get(known, "") if name is None else name,
            tags=call_tags("shop/digits", None) if known is Role.REPLICA else (),
            plain=self.is_plain,
        )

    def login(self, role: str, nonce: str) -> dict[str, str]:
        """What CONNECT says of it."""
        settings = self.settings(role)
        login = build_login(settings)
        return {"user": settings.user, "pass": settings.password} if login is None else login.fields(nonce)

    def refusals(self, login: Callable[[str], dict[str, str]], *lines: bytes) -> list[str]:
        """What the server objects to when whoever logs in like this sends these protocol lines."""
        while True:
            refused = self._refusals(login, *lines)
            # So it answers who stands still for 2 s before giving them, as a busy machine may.
            if refused != ["-ERR 'Authentication Timeout'"]:
                return refused

    def _refusals(self, login: Callable[[str], dict[str, str]], *lines: bytes) -> list[str]:
        with (
            socket.create_connection(("127.0.0.1", self.port), timeout=20) as connection,
            connection.makefile("rb") as answers,
        ):
            greeting = json.loads(answers.readline().removeprefix(b"INFO "))
            options = {
                **login(greeting.get("nonce", "")),
                "verbose": False,
                "pedantic": False,
                "headers": True,
            }
            connect = f"CONNECT {json.dumps(options)}\r\n".encode()
            connection.sendall(connect + b"".join(line + b"\r\n" for line in lines) + b"PING\r\n")
            refused = []
            for answer in answers:
                if answer.startswith(b"PONG"):
                    break
                if answer.startswith(b"-ERR"):
                    refused.append(answer.decode().strip())
                    if "Authorization" in refused[-1] or "Authentication" in refused[-1]:
                        break
        return refused

    def refusals_of(self, role: str, *lines: bytes) -> list[str]:
        """What the server objects to when `role` sends these protocol lines."""
        return self.refusals(lambda nonce: self.login(role, nonce), *lines)


@pytest.fixture(scope="module", params=["identities", "plain"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    is_plain = request.param == "plain"
    directory = tmp_path_factory.mktemp("nats")
    secrets = generate(directory / "secrets", plain=is_plain)
    config = lay_out_nats(directory, secrets, plain=is_plain).read_text()
    with NatsServer(directory, config=config) as server:
        yield Server(server, secrets, is_plain=is_plain)


@pytest.fixture
async def connect(server: Server) -> AsyncIterator[Connect]:
    async with contextlib.AsyncExitStack() as stack:

        async def connect_as(role: str, name: str | None = None) -> Client:
            client = await connect_nats(server.settings(role, name), name=role, deadline_s=20)
            stack.push_async_callback(client.close)
            return client

        yield connect_as


@pytest.fixture
async def bucket(connect: Connect) -> None:
    """The bucket with two keys, as the controller makes it."""
    controller = await connect("controller")
    store = await controller.jetstream().create_key_value(bucket_config(SUBJECTS))
    await store.put("endpoints.shop.digits", b"one")
    await store.put("backends.shop.digits", b"two")


def inbox(role: str) -> str:
    """Of the process of that role that the tests come as."""
    return f"{inbox_prefix(Role(role), NAMES_HERE.get(Role(role)))}.abc.def"


ALLOWED = [
    ("controller", "PUB", HOST_GOAL),
    ("controller", "PUB", EVALUATE),
    ("controller", "SUB", SUBJECTS.evaluation_reports),
    ("controller", "PUB", SUBJECTS.leader),
    ("controller", "PUB", EVENT),
    ("controller", "PUB", KEY),
    ("controller", "PUB", f"$JS.API.STREAM.CREATE.{STREAM}"),
    ("controller", "PUB", f"$JS.API.STREAM.CREATE.{SUBJECTS.event_stream}"),
    ("controller", "PUB", f"$JS.API.STREAM.INFO.{SUBJECTS.event_stream}"),
    ("controller", "PUB", f"$JS.API.CONSUMER.CREATE.{SUBJECTS.event_stream}.name.x"),
    ("controller", "PUB", "_INBOX.abc"),
    ("controller", "PUB", inbox("admin")),
    ("controller", "PUB", GATE),
    ("admin", "SUB", GATE),
    ("controller", "SUB", SUBJECTS.admin("deploy")),
    ("controller", "SUB", SUBJECTS.host_reports),
    ("controller", "SUB", SUBJECTS.proxy_reports),
    ("controller", "SUB", "$SRV.PING"),
    ("controller", "SUB", f"$SRV.INFO.{ADMIN_SERVICE}.some-id"),
    ("proxy", "PUB", REPLICA),
    ("proxy", "PUB", PROXY_REPORT),
    ("proxy", "PUB", CAPTURE),
    ("admin", "PUB", READ_CAPTURES),
    ("proxy", "PUB", "_INBOX.abc"),
    ("proxy", "PUB", inbox("admin")),
    ("proxy", "PUB", inbox("replica")),
    ("proxy", "SUB", SUBJECTS.calls),
    ("proxy", "SUB", SUBJECTS.leader),
    ("host", "PUB", HOST_REPORT),
    ("host", "SUB", HOST_GOAL),
    ("host", "PUB", EVALUATED),
    ("host", "SUB", EVALUATE),
    ("host", "SUB", SUBJECTS.leader),
    ("replica", "PUB", REPLICA),
    ("replica", "PUB", SUBJECTS.call(ENDPOINT)),
    ("replica", "PUB", inbox("proxy")),
    ("replica", "PUB", inbox("replica")),
    ("replica", "PUB", inbox("client")),
    ("replica", "SUB", REPLICA),
    ("client", "PUB", REPLICA),
    ("client", "PUB", SUBJECTS.call(ENDPOINT)),
    ("client", "SUB", SUBJECTS.all_models),
    ("proxy", "PUB", inbox("client")),
    ("caller", "PUB", SUBJECTS.call(ENDPOINT)),
    ("proxy", "PUB", inbox("caller")),
    ("admin", "PUB", SUBJECTS.admin("deploy")),
    ("admin", "PUB", SUBJECTS.call(ENDPOINT)),
    ("admin", "PUB", "$SRV.PING"),
    ("admin", "SUB", EVENT),
    ("admin", "SUB", SUBJECTS.events),
    ("admin", "PUB", f"$JS.API.CONSUMER.CREATE.{SUBJECTS.event_stream}.name.x"),
    ("admin", "SUB", "_INBOX.abc.*"),
    *((role, "SUB", SUBJECTS.snapshots) for role in ("controller", "proxy", "replica", "client")),
    # whoever routes says that a backend is waited for, and the controller hears it
    *((role, "PUB", WAKE) for role in ("proxy", "replica", "client")),
    ("controller", "SUB", SUBJECTS.wakes),
    # all processes publish their log lines, also when they are asked for them; the admin hears them
    *((kind, "PUB", SUBJECTS.log(kind, PROCESS_OF[kind])) for kind in LOGGING),
    *((kind, "PUB", SUBJECTS.recalled_log("t1", kind)) for kind in LOGGING),
    *((kind, "SUB", SUBJECTS.log_replay) for kind in LOGGING),
    ("admin", "PUB", SUBJECTS.log_replay),
    ("admin", "SUB", SUBJECTS.logs()),
    ("admin", "SUB", SUBJECTS.recalled_log("t1")),
    *((role, "SUB", inbox(role).removesuffix("abc.def") + ">") for role in ROLES),
    # people: each may what its table of verbs says
    *(
        (role, "PUB", SUBJECTS.admin(verb))
        for role in PEOPLE
        for verb in ("get_status", "get_history", "plan")
    ),
    *(("operate", "PUB", SUBJECTS.admin(verb)) for verb in sorted(OPERATIONS)),
    ("operate", "PUB", SUBJECTS.call(ENDPOINT)),
    *(("controller", "PUB", inbox(role)) for role in PEOPLE),
    ("proxy", "PUB", inbox("operate")),
    *(
        (role, "SUB", subject)
        for role in PEOPLE
        for subject in (
            SUBJECTS.events,
            SUBJECTS.logs(),
            SUBJECTS.recalled_log("t1"),
            SUBJECTS.host_reports,
            SUBJECTS.proxy_reports,
            SUBJECTS.leader,
        )
    ),
    *((role, "PUB", SUBJECTS.log_replay) for role in PEOPLE),
]

OTHER_SERVICES = (
    READ_CAPTURES,
    "$SRV.PING",
    "$JS.API.INFO",
    f"$JS.API.DIRECT.GET.{STREAM}",
    f"$JS.API.STREAM.INFO.{STREAM}",
    f"$JS.API.CONSUMER.CREATE.{SUBJECTS.event_stream}.name.x",
    f"$JS.API.STREAM.MSG.GET.{SUBJECTS.event_stream}",
)

DENIED = [
    # people who may not deploy: no other verb, no captures, and nothing of JetStream
    *(("view", "PUB", SUBJECTS.admin(verb)) for verb in sorted({*COMMANDS, "get_backup"})),
    *(("operate", "PUB", SUBJECTS.admin(verb)) for verb in sorted({*COMMANDS, "get_backup"} - OPERATIONS)),
    ("view", "PUB", SUBJECTS.call(ENDPOINT)),
    *((role, "PUB", subject) for role in PEOPLE for subject in OTHER_SERVICES),
    *((role, "SUB", subject) for role in PEOPLE for subject in (CAPTURE, GATE, REPLICA, SUBJECTS.calls, KEY)),
    *((role, "SUB", subject) for role in PEOPLE for subject in (SUBJECTS.snapshots, SUBJECTS.all_models)),
    *((role, "PUB", subject) for role in PEOPLE for subject in (REPLICA, HOST_REPORT, PROXY_REPORT, WAKE)),
    *(("proxy", "PUB", inbox(role)) for role in ("view", "controller")),
    *(("replica", "PUB", inbox(role)) for role in PEOPLE),
    # only the admin commands
    *((role, "PUB", SUBJECTS.admin("deploy")) for role in ("proxy", "host", "replica", "client", "caller")),
    # only the controller hears them
    *((role, "SUB", SUBJECTS.admin("deploy")) for role in ALL_BUT_CONTROLLER),
    # only the controller writes snapshots, tells hosts their goals and says who leads
    *((role, "PUB", KEY) for role in ALL_BUT_CONTROLLER),
    *((role, "PUB", HOST_GOAL) for role in ALL_BUT_CONTROLLER),
    *((role, "PUB", EVALUATE) for role in ALL_BUT_CONTROLLER),
    *((role, "PUB", SUBJECTS.leader) for role in ALL_BUT_CONTROLLER),
    # JetStream delivers past all permissions, so who routes may not tell it where to; and nobody forges what it says
    *(
        (role, "PUB", subject)
        for role in ("proxy", "host", "replica", "client", "caller")
        for subject in (
            f"$JS.API.CONSUMER.CREATE.{STREAM}",
            f"$JS.API.CONSUMER.CREATE.{STREAM}.name.x",
            f"$JS.API.CONSUMER.DURABLE.CREATE.{STREAM}.name",
            f"$JS.API.CONSUMER.MSG.NEXT.{STREAM}.name",
            f"$JS.API.CONSUMER.LIST.{STREAM}",
            "$JS.API.INFO",
        )
    ),
    *((role, "PUB", SNAPSHOT) for role in ROLES),
    *((role, "SUB", SUBJECTS.snapshots) for role in ("host", "caller", "admin")),
    ("caller", "SUB", SUBJECTS.all_models),
    *(
        ("caller", "PUB", subject)
        for subject in (f"$JS.API.DIRECT.GET.{STREAM}", f"$JS.API.STREAM.INFO.{STREAM}")
    ),
    # only the controller tells what happened, and only the admin hears it
    *((role, "PUB", EVENT) for role in ALL_BUT_CONTROLLER),
    *((role, "SUB", EVENT) for role in ("proxy", "host", "replica", "client", "caller")),
    *(
        (role, "PUB", f"$JS.API.CONSUMER.CREATE.{SUBJECTS.event_stream}.name.x")
        for role in ("proxy", "host", "replica", "client", "caller")
    ),
    # only the controller manages streams
    *(
        (role, "PUB", f"$JS.API.STREAM.{verb}.{stream}")
        for role in ALL_BUT_CONTROLLER
        for stream in (STREAM, SUBJECTS.event_stream)
        for verb in ("CREATE", "UPDATE", "DELETE", "PURGE", "MSG.DELETE")
    ),
    *((role, "PUB", "$JS.API.CONSUMER.CREATE.OTHER.name.x") for role in ALL_BUT_CONTROLLER),
    # nobody reports in another's name
    *((role, "PUB", HOST_REPORT) for role in ("proxy", "replica", "client", "caller", "admin", "controller")),
    *((role, "PUB", EVALUATED) for role in ("proxy", "replica", "client", "caller", "admin", "controller")),
    # nobody else sees policies and what they are told
    *((role, "SUB", EVALUATE) for role in ("proxy", "replica", "client", "caller")),
    *(
        (role, "SUB", SUBJECTS.evaluation_reports)
        for role in ("proxy", "host", "replica", "client", "caller")
    ),
    *((role, "PUB", PROXY_REPORT) for role in ("host", "replica", "client", "caller", "admin", "controller")),
    # nobody else wakes a backend, or hears who waits
    *((role, "PUB", WAKE) for role in ("controller", "host", "caller", "admin")),
    *((role, "PUB", CAPTURE) for role in ("controller", "host", "replica", "client", "caller", "admin")),
    *(
        (role, "SUB", CAPTURE)
        for role in ("controller", "host", "proxy", "replica", "client", "caller", "admin")
    ),
    *((role, "PUB", READ_CAPTURES) for role in ("host", "proxy", "replica", "client", "caller")),
    ("admin", "PUB", f"$JS.API.CONSUMER.CREATE.{SUBJECTS.capture_stream}"),
    ("admin", "PUB", f"$JS.API.STREAM.MSG.GET.{SUBJECTS.capture_stream}"),
    *((role, "SUB", SUBJECTS.wakes) for role in ALL_BUT_CONTROLLER),
    # only the controller asks about rollouts, and only the admin answers, and only what it was asked
    *((role, "PUB", GATE) for role in ALL_BUT_CONTROLLER),
    *((role, "SUB", GATE) for role in ("controller", "host", "proxy", "replica", "client", "caller")),
    ("admin", "PUB", inbox("controller")),
    # nobody logs in another's name, reads what others log, or asks for it
    *(
        (role, "PUB", subject)
        for role in (*LOGGING, "client", "caller", "admin")
        for kind in LOGGING
        for subject in (SUBJECTS.log(kind, "p1"), SUBJECTS.recalled_log("t1", kind))
        if role != kind
    ),
    *((role, "SUB", SUBJECTS.logs()) for role in (*LOGGING, "client", "caller")),
    *((role, "PUB", SUBJECTS.log_replay) for role in (*LOGGING, "client", "caller")),
    # requests are between proxies and replicas
    *((role, "PUB", REPLICA) for role in ("controller", "host", "caller", "admin")),
    *((role, "SUB", REPLICA) for role in ("controller", "proxy", "host", "client", "caller", "admin")),
    *(
        (role, "SUB", SUBJECTS.calls)
        for role in ("controller", "host", "replica", "client", "caller", "admin")
    ),
    # answers are private; the plain inbox belongs to foreign clients, which are admins
    *((role, "SUB", f"_INBOX_{other}.>") for role in ROLES for other in ROLES if role != other),
    *((role, "SUB", "_INBOX.>") for role in ROLES if role != "admin"),
    # a replica runs users' code: it answers its callers and nobody else
    ("replica", "PUB", inbox("controller")),
    ("replica", "PUB", inbox("host")),
    ("replica", "PUB", inbox("admin")),
    ("replica", "PUB", "_INBOX.abc"),
    ("replica", "PUB", "$SRV.PING"),
    *((role, "SUB", "$SRV.PING") for role in ALL_BUT_CONTROLLER),
    ("controller", "PUB", inbox("host")),
    ("host", "PUB", inbox("controller")),
    # nobody hears everything, and nobody but the system user sees the system
    *((role, "SUB", ">") for role in ROLES),
    *((role, "SUB", "serve.>") for role in ROLES),
    *((role, "SUB", "$SYS.>") for role in ROLES),
]


OTHERS = [
    # a host and a proxy speak for themselves, and a host hears its own goal
    ("host", "PUB", SUBJECTS.host_report(HostId("host-2"))),
    ("host", "SUB", SUBJECTS.host_goal(HostId("host-2"))),
    ("host", "SUB", SUBJECTS.host_goal(HostId("*"))),
    ("proxy", "PUB", SUBJECTS.proxy_report(ProxyId("proxy-2"))),
    ("proxy", "PUB", SUBJECTS.log("proxy", "proxy-2")),
    ("host", "PUB", SUBJECTS.log("host", "host-2")),
    *((role, "SUB", f"_INBOX_{role}.>") for role in ("host", "proxy", "replica")),
    *((role, "SUB", f"_INBOX_{role}.other.>") for role in ("host", "proxy", "replica")),
    # a replica hears its own requests, and says only of itself what it holds and logs
    ("replica", "SUB", OTHER_REPLICA),
    ("replica", "SUB", SUBJECTS.replica(replica_tag(BackendTag("shop/digits"), 9))),
    ("replica", "SUB", SUBJECTS.replica(replica_tag(BackendTag("shop/digits"), 77))),
    ("replica", "SUB", "serve.replica.>"),
    ("replica", "SUB", "serve.replica.shop.*.7"),
    ("replica", "PUB", SUBJECTS.models(OTHER_REPLICA_TAG)),
    ("replica", "PUB", SUBJECTS.log("replica", OTHER_REPLICA_TAG)),
    # and calls whom its configuration says
    ("replica", "PUB", OTHER_REPLICA),
    ("replica", "PUB", SUBJECTS.call(EndpointTag("bank/ledger"))),
    ("replica", "PUB", SUBJECTS.wake(BackendTag("bank/ledger"))),
]
"""What only identities deny: plain users of a role are one."""


def line(verb: str, subject: str) -> bytes:
    return f"PUB {subject} 0\r\n".encode() if verb == "PUB" else f"SUB {subject} 1".encode()


@pytest.mark.parametrize(("role", "verb", "subject"), ALLOWED)
def test_a_role_may_do_what_its_work_needs(server: Server, role: str, verb: str, subject: str) -> None:
    assert server.refusals_of(role, line(verb, subject)) == []


@pytest.mark.parametrize(("role", "verb", "subject"), DENIED)
def test_a_role_may_do_nothing_else(server: Server, role: str, verb: str, subject: str) -> None:
    refused = server.refusals_of(role, line(verb, subject))
    kind = "Publish" if verb == "PUB" else "Subscription"
    assert refused, f"{role} was allowed {verb} {subject}"
    assert refused[0].startswith(f'-ERR \'Permissions Violation for {kind} to "{subject}"')


@pytest.mark.parametrize(("role", "verb", "subject"), OTHERS)
def test_nobody_speaks_for_or_hears_another_of_its_role(
    server: Server, role: str, verb: str, subject: str
) -> None:
    assert bool(server.refusals_of(role, line(verb, subject))) is not server.is_plain


@pytest.mark.parametrize(
    "credentials",
    [
        {},
        {"user": "proxy"},
        {"user": "proxy", "pass": "wrong"},
        {"user": "nobody", "pass": "x"},
        {"auth_token": "x"},
    ],
)
def test_who_gives_no_or_wrong_credentials_is_refused(server: Server, credentials: dict[str, str]) -> None:
    assert server.refusals(lambda _nonce: credentials) == ["-ERR 'Authorization Violation'"]


@pytest.mark.parametrize("role", NATS_ROLES)
async def test_every_role_has_its_own_credentials(server: Server, connect: Connect, role: str) -> None:
    assert (await connect(role)).is_connected
    own = server.login(role, "nonce")
    assert [other for other in NATS_ROLES if other != role and server.login(other, "nonce") == own] == []


def test_a_token_without_its_seed_or_with_more_than_its_scope_or_too_old_is_nothing(server: Server) -> None:
    if server.is_plain:
        pytest.skip("plain users have no tokens")
    key = signing_key(server.secrets, Role.REPLICA)
    minted = mint_now(key, "shop.digits.7", lifetime_s=60)
    signer, user = NatsKey.from_seed(key.seed, KeyKind.ACCOUNT), NatsKey.from_seed(minted.seed, KeyKind.USER)
    _, other = parse_credentials_file(server.secrets.credentials_file(Role.CLIENT).read_text())
    # Whoever holds a scoped key cannot say more than its scope does.
    head, body, _ = minted.jwt.split(".")
    claims = json.loads(base64.urlsafe_b64decode(body + "=="))
    claims["nats"] |= {"pub": {"allow": [">"]}, "sub": {"allow": [">"]}}
    wider = f"{head}.{encode_base64(json.dumps(claims).encode())}"
    expired = mint_user(key, "x", now=1_000_000.0, lifetime_s=60, random_bytes=bytes(32))
    # Nor does a key of one's own help, or that of another account.
    foreign = msgspec.structs.replace(key, seed=NatsKey(KeyKind.ACCOUNT, os.urandom(SEED_BYTES)).seed)
    proxy_key = signing_key(server.secrets, Role.PROXY)
    crossed = msgspec.structs.replace(proxy_key, account=signing_key(server.secrets, Role.HOST).account)
    made = [mint_now(foreign, "shop.digits.7", lifetime_s=60), mint_now(crossed, "admin", lifetime_s=60)]
    for jwt, seed in (
        (minted.jwt, other),
        (f"{wider}.{signer.sign(wider.encode())}", minted.seed),
        (f"{wider}.{user.sign(wider.encode())}", minted.seed),
        (f"{wider}.{minted.jwt.rpartition('.')[2]}", minted.seed),
        *((user.jwt, user.seed) for user in (expired, *made)),
    ):
        refused = server.refusals(
            lambda nonce, jwt=jwt, seed=seed: {"jwt": jwt, "sig": sign_nonce(seed, nonce)}
        )
        assert refused == ["-ERR 'Authorization Violation'"]
    assert "authentication error" in server.log.read_text()
    assert server.refusals(lambda nonce: {"jwt": minted.jwt, "sig": sign_nonce(minted.seed, nonce)}) == []


@contextlib.asynccontextmanager
async def watching(reader: Client) -> AsyncIterator[asyncio.Queue[Entries]]:
    told: asyncio.Queue[Entries] = asyncio.Queue()
    watch = BucketWatch(reader, SUBJECTS, lambda entries, _whole: told.put_nowait(dict(entries)))
    watch.start()
    try:
        async with asyncio.timeout(30):
            yield told
    finally:
        await watch.close()


@pytest.mark.parametrize("role", ["proxy", "replica", "client", "controller"])
async def test_who_routes_reads_the_bucket_and_hears_changes(
    connect: Connect, bucket: None, role: str
) -> None:
    controller = await connect("controller")
    reader = await connect(role)
    async with watching(reader) as told:
        entries = await told.get()
        assert entries["endpoints.shop.digits"][1] == b"one"
        assert entries["backends.shop.digits"][1] == b"two"
        await (await controller.jetstream().key_value(SUBJECTS.bucket)).put("backends.shop.digits", b"three")
        assert (await told.get())["backends.shop.digits"][1] == b"three"
    assert reader.last_error is None


async def test_the_admin_reads_the_bucket_with_the_tools_of_nats(connect: Connect, bucket: None) -> None:
    admin = await connect("admin")
    store = await admin.jetstream(timeout=20).key_value(SUBJECTS.bucket)
    assert (await store.get("endpoints.shop.digits")).value == b"one"
    watcher = await store.watchall()
    assert {entry.key async for entry in until_all_is_told(watcher)} >= {"backends.shop.digits"}
    await asyncio.wait_for(watcher.stop(), timeout=20)
    assert admin.last_error is None


async def until_all_is_told(watcher: KeyValue.KeyWatcher) -> AsyncIterator[KeyValue.Entry]:
    """The watcher's own word that it has told everything may come before what it tells."""
    while True:
        entry = await watcher.updates(timeout=20)
        if entry is not None:
            yield entry
            if entry.delta == 0:
                return


@pytest.mark.parametrize("role", ["proxy", "host", "replica", "client"])
async def test_nobody_lets_jetstream_speak_as_the_admin(connect: Connect, bucket: None, role: str) -> None:
    """JetStream delivers past all permissions: a consumer's maker must be trusted."""
    controller, attacker = await connect("controller"), await connect(role)
    heard = await controller.subscribe(SUBJECTS.admin("shutdown"))
    await until_known(controller)
    consumer = ConsumerConfig(
        deliver_subject=SUBJECTS.admin("shutdown"),
        deliver_group="q",
        headers_only=True,
        name="deputy",
    )
    with pytest.raises((nats.errors.TimeoutError, APIError)):
        await attacker.jetstream(timeout=0.5).add_consumer(STREAM, consumer)
    await refused(attacker)
    await controller.flush()
    assert heard.pending_msgs == 0


async def refused(client: Client) -> None:
    """Until the server has said that it does not allow what this client wanted."""
    await eventually(lambda: "permissions violation" in str(client.last_error).lower())


@pytest.mark.parametrize("role", ["proxy", "replica", "client", "admin"])
async def test_readers_of_the_bucket_cannot_write_it(connect: Connect, bucket: None, role: str) -> None:
    reader, controller = await connect(role), await connect("controller")
    with pytest.raises((nats.errors.TimeoutError, NoRespondersError)):
        await reader.request(KEY, b"forged", timeout=0.3)
    await refused(reader)
    store = await controller.jetstream(timeout=20).key_value(SUBJECTS.bucket)
    assert (await store.get("endpoints.shop.digits")).value == b"one"


async def test_a_host_sees_no_snapshot(connect: Connect, bucket: None) -> None:
    host = await connect("host")
    with pytest.raises((nats.errors.TimeoutError, APIError)):
        await host.jetstream(timeout=0.3).key_value(SUBJECTS.bucket)
    await refused(host)


async def test_a_big_snapshot_history_flows_to_a_slow_proxy(connect: Connect, bucket: None) -> None:
    # More than one page of it, and than the sockets take at once.
    controller = await connect("controller")
    store = await controller.jetstream().key_value(SUBJECTS.bucket)
    for number in range(300):
        await store.put(f"backends.big.b{number}", bytes(20_000))
    proxy = await connect("proxy")
    async with watching(proxy) as told:
        entries = await told.get()
    assert all(entries[f"backends.big.b{number}"][1] == bytes(20_000) for number in range(300))
    assert proxy.last_error is None


async def test_a_plain_client_of_the_admin_user_commands_a_micro_service(
    server: Server, connect: Connect
) -> None:
    controller = await connect("controller")

    async def deploy(request: Request) -> None:
        await request.respond(b"done " + request.data)

    service = await add_service(controller, ServiceConfig(name=ADMIN_SERVICE, version="0.1.0"))
    await service.add_endpoint(
        EndpointConfig(name="deploy", handler=deploy, subject=SUBJECTS.admin("deploy"))
    )
    await until_known(controller)
    settings = server.settings("admin")
    login = login_arguments(build_login(settings), settings.user, settings.password)
    plain = await nats.connect(server.url, **login)
    try:
        answer = await plain.request(SUBJECTS.admin("deploy"), b"x", timeout=20)
        info = await plain.request(f"$SRV.INFO.{ADMIN_SERVICE}", b"", timeout=20)
    finally:
        await plain.close()
    assert answer.data == b"done x"
    assert json.loads(info.data)["name"] == ADMIN_SERVICE
    proxy = await connect("proxy")
    with pytest.raises(nats.errors.TimeoutError):
        await proxy.request(SUBJECTS.admin("deploy"), b"forged", timeout=0.3)
    await refused(proxy)
    await service.stop()


@pytest.mark.parametrize(
    ("caller", "responder", "subject", "queue"),
    [
        ("proxy", "replica", REPLICA, ""),
        ("replica", "replica", REPLICA, ""),
        ("client", "replica", REPLICA, ""),
        ("client", "proxy", SUBJECTS.call(ENDPOINT), GATEWAY_QUEUE),
        ("admin", "proxy", SUBJECTS.call(ENDPOINT), GATEWAY_QUEUE),
        ("operate", "proxy", SUBJECTS.call(ENDPOINT), GATEWAY_QUEUE),
        ("view", "controller", SUBJECTS.admin("get_status"), ""),
        ("operate", "controller", SUBJECTS.admin("scale"), "q"),
        ("replica", "proxy", SUBJECTS.call(ENDPOINT), GATEWAY_QUEUE),
    ],
)
async def test_who_may_ask_gets_the_answer(
    connect: Connect, caller: str, responder: str, subject: str, queue: str
) -> None:
    asking, answering = await connect(caller), await connect(responder)

    async def answer(message: Msg) -> None:
        await message.respond(b"yes")

    subscription = await answering.subscribe(subject, queue=queue, cb=answer)
    await until_known(answering)
    assert (await asking.request(subject, b"", timeout=20)).data == b"yes"
    # Here and not with its connection: the server might choose it for the next test's request before it knows.
    await subscription.unsubscribe()
    await until_known(answering)


@pytest.mark.parametrize(
    ("speaker", "subject", "hearers"),
    [
        ("controller", HOST_GOAL, ["host"]),
        ("controller", SUBJECTS.leader, ["host", "proxy", "view", "operate"]),
        ("controller", EVENT, ["admin", "view", "operate"]),
        ("host", HOST_REPORT, ["controller", "admin", "view"]),
        ("proxy", PROXY_REPORT, ["controller", "admin", "view"]),
        ("proxy", WAKE, ["controller"]),
        ("replica", WAKE, ["controller"]),
        ("client", WAKE, ["controller"]),
        ("replica", SUBJECTS.models(REPLICA_TAG), ["proxy", "replica", "client"]),
        ("host", SUBJECTS.log("host", "host-1"), ["admin", "view"]),
        ("proxy", SUBJECTS.log("proxy", "proxy-1"), ["admin", "view"]),
        ("replica", SUBJECTS.log("replica", REPLICA_TAG), ["admin", "view"]),
        ("replica", SUBJECTS.recalled_log("t1", "replica"), ["admin", "view", "operate"]),
        *(
            (role, SUBJECTS.log_replay, ["controller", "proxy", "host", "replica"])
            for role in ("admin", "view", "operate")
        ),
    ],
)
async def test_what_is_told_is_heard_once(
    connect: Connect, speaker: str, subject: str, hearers: list[str]
) -> None:
    telling = await connect(speaker)
    heard = []
    for hearer in hearers:
        client = await connect(hearer)
        heard.append(await client.subscribe(subject))
        await until_known(client)
    await telling.publish(subject, b"1")
    await telling.publish(subject, b"2")
    for subscription in heard:
        assert [(await subscription.next_msg(timeout=20)).data for _ in range(2)] == [b"1", b"2"]
        await subscription.unsubscribe()


@pytest.mark.parametrize(
    ("caller", "subject"),
    [
        *((role, REPLICA) for role in ("proxy", "client", "replica")),
        *((role, SUBJECTS.call(ENDPOINT)) for role in ("admin", "operate")),
        *((role, SUBJECTS.admin("get_status")) for role in ("admin", "view", "operate")),
    ],
)
async def test_a_dead_replica_and_no_proxy_or_controller_are_known_at_once(
    connect: Connect, caller: str, subject: str
) -> None:
    with pytest.raises(NoRespondersError):
        await (await connect(caller)).request(subject, b"", timeout=20)


DEPUTIES = [
    (f"$JS.API.CONSUMER.CREATE.{STREAM}", {"stream_name": STREAM, "config": {"deliver_subject": "TARGET"}}),
    ("$JS.API.INFO", {}),
    (f"$JS.API.STREAM.INFO.{STREAM}", {}),
    (f"$JS.API.DIRECT.GET.{STREAM}", {"seq": 1, "next_by_subj": f"$KV.{SUBJECTS.bucket}.>", "batch": 10}),
    (f"$JS.API.DIRECT.GET.{STREAM}", {"seq": 1_000_000}),
    (SUBJECTS.call(ENDPOINT), {}),
    (REPLICA, {}),
]
"""Who answers wherever a request says: JetStream, proxies and replicas."""


@pytest.mark.parametrize("role", ["proxy", "host", "replica", "client", "view", "operate"])
@pytest.mark.parametrize("target", [SUBJECTS.admin("shutdown"), SUBJECTS.host_report(HostId("host-2")), KEY])
async def test_no_deputy_says_what_its_principal_may_not(
    server: Server, connect: Connect, bucket: None, role: str, target: str
) -> None:
    """Neither with an empty payload, which some take for a command, nor with any other."""
    if server.is_plain:
        pytest.skip("with plain users all are in one account, as docs and a warning say")
    controller, attacker = await connect("controller"), await connect(role)
    heard = await controller.subscribe(target)
    await until_known(controller)
    gateway, replica = await connect("proxy", "gateway"), await connect("replica")

    async def answer(message: Msg) -> None:
        await message.respond(b"")

    for client, subject in ((gateway, SUBJECTS.calls), (replica, REPLICA)):
        await client.subscribe(subject, cb=answer)
        await until_known(client)
    for subject, body in DEPUTIES:
        payload = json.dumps(body).replace("TARGET", target).encode()
        headers = {"Nats-Trace-Dest": target}
        await attacker.publish(subject, payload, reply=target)
        await attacker.publish(subject, payload, reply=target, headers=headers)
    for client in (attacker, gateway, replica, controller):
        await until_known(client)
    # What JetStream says comes by threads of its own; it answers this after all of those.
    assert await controller.jetstream(timeout=20).stream_info(STREAM)
    await until_known(controller)
    assert heard.pending_msgs == 0


def test_clients_that_connect_without_end_shut_out_nobody_else(server: Server) -> None:
    """They have an account of their own, whose connections are limited."""
    if server.is_plain:
        pytest.skip("plain users share the server's connections")
    limit = ACCOUNT_LIMITS[AccountName.CLIENT].connections
    with contextlib.ExitStack() as stack:
        refused: bytes | None = None
        for _ in range(limit + 10):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=20))
            answers = stack.enter_context(connection.makefile("rb"))
            greeting = json.loads(answers.readline().removeprefix(b"INFO "))
            options = {**server.login("client", greeting["nonce"]), "verbose": False}
            connection.sendall(f"CONNECT {json.dumps(options)}\r\nPING\r\n".encode())
            answer = answers.readline()
            if answer.startswith(b"-ERR"):
                refused = answer
                break
        assert refused == b"-ERR 'maximum account active connections exceeded'\r\n"
        for role in ("controller", "proxy", "host", "replica", "admin", "system"):
            assert server.refusals_of(role) == []
    assert "maximum account active connections exceeded" in server.log.read_text()


def test_a_replica_that_subscribes_without_end_is_stopped(server: Server) -> None:
    if server.is_plain:
        pytest.skip("plain users have no limits of their own")
    lines = [f"SUB {REPLICA} {number}".encode() for number in range(200)]
    assert "maximum subscriptions exceeded" in server.refusals_of("replica", *lines)[0]
    assert server.refusals_of("replica") == []


async def test_the_admin_follows_events_but_only_the_controller_keeps_them(connect: Connect) -> None:
    controller, admin = await connect("controller"), await connect("admin")
    heard = await admin.subscribe(SUBJECTS.events)
    await until_known(admin)
    events = EventStream(controller, SUBJECTS)
    events.start()
    view = EventView(at=1.0, kind="host", subject="host-1", message="came")
    events.publish_event("host", "host-1", msgspec.json.encode(view))
    assert msgspec.json.decode((await heard.next_msg(timeout=20)).data, type=EventView) == view
    await events.close()
    kept: list[EventView] = []
    async with asyncio.timeout(30):
        while not kept:  # the stream hears it beside the listener
            kept = await recent_events(controller, SUBJECTS, 10)
    assert kept == [view]

    # Who came too late for it still finds it in the stream.
    late = await admin.jetstream(timeout=20).subscribe(
        SUBJECTS.events, stream=SUBJECTS.event_stream, ordered_consumer=True
    )
    assert msgspec.json.decode((await late.next_msg(timeout=20)).data, type=EventView) == view
    await late.unsubscribe()
    assert controller.last_error is None
    assert admin.last_error is None
    with pytest.raises((nats.errors.TimeoutError, APIError)):
        await admin.jetstream(timeout=0.3).delete_stream(SUBJECTS.event_stream)


async def test_what_proxies_capture_is_kept_where_only_the_admin_reads_it(
    server: Server, connect: Connect
) -> None:
    controller, proxy, admin = [await connect(role) for role in ("controller", "proxy", "admin")]
    await controller.jetstream().add_stream(capture_stream_config(SUBJECTS))
    message = CapturedMessage(body=b"{}")
    pair = CapturedPair(
        at=1.0, request_id="r", endpoint_tag=ENDPOINT, backend_tag=ENDPOINT, method="GET", path="/",
        request=message, status=200, response=message,
    )  # fmt: skip
    await proxy.publish(CAPTURE, msgspec.json.encode(pair))
    await until_known(proxy)
    request = json.dumps({"last_by_subj": CAPTURE}).encode()
    async with asyncio.timeout(30):
        while True:
            found = await admin.request(READ_CAPTURES, request, timeout=20)
            if found.data:
                break
            await asyncio.sleep(0.02)
    assert msgspec.json.decode(found.data, type=CapturedPair) == pair
    await controller.jetstream().delete_stream(SUBJECTS.capture_stream)


async def test_the_system_user_sees_the_server_and_not_the_instance(server: Server, connect: Connect) -> None:
    system = await connect("system")
    answer = await system.request("$SYS.REQ.SERVER.PING", b"", timeout=20)
    assert json.loads(answer.data)["server"]["name"] == "muster-nats"
    controller = await connect("controller")
    await controller.subscribe(SUBJECTS.admin("get_status"))
    await until_known(controller)
    with pytest.raises(NoRespondersError):
        await system.request(SUBJECTS.admin("get_status"), b"", timeout=20)


async def test_a_message_above_the_payload_limit_is_refused(connect: Connect) -> None:
    proxy = await connect("proxy")
    assert proxy.max_payload == 1 << 20


@pytest.mark.parametrize("role", ["caller", "client", "replica", "operate"])
async def test_a_proxy_learns_that_its_caller_left_by_the_next_message_to_it(
    role: str, connect: Connect
) -> None:
    proxy, caller = await connect("proxy"), await connect(role)
    calls: asyncio.Queue[Msg] = asyncio.Queue()
    pieces: asyncio.Queue[Msg] = asyncio.Queue()
    left: asyncio.Queue[Msg] = asyncio.Queue()
    back = inbox("proxy")
    await proxy.subscribe(SUBJECTS.calls, cb=calls.put)
    await proxy.subscribe(back, cb=left.put)
    await proxy.flush()
    own = f"{inbox(role)}.{role}"
    subscription = await caller.subscribe(own, cb=pieces.put)
    await until_known(caller)
    await caller.publish(SUBJECTS.call(ENDPOINT), b"", reply=own)
    async with asyncio.timeout(20):
        call = await calls.get()
        for number in range(3):
            await proxy.publish(call.reply, b"%d" % number, reply=back)
            assert (await pieces.get()).data == b"%d" % number
        assert left.empty()
        await subscription.unsubscribe()
        await caller.flush()
        while left.empty():
            await proxy.publish(call.reply, b"", reply=back)
            await asyncio.sleep(0.3)
        headers = (await left.get()).headers
    assert headers is not None
    assert headers["Status"] == "503"


async def test_an_admin_answers_what_the_controller_asks_about_a_rollout_once(connect: Connect) -> None:
    controller, admin = await connect("controller"), await connect("admin")
    seen: list[Msg] = []

    async def answer(message: Msg) -> None:
        seen.append(message)
        await message.respond(b"first")
        await message.respond(b"second")

    await admin.subscribe(GATE, cb=answer)
    await until_known(admin)
    message = await controller.request(GATE, b"?", timeout=20)
    assert message.data == b"first"
    assert len(seen) == 1
    await eventually(lambda: admin.last_error is not None)
    assert "permissions violation for publish" in str(admin.last_error).lower()

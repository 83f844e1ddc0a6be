"""What each role may say and hear on the bus, proven on a real server with the very file that compose uses."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import socket
import subprocess
import sysconfig
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

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

from muster.secrets import NATS_INCLUDE, NATS_ROLES, Secrets, generate
from serve_common.adapters.bucket_watch import BucketWatch, Entries
from serve_common.adapters.nats_client import connect_nats
from serve_common.names import BackendTag, EndpointTag, HostId, ProxyId, replica_tag
from serve_common.settings import BusSettings
from serve_common.subjects import ADMIN_SERVICE, GATEWAY_QUEUE, Subjects
from serve_common.wires.views import EventView
from serve_controller.adapters.event_stream import EventStream, recent_events
from serve_controller.adapters.snapshot_bucket import bucket_config
from tests.integration.nats_server import until_known

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
SUBJECTS = Subjects()
STREAM = f"KV_{SUBJECTS.bucket}"
ENDPOINT = EndpointTag("shop/digits")
REPLICA = SUBJECTS.replica(replica_tag(BackendTag("shop/digits"), 7))
HOST_GOAL = SUBJECTS.host_goal(HostId("host-1"))
HOST_REPORT = SUBJECTS.host_report(HostId("host-1"))
PROXY_REPORT = SUBJECTS.proxy_report(ProxyId("proxy-1"))
KEY = f"$KV.{SUBJECTS.bucket}.endpoints.shop.digits"
SNAPSHOT = SUBJECTS.snapshots.replace(">", "endpoints.shop.digits")
EVENT = SUBJECTS.event("goal", "g7")
WAKE = SUBJECTS.wake(BackendTag("shop/digits"))
LOGGING = ("controller", "proxy", "host", "replica")

Connect = Callable[[str], Awaitable[Client]]


class Server:
    """A nats-server of this module's own."""

    def __init__(self, port: int, secrets: Secrets) -> None:
        self.port = port
        self.secrets = secrets
        self.url = f"nats://127.0.0.1:{port}"

    def password(self, role: str) -> str:
        return self.secrets.read(f"nats_{role}")

    def refusals(self, credentials: dict[str, str], *lines: bytes) -> list[str]:
        """What the server objects to when these credentials send these protocol lines."""
        while True:
            refused = self._refusals(credentials, *lines)
            # So it answers who stands still for 2 s before giving them, as a busy machine may.
            if refused != ["-ERR 'Authentication Timeout'"]:
                return refused

    def _refusals(self, credentials: dict[str, str], *lines: bytes) -> list[str]:
        options = {**credentials, "verbose": False, "pedantic": False, "headers": True}
        with (
            socket.create_connection(("127.0.0.1", self.port), timeout=20) as connection,
            connection.makefile("rb") as answers,
        ):
            assert answers.readline().startswith(b"INFO ")
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
        return self.refusals({"user": role, "pass": self.password(role)}, *lines)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("nats")
    secrets = generate(directory / "secrets")
    shutil.copy(ROOT / "deploy/nats/nats.conf", directory / "nats.conf")
    shutil.copy(secrets.path(NATS_INCLUDE), directory / "passwords.conf")
    binary = Path(sysconfig.get_path("scripts")) / "nats-server"
    arguments = [
        "-c",
        directory / "nats.conf",
        "--addr",
        "127.0.0.1",
        "--port",
        "-1",
        "--store_dir",
        directory / "js",
    ]
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(
            [binary, *arguments, "--ports_file_dir", directory], stderr=log, stdout=log
        )
    try:
        ports_file = directory / f"nats-server_{process.pid}.ports"
        give_up_at = time.monotonic() + 30
        while not ports_file.exists() or not ports_file.read_text():
            assert process.poll() is None, (directory / "log").read_text()
            assert time.monotonic() < give_up_at, (directory / "log").read_text()
            time.sleep(0.01)  # the server has no other way to tell its port
        url = json.loads(ports_file.read_text())["nats"][0]
        yield Server(int(url.rpartition(":")[2]), secrets)
    finally:
        process.terminate()
        process.wait(timeout=10)


@pytest.fixture
async def connect(server: Server) -> AsyncIterator[Connect]:
    async with contextlib.AsyncExitStack() as stack:

        async def connect_as(role: str) -> Client:
            client = await connect_nats(
                BusSettings(
                    servers=[server.url],
                    user=role,
                    password=server.password(role),
                    inbox_prefix=f"_INBOX_{role}",
                    subject_prefix="serve",
                ),
                name=role,
                deadline_s=20,
            )
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
    return f"_INBOX_{role}.abc.def"


ALLOWED = [
    ("controller", "PUB", HOST_GOAL),
    ("controller", "PUB", SUBJECTS.leader),
    ("controller", "PUB", EVENT),
    ("controller", "PUB", KEY),
    ("controller", "PUB", f"$JS.API.STREAM.CREATE.{STREAM}"),
    ("controller", "PUB", f"$JS.API.STREAM.CREATE.{SUBJECTS.event_stream}"),
    ("controller", "PUB", f"$JS.API.STREAM.INFO.{SUBJECTS.event_stream}"),
    ("controller", "PUB", f"$JS.API.CONSUMER.CREATE.{SUBJECTS.event_stream}.name.x"),
    ("controller", "PUB", "_INBOX.abc"),
    ("controller", "PUB", inbox("admin")),
    ("controller", "PUB", inbox("host")),
    ("controller", "SUB", SUBJECTS.admin("deploy")),
    ("controller", "SUB", SUBJECTS.host_reports),
    ("controller", "SUB", SUBJECTS.proxy_reports),
    ("controller", "SUB", "$SRV.PING"),
    ("controller", "SUB", f"$SRV.INFO.{ADMIN_SERVICE}.some-id"),
    ("proxy", "PUB", REPLICA),
    ("proxy", "PUB", PROXY_REPORT),
    ("proxy", "PUB", "_INBOX.abc"),
    ("proxy", "PUB", inbox("admin")),
    ("proxy", "PUB", inbox("replica")),
    ("proxy", "SUB", SUBJECTS.calls),
    ("proxy", "SUB", SUBJECTS.leader),
    ("proxy", "SUB", "$SRV.STATS"),
    ("host", "PUB", HOST_REPORT),
    ("host", "PUB", inbox("controller")),
    ("host", "SUB", HOST_GOAL),
    ("host", "SUB", SUBJECTS.leader),
    ("host", "SUB", "$SRV.PING"),
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
    *((kind, "PUB", SUBJECTS.log(kind, "shop/digits#7")) for kind in LOGGING),
    *((kind, "PUB", SUBJECTS.recalled_log("t1", kind)) for kind in LOGGING),
    *((kind, "SUB", SUBJECTS.log_recall) for kind in LOGGING),
    ("admin", "PUB", SUBJECTS.log_recall),
    ("admin", "SUB", SUBJECTS.logs()),
    ("admin", "SUB", SUBJECTS.recalled_log("t1")),
    *(
        (role, "SUB", f"_INBOX_{role}.>")
        for role in ("controller", "proxy", "host", "replica", "client", "admin")
    ),
]

DENIED = [
    # only the admin commands
    *((role, "PUB", SUBJECTS.admin("deploy")) for role in ("proxy", "host", "replica", "client")),
    # only the controller hears them
    *((role, "SUB", SUBJECTS.admin("deploy")) for role in ("proxy", "host", "replica", "client", "admin")),
    # only the controller writes snapshots, tells hosts their goals and says who leads
    *((role, "PUB", KEY) for role in ("proxy", "host", "replica", "client", "admin")),
    *((role, "PUB", HOST_GOAL) for role in ("proxy", "host", "replica", "client", "admin")),
    *((role, "PUB", SUBJECTS.leader) for role in ("proxy", "host", "replica", "client", "admin")),
    # JetStream delivers past all permissions, so who routes may not tell it where to; and nobody forges what it says
    *(
        (role, "PUB", subject)
        for role in ("proxy", "host", "replica", "client")
        for subject in (
            f"$JS.API.CONSUMER.CREATE.{STREAM}",
            f"$JS.API.CONSUMER.CREATE.{STREAM}.name.x",
            f"$JS.API.CONSUMER.DURABLE.CREATE.{STREAM}.name",
            f"$JS.API.CONSUMER.MSG.NEXT.{STREAM}.name",
            f"$JS.API.CONSUMER.LIST.{STREAM}",
            "$JS.API.INFO",
        )
    ),
    *((role, "PUB", SNAPSHOT) for role in ("controller", "proxy", "host", "replica", "client", "admin")),
    *((role, "SUB", SUBJECTS.snapshots) for role in ("host", "admin")),
    # only the controller tells what happened, and only the admin hears it
    *((role, "PUB", EVENT) for role in ("proxy", "host", "replica", "client", "admin")),
    *((role, "SUB", EVENT) for role in ("proxy", "host", "replica", "client")),
    *(
        (role, "PUB", f"$JS.API.CONSUMER.CREATE.{SUBJECTS.event_stream}.name.x")
        for role in ("proxy", "host", "replica", "client")
    ),
    # only the controller manages streams
    *(
        (role, "PUB", f"$JS.API.STREAM.{verb}.{stream}")
        for role in ("proxy", "host", "replica", "client", "admin")
        for stream in (STREAM, SUBJECTS.event_stream)
        for verb in ("CREATE", "UPDATE", "DELETE", "PURGE", "MSG.DELETE")
    ),
    *(
        (role, "PUB", "$JS.API.CONSUMER.CREATE.OTHER.name.x")
        for role in ("proxy", "host", "replica", "client", "admin")
    ),
    # nobody reports in another's name
    *((role, "PUB", HOST_REPORT) for role in ("proxy", "replica", "client", "admin", "controller")),
    *((role, "PUB", PROXY_REPORT) for role in ("host", "replica", "client", "admin", "controller")),
    # nobody else wakes a backend, or hears who waits
    *((role, "PUB", WAKE) for role in ("controller", "host", "admin")),
    *((role, "SUB", SUBJECTS.wakes) for role in ("proxy", "host", "replica", "client", "admin")),
    # nobody logs in another's name, reads what others log, or asks for it
    *(
        (role, "PUB", subject)
        for role in (*LOGGING, "client", "admin")
        for kind in LOGGING
        for subject in (SUBJECTS.log(kind, "p1"), SUBJECTS.recalled_log("t1", kind))
        if role != kind
    ),
    *((role, "SUB", SUBJECTS.logs()) for role in (*LOGGING, "client")),
    *((role, "PUB", SUBJECTS.log_recall) for role in (*LOGGING, "client")),
    # requests are between proxies and replicas
    *((role, "PUB", REPLICA) for role in ("controller", "host", "admin")),
    *((role, "SUB", REPLICA) for role in ("controller", "proxy", "host", "client", "admin")),
    *((role, "SUB", SUBJECTS.calls) for role in ("controller", "host", "replica", "client", "admin")),
    # answers are private; the plain inbox belongs to foreign clients, which are admins
    *(
        (role, "SUB", f"_INBOX_{other}.>")
        for role in ("controller", "proxy", "host", "replica", "client", "admin")
        for other in ("controller", "proxy", "host", "replica", "client", "admin")
        if role != other
    ),
    *((role, "SUB", "_INBOX.>") for role in ("controller", "proxy", "host", "replica", "client")),
    # a replica runs users' code: it answers its callers and nobody else
    ("replica", "PUB", inbox("controller")),
    ("replica", "PUB", inbox("host")),
    ("replica", "PUB", inbox("admin")),
    ("replica", "PUB", "_INBOX.abc"),
    ("replica", "PUB", "$SRV.PING"),
    ("replica", "SUB", "$SRV.PING"),
    # nobody hears everything, and nobody but the system user sees the system
    *((role, "SUB", ">") for role in ("controller", "proxy", "host", "replica", "client", "admin")),
    *((role, "SUB", "serve.>") for role in ("controller", "proxy", "host", "replica", "client", "admin")),
    *((role, "SUB", "$SYS.>") for role in ("controller", "proxy", "host", "replica", "client", "admin")),
]


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
    assert server.refusals(credentials) == ["-ERR 'Authorization Violation'"]


@pytest.mark.parametrize("role", NATS_ROLES)
async def test_every_role_has_its_own_password(server: Server, connect: Connect, role: str) -> None:
    client = await connect(role)
    assert client.is_connected
    assert [other for other in NATS_ROLES if server.password(other) == server.password(role)] == [role]


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
    async with asyncio.timeout(30):
        while "permissions violation" not in str(client.last_error).lower():  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.01)


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
    plain = await nats.connect(server.url, user="admin", password=server.password("admin"))
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


async def test_an_absent_controller_is_known_at_once(server: Server, connect: Connect) -> None:
    admin = await connect("admin")
    with pytest.raises(NoRespondersError):
        await admin.request(SUBJECTS.admin("get_status"), b"", timeout=20)


@pytest.mark.parametrize(
    ("caller", "responder", "subject", "queue"),
    [
        ("proxy", "replica", REPLICA, ""),
        ("replica", "replica", REPLICA, ""),
        ("client", "replica", REPLICA, ""),
        ("client", "proxy", SUBJECTS.call(ENDPOINT), GATEWAY_QUEUE),
        ("admin", "proxy", SUBJECTS.call(ENDPOINT), GATEWAY_QUEUE),
        ("replica", "proxy", SUBJECTS.call(ENDPOINT), GATEWAY_QUEUE),
        ("controller", "host", HOST_GOAL, ""),
        ("host", "controller", HOST_REPORT, ""),
        ("proxy", "controller", PROXY_REPORT, ""),
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

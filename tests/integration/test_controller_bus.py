"""The controller on a real NATS server: what callers get, whatever they send and whatever happens to the server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any, Self

import msgspec
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import NoRespondersError
from nats.errors import TimeoutError as NatsTimeoutError
from nats.js.errors import NotFoundError

from serve_common.api.queries import VERBS
from serve_common.api.views import ErrorView, EventView, GoalStatus, StatusView
from serve_common.errors import LimitReached
from serve_common.names import BackendTag, ControllerId, HostId, ProxyId, replica_tag
from serve_common.nats import bucket_watch
from serve_common.nats.client import close_nats
from serve_common.protocol.reports import HostReport, ProxyReport, Wake
from serve_common.protocol.snapshots import BackendSnapshot, Snapshot
from serve_common.protocol.subjects import ADMIN_SERVICE, Subjects
from serve_common.runtime.tasks import TaskOwner
from serve_common.telemetry.log_lines import RefusedMessages
from serve_controller.adapters import nats_bus as wake_hearing
from serve_controller.adapters.nats_bus import NatsBus
from serve_controller.shell import leadership
from serve_controller.shell.boundary import OpenBoundary
from serve_controller.shell.service import ControllerService
from tests.simulation.world import SilentTelemetry
from tests.support.memory_store import MemoryStore
from tests.support.servers.nats_server import NatsServer, connected
from tests.support.snapshot_bucket import read_bucket
from tests.support.waiting import eventually

SOON_S = 15.0
"""Much less than what would be waited for otherwise, and enough for a busy machine."""
LIMIT_S = 30.0
"""For what takes a moment on a quiet machine, and has no limit of its own on a busy one."""


@pytest.fixture(autouse=True)
def quick_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_watch, "POSITION_CHECK_S", 0.2)
    monkeypatch.setattr(leadership, "RENEW_EVERY_S", 0.1)


class LoopClock:
    def now(self) -> float:
        return time.monotonic()


class Controller:
    """A whole controller process' parts in this process, joined as `serve_controller.wiring` does."""

    def __init__(self, server: NatsServer, subjects: Subjects, store: MemoryStore, name: str) -> None:
        self.server, self.subjects, self.store = server, subjects, store
        self.name = ControllerId(name)
        self.failures: list[BaseException] = []
        self.tasks = TaskOwner(name, on_failure=lambda _, error: self.failures.append(error))
        self.stack = contextlib.AsyncExitStack()
        self.reconnected = asyncio.Event()
        self.disconnected = asyncio.Event()

    async def start(self) -> None:
        self.client = await connected(
            self.server, self.subjects, on_reconnect=self._came, on_disconnect=self._went
        )
        self.bus = NatsBus(self.client, self.subjects, "0.0.1", RefusedMessages(time.monotonic))
        self.service = ControllerService(
            controller_id=self.name,
            store=self.store,
            bus=self.bus,
            clock=LoopClock(),
            boundary=OpenBoundary(SilentTelemetry(), time.monotonic),
            telemetry=SilentTelemetry(),
        )
        await self.bus.start(self.service, self.service.admin)
        self.tasks.start(self.service.run(), "run")

    def _came(self) -> None:
        self.bus.reopen()
        self.service.on_bus_restored()
        self.reconnected.set()

    def _went(self) -> None:
        self.service.on_bus_lost()
        self.disconnected.set()

    async def stop(self) -> None:
        await self.tasks.close(timeout_s=LIMIT_S)
        assert len(self.tasks) == 0, "the controller did not stop in time"
        await self.bus.close()
        await close_nats(self.client)


class Caller:
    """Any NATS client that knows the subjects."""

    def __init__(self, client: Client, subjects: Subjects) -> None:
        self.client, self.subjects = client, subjects

    async def send(self, verb: str, payload: bytes, timeout: float = LIMIT_S) -> Msg:
        return await self.client.request(self.subjects.admin(verb), payload, timeout=timeout)

    async def call(self, verb: str, **fields: Any) -> Any:
        message = await self.send(verb, msgspec.json.encode(fields))
        assert "Nats-Service-Error-Code" not in (message.headers or {}), message.data
        return msgspec.json.decode(message.data, type=VERBS[verb].reply_type())

    async def refused(self, verb: str, payload: bytes) -> ErrorView:
        message = await self.send(verb, payload)
        assert message.headers is not None, message.data
        view = msgspec.json.decode(message.data, type=ErrorView)
        assert message.headers["Nats-Service-Error"]
        assert int(message.headers["Nats-Service-Error-Code"]) in (400, 404, 409, 429, 500, 503)
        return view

    async def until_leading(self) -> None:
        """Until somebody answers as the leader."""
        await eventually(self._is_led)

    async def _is_led(self) -> bool:
        try:
            message = await self.send("list_deployments", b"", timeout=0.5)
        except (NoRespondersError, NatsTimeoutError):
            return False
        return not message.headers


class Stack:
    """One controller and one caller on a subject prefix of their own."""

    def __init__(self, server: NatsServer) -> None:
        self.server = server
        self.subjects = Subjects(f"t{uuid.uuid4().hex[:10]}")
        self.store = MemoryStore(time.monotonic)
        self.controller = Controller(server, self.subjects, self.store, "controller-1")

    async def __aenter__(self) -> Self:
        await self.controller.start()
        self.client = await connected(self.server, self.subjects)
        self.caller = Caller(self.client, self.subjects)
        await self.caller.until_leading()
        return self

    async def __aexit__(self, *_: object) -> None:
        await close_nats(self.client)
        await self.controller.stop()

    async def deploy(self, name: str = "a") -> None:
        """Deploy and wait until the goal succeeded: then its snapshots are recorded and in the bucket."""
        deployed = await self.caller.call("deploy", **deploy_fields(name))
        goal = await self.caller.call("wait_for_goal", goal_id=deployed.goal_id, timeout_s=15)
        assert goal.status is GoalStatus.SUCCEEDED
        assert await self.bucket_is_as_recorded()

    async def bucket(self) -> dict[str, Snapshot]:
        """What routers would read."""
        held = await read_bucket(self.client, self.subjects)
        return {key: msgspec.json.decode(value, type=Snapshot) for key, value in held.items()}

    def recorded(self) -> dict[str, Snapshot]:
        assert self.controller.service.term is not None
        snapshots = self.controller.service.term.checkpoint.snapshots
        return {key: record.snapshot for key, record in snapshots.items()}

    async def bucket_is_as_recorded(self) -> bool:
        try:
            return await self.bucket() == self.recorded()
        except (NotFoundError, NatsTimeoutError, msgspec.DecodeError, UnicodeDecodeError):
            return False


@pytest.fixture
async def stack(shared_server: NatsServer) -> AsyncIterator[Stack]:
    async with Stack(shared_server) as stack:
        yield stack
        assert stack.controller.failures == []


def deploy_fields(name: str = "a", num_replicas: int = 0, **more: Any) -> dict[str, Any]:
    return {
        "name": name,
        "version": "v1",
        "replica_config": {"import_path": "digits:Digits"},
        "backend_config": {"num_replicas": num_replicas},
        **more,
    }


@pytest.mark.parametrize(
    ("verb", "kind"), [("PING", "ping_response"), ("INFO", "info_response"), ("STATS", "stats_response")]
)
async def test_the_admin_service_is_found_by_the_tools_of_nats(stack: Stack, verb: str, kind: str) -> None:
    answers = await service_answers(stack, verb)
    assert [a["type"] for a in answers] == [f"io.nats.micro.v1.{kind}"]
    if verb == "INFO":
        subjects = {endpoint["subject"] for endpoint in answers[0]["endpoints"]}
        assert subjects == {stack.subjects.admin(verb) for verb in VERBS}
    if verb == "STATS":
        assert {e["name"] for e in answers[0]["endpoints"]} == set(VERBS)


async def service_answers(stack: Stack, verb: str) -> list[dict[str, Any]]:
    """Who answers under the service's name, of this test's controllers."""
    inbox = stack.client.new_inbox()
    subscription = await stack.client.subscribe(inbox)
    await stack.client.publish(f"$SRV.{verb}.{ADMIN_SERVICE}", reply=inbox)
    message = await subscription.next_msg(timeout=SOON_S)  # where nobody listens the server says so
    answers = [json.loads(message.data)] if message.data else []
    with contextlib.suppress(NatsTimeoutError):
        while True:  # nothing tells that no more will come
            answers.append(json.loads((await subscription.next_msg(timeout=0.3)).data))
    await subscription.unsubscribe()
    return answers


REPLICA = b'"replica_config":{"import_path":"m:C"}'


def with_backend(text: bytes) -> bytes:
    return b'{"name":"a",' + REPLICA + b',"backend_config":{' + text + b"}}"


def with_options(text: bytes) -> bytes:
    return b'{"name":"a","replica_config":{"import_path":"m:C","ray_actor_options":{' + text + b"}}}"


BAD_DEPLOYS: dict[str, tuple[bytes, str]] = {
    "no JSON": (b"{", "request"),
    "a NUL byte": (b"\0", "request"),
    "bytes that are no text": (b'{"name":"\xff"}', "request"),
    "half of a surrogate pair": (b'{"name":"\\ud800xxxxxxxx"}', "request"),
    "two documents": (b'{"name":"a",' + REPLICA + b"}{}", "request"),
    "nothing": (b"", "request"),
    "an unknown field": (b'{"name":"a",' + REPLICA + b',"nme":1}', "nme"),
    "an unknown inner field": (with_backend(b'"num_replica":1'), "backend_config.num_replica"),
    "a missing field": (b'{"name":"a","replica_config":{}}', "replica_config.import_path"),
    "an endless name": (b'{"name":"' + b"a" * 10_000 + b'",' + REPLICA + b"}", "name"),
    "a NUL in the name": (b'{"name":"a\\u0000",' + REPLICA + b"}", "name"),
    "400 digits of replicas": (with_backend(b'"num_replicas":1' + b"0" * 400), "backend_config.num_replicas"),
    "true replicas": (with_backend(b'"num_replicas":true'), "backend_config.num_replicas"),
    "NaN": (with_backend(b'"start_timeout_s":NaN'), "request"),
    "beyond floats": (with_backend(b'"start_timeout_s":1e999'), "backend_config.start_timeout_s"),
    "memory of 400 digits": (
        with_options(b'"memory":1' + b"0" * 400),
        "replica_config.ray_actor_options.memory",
    ),
    "a bottomless config": (with_backend(b'"user_config":' + b"[" * 100_000), "request"),
    "the proxy's own route": (b'{"name":"a",' + REPLICA + b',"route_prefix":"/-/x"}', "route_prefix"),
    "no methods": (b'{"name":"a",' + REPLICA + b',"methods":[]}', "methods"),
    "an unknown method": (b'{"name":"a",' + REPLICA + b',"methods":["GET","TEA"]}', "methods[1]"),
    "an empty version": (b'{"name":"a",' + REPLICA + b',"version":""}', "version"),
    "a request id with spaces": (b'{"name":"a",' + REPLICA + b',"request_id":"a b"}', "request_id"),
}


async def test_bad_input_gets_the_path_of_its_field_and_changes_nothing(stack: Stack) -> None:
    before = dict(stack.store.rows)
    wrong = {}
    for name, (payload, field) in BAD_DEPLOYS.items():
        view = await stack.caller.refused("deploy", payload)
        if (view.code, view.field) != ("bad_field", field) or len(view.message) > 1000:
            wrong[name] = view
    assert wrong == {}
    assert stack.store.rows == before
    assert list(stack.store.history) == []
    assert await stack.caller.call("list_deployments") == []


async def test_the_bucket_follows_what_is_recorded(stack: Stack) -> None:
    await stack.deploy("a")
    await stack.deploy("b")
    assert set(stack.recorded()) == {
        "backends.default.a",
        "endpoints.default.a",
        "backends.default.b",
        "endpoints.default.b",
    }
    await stack.caller.call("delete_deployment", name="a")

    async def is_gone() -> bool:
        bucket = await stack.bucket()
        # Read key by key while it changes, so a key may be missing for a moment.
        found = [bucket.get(key) for key in ("endpoints.default.a", "backends.default.a")]
        return all(snapshot is not None and snapshot.content is None for snapshot in found)

    await eventually(is_gone)
    await eventually(stack.bucket_is_as_recorded)


@pytest.mark.parametrize("is_purged", [False, True])
async def test_a_bucket_that_is_lost_or_purged_is_refilled(stack: Stack, *, is_purged: bool) -> None:
    await stack.deploy()
    context = stack.client.jetstream()
    if is_purged:
        await context.purge_stream(f"KV_{stack.subjects.bucket}")
    else:
        await context.delete_key_value(stack.subjects.bucket)
    await eventually(stack.bucket_is_as_recorded)


async def test_what_does_not_belong_into_the_bucket_is_put_right(stack: Stack) -> None:
    await stack.deploy()
    kv = await stack.client.jetstream().key_value(stack.subjects.bucket)
    await kv.put("backends.default.a", b'{"snapshot_id":9,"epoch":1,"content":{"x":"\xff"}}')
    await kv.put("endpoints.default.a", b"nonsense")
    await kv.put("backends.nobody", b"{}")
    await kv.delete("endpoints.default.a")
    await eventually(stack.bucket_is_as_recorded)


async def test_many_who_wait_do_not_hold_up_the_others(stack: Stack) -> None:
    never = await stack.caller.call("deploy", **deploy_fields("never", num_replicas=1))
    payload = msgspec.json.encode({"goal_id": never.goal_id, "timeout_s": 30.0})
    async with asyncio.TaskGroup() as tasks:
        waits = [tasks.create_task(stack.caller.send("wait_for_goal", payload, 30)) for _ in range(200)]
        await asyncio.sleep(0)  # all of them are sent before what follows
        await stack.caller.call("list_deployments")
        assert not any(wait.done() for wait in waits)
        begun = time.monotonic()
        await stack.caller.call("deploy", **deploy_fields("never", num_replicas=0))
    assert time.monotonic() - begun < SOON_S
    assert {json.loads(wait.result().data)["status"] for wait in waits} == {"superseded"}


def host_report(host_id: str, sequence: int = 1, *, incarnation: str = "1", leaving: bool = False) -> bytes:
    return msgspec.json.encode(
        HostReport(
            host_id=HostId(host_id),
            incarnation=incarnation,
            sequence=sequence,
            started_at=float(sequence),
            epoch=0,
            generation=0,
            resources={"CPU": 1.0},
            replicas=[],
            leaving=leaving,
        )
    )


def proxy_report(incarnation: str, applied: int) -> bytes:
    report = ProxyReport(
        proxy_id=ProxyId("proxy-1"),
        incarnation=incarnation,
        sequence=applied,
        started_at=1.0,
        applied_snapshot_id=applied,
    )
    return msgspec.json.encode(report)


HOLDER, FORGER = "incarnation-of-the-holder", "incarnation-of-the-forger"


async def test_who_reports_in_the_name_of_a_host_or_proxy_that_lives_is_not_believed_but_told_of(
    stack: Stack,
) -> None:
    subjects, client = stack.subjects, stack.client
    on_host, on_proxy = subjects.host_report(HostId("host-1")), subjects.proxy_report(ProxyId("proxy-1"))
    seen: list[bytes] = []
    told: list[EventView] = []

    async def hear(message: Msg) -> None:
        seen.append(message.data)
        if b"identity_conflict" in message.data:
            told.append(msgspec.json.decode(message.data, type=EventView))

    async def report() -> None:
        # One beat of both: neither is ever silent, and the forger has the last word.
        for incarnation, applied, leaving in ((HOLDER, 0, False), (FORGER, 1_000_000, True)):
            await client.publish(on_host, host_report("host-1", incarnation=incarnation, leaving=leaving))
            await client.publish(on_proxy, proxy_report(incarnation, applied))
            await client.flush()

    await client.subscribe(subjects.events, cb=hear)
    await report()
    await eventually(lambda: get_status(stack, seen))
    deployed = await stack.caller.call("deploy", **deploy_fields("a"))

    async def is_notified() -> bool:
        await report()
        return {event.kind for event in told} == {"host", "proxy"}

    await eventually(is_notified)
    status = await get_status(stack, seen)
    assert status is not None
    assert [(host.host_id, host.status) for host in status.hosts] == [("host-1", "live")]
    assert [(proxy.status, proxy.applied_snapshot_id) for proxy in status.proxies] == [("live", 0)]
    goal = await stack.caller.call("wait_for_goal", goal_id=deployed.goal_id, timeout_s=0)
    assert goal.status is GoalStatus.PENDING, "no proxy that is believed has applied it"
    assert [event.subject for event in told] == ["host-1", "proxy-1"]
    assert not [data for data in seen if HOLDER.encode() in data or FORGER.encode() in data]


async def test_a_flood_of_wakes_is_not_listened_to_and_holds_up_no_backend_that_sleeps(
    shared_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wake_hearing, "NARROW_S", 3.0)
    monkeypatch.setattr(wake_hearing, "WAKES_MAX", 50)  # few, so that no machine is too slow for a flood
    monkeypatch.setattr(wake_hearing, "WAKES_OF_ONE_MAX", 20)
    subjects = Subjects(f"t{uuid.uuid4().hex[:10]}")
    client, sender = [await connected(shared_server, subjects) for _ in range(2)]
    refused, heard = RefusedMessages(time.monotonic), asyncio.Queue[str]()
    hearing = wake_hearing.WakeSubscription(
        client,
        subjects,
        refused,
        lambda wake: heard.put_nowait(wake.backend_tag),
        lambda: [BackendTag("default/asleep")],
    )
    await hearing.open()

    async def flood(backend: str, payload: bytes) -> None:
        for _ in range(5_000):
            await sender.publish(subjects.wake(BackendTag(backend)), payload)
        await sender.flush()

    async def wake_until_heard(backend: str) -> None:
        payload = msgspec.json.encode(Wake(backend_tag=backend, waiting=1))

        async def is_heard() -> bool:
            await sender.publish(subjects.wake(BackendTag(backend)), payload)
            came = [heard.get_nowait() for _ in range(heard.qsize())]
            return backend in came

        await eventually(is_heard)

    try:
        await flood("default/other", b"garbage")
        await wake_until_heard("default/asleep")
        assert refused.counts["wake"] < 2_500
        await flood("default/asleep", b"garbage")
        assert refused.counts["wake"] < 5_000
        await wake_until_heard("default/asleep")
        await wake_until_heard("default/other")
    finally:
        await hearing.close()
        await close_nats(client)
        await close_nats(sender)


async def get_status(stack: Stack, seen: list[bytes]) -> StatusView | None:
    """None before host and proxy are heard of."""
    message = await stack.caller.send("get_status", b"{}")
    seen.append(message.data)
    status = msgspec.json.decode(message.data, type=StatusView)
    return status if status.hosts and status.proxies else None


async def test_a_snapshot_that_can_never_be_sent_is_refused_as_such(stack: Stack) -> None:
    """Not as an outage that would be waited out: `Term` goes on without it."""
    await stack.deploy()
    content = BackendSnapshot(
        backend_tag=BackendTag("default/a"),
        replicas=[replica_tag(BackendTag("default/a"), n) for n in range(100_000)],
        draining=[],
        max_concurrent_queries=1,
        max_queued_requests=1,
    )
    with pytest.raises(LimitReached):
        await stack.controller.bus.publish(
            "backends.default.a", Snapshot(snapshot_id=1, epoch=1, content=content)
        )


async def test_two_controllers_have_one_voice_and_the_second_takes_over(stack: Stack) -> None:
    first = stack.controller
    second = Controller(stack.server, stack.subjects, stack.store, "controller-2")
    await second.start()
    goal = await stack.caller.call("deploy", **deploy_fields("never", num_replicas=1))
    assert len(await service_answers(stack, "PING")) == 1
    payload = msgspec.json.encode({"goal_id": goal.goal_id, "timeout_s": 30})
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(stack.caller.send("wait_for_goal", payload, 30))
        await asyncio.sleep(0)  # it is sent before what follows, and so is heard before that is answered
        await stack.caller.call("list_deployments")
        stack.store.controller_id, stack.store.epoch = second.name, 2
        stack.store.lease_expires_at = float("inf")
        await eventually(lambda: second.service.term is not None)
    # Who waited at the first is sent on, and nobody else answers for it.
    assert json.loads(waiting.result().data)["code"] == "not_leading"
    await eventually(lambda: first.service.term is None)
    # Until its calls are withdrawn, the first one may still be asked, and says that it does not lead.
    await eventually(lambda: _is_led_by(stack, "controller-2"))
    await eventually(lambda: has_one_voice(stack))
    status = await stack.caller.call("get_status")
    assert (status.controller_id, status.epoch) == ("controller-2", 3)
    assert first.failures == second.failures == []
    await second.stop()
    await stack.caller.until_leading()
    assert (await stack.caller.call("get_status")).controller_id == "controller-1"


async def _is_led_by(stack: Stack, controller_id: str) -> bool:
    try:
        message = await stack.caller.send("get_status", b"")
    except NoRespondersError:  # the one no longer, the other not yet
        return False
    return not message.headers and json.loads(message.data)["controller_id"] == controller_id


async def has_one_voice(stack: Stack) -> bool:
    return len(await service_answers(stack, "PING")) == 1


async def test_terms_one_after_another_leave_nothing_behind(stack: Stack) -> None:
    def subscriptions() -> int:
        return len(stack.controller.client._subs)

    async def next_term(epoch: int) -> None:
        stack.store.epoch += 1  # as if another one had led in between
        await eventually(lambda: stack.controller.service.term is not None and leads(epoch))
        await stack.caller.until_leading()

    def leads(epoch: int) -> bool:
        assert stack.controller.service.term is not None
        return stack.controller.service.term.epoch > epoch

    await stack.deploy("first")
    before, tasks_before = subscriptions(), len(asyncio.all_tasks())
    for _ in range(2):
        assert stack.controller.service.term is not None
        await next_term(stack.controller.service.term.epoch)
    await stack.deploy("second")
    # What ended lately may still be on its way out.
    await eventually(lambda: subscriptions() == before)
    await eventually(lambda: len(asyncio.all_tasks()) <= tasks_before + 1)
    await eventually(lambda: has_one_voice(stack))


async def test_nats_killed_and_started_again_and_the_controller_goes_on(server: NatsServer) -> None:
    async with Stack(server) as stack:
        await stack.deploy("a")
        server.kill()
        async with asyncio.timeout(LIMIT_S):
            await stack.controller.disconnected.wait()
        server.start()
        async with asyncio.timeout(LIMIT_S):
            await stack.controller.reconnected.wait()
        await stack.caller.until_leading()
        await stack.deploy("b")
        # Not only its own writes: what others do to the bucket is seen again, too.
        kv = await stack.client.jetstream().key_value(stack.subjects.bucket)
        await kv.put("backends.default.a", b"nonsense")
        await eventually(stack.bucket_is_as_recorded)
        assert stack.controller.failures == []


async def test_a_term_that_ends_while_nats_is_away_is_silent_afterwards(server: NatsServer) -> None:
    async with Stack(server) as stack:
        first = stack.controller
        server.kill()
        async with asyncio.timeout(LIMIT_S):
            await first.disconnected.wait()
        # Another one leads: this one's lease is refused, and it stays a standby.
        stack.store.controller_id, stack.store.epoch = ControllerId("other"), stack.store.epoch + 1
        stack.store.lease_expires_at = time.monotonic() + 3600
        await eventually(lambda: first.service.term is None)
        server.start()
        async with asyncio.timeout(LIMIT_S):
            await first.reconnected.wait()
        # Connected by itself could still mean the connection from before.
        await eventually(lambda: stack.client.stats["reconnects"] > 0 and stack.client.is_connected)
        with pytest.raises(NoRespondersError):
            await stack.caller.send("list_deployments", b"")
        assert await service_answers(stack, "PING") == []
        stack.store.lease_expires_at = float("-inf")
        await stack.caller.until_leading()
        assert len(await service_answers(stack, "PING")) == 1
        assert first.failures == []


async def test_stopping_while_nats_is_away_takes_little_time_and_leaves_no_task(server: NatsServer) -> None:
    async with Stack(server) as stack:
        server.kill()
        async with asyncio.timeout(LIMIT_S):
            await stack.controller.disconnected.wait()
        stack.controller.bus.publish_event("host", "h1", b"{}")
        begun = time.monotonic()
        await stack.controller.stop()
        assert time.monotonic() - begun < SOON_S
    this = asyncio.current_task()
    await eventually(lambda: asyncio.all_tasks() == {this})  # who tries to connect would do so for ever


@pytest.mark.parametrize("subject", ["serve.report.host.victim", "other.subject", "$JS.API.INFO"])
async def test_the_admin_service_answers_into_inboxes_only(stack: Stack, subject: str) -> None:
    """Whoever asks chooses where the answer goes, and must not have the controller speak there."""
    heard: list[Msg] = []

    async def hear(message: Msg) -> None:
        if not message.reply:
            heard.append(message)

    subscription = await stack.client.subscribe(subject, cb=hear)
    for asked in (stack.subjects.admin("get_status"), "$SRV.PING", f"$SRV.INFO.{ADMIN_SERVICE}"):
        await stack.client.publish(asked, b"{}", reply=subject)
    await stack.caller.call("get_status")  # what was sent before has been handled
    assert len(await service_answers(stack, "PING")) == 1
    await stack.client.flush()
    assert [(message.subject, message.data[:80]) for message in heard] == []
    await subscription.unsubscribe()

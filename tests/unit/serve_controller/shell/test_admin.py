"""What comes in as JSON, what is answered and what an error reads like, without any bus."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import uuid
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, get_type_hints

import msgspec
import pytest

from serve_common.api import commands as c
from serve_common.api import queries as q
from serve_common.api import views as v
from serve_common.api.commands import (
    ChangeReply,
    Command,
    CommandReply,
    DeleteDeployment,
    Deploy,
    RestoreReply,
)
from serve_common.api.queries import COMMANDS, QUERIES, VERBS, GetBackup
from serve_common.api.views import GoalStatus
from serve_common.errors import BadField, Conflict, FencedOut, LimitReached, NotFound, NotLeading, ServeError
from serve_common.names import BackendTag, EndpointTag, GoalId, HostId
from serve_controller.core.autoscaling.values import ScalingStatus, Targets
from serve_controller.core.checkpoint import Checkpoint
from serve_controller.core.commands import DECISIONS, decide
from serve_controller.core.commands.restoring import RestoreFrom, check_backup
from serve_controller.core.events import audit_event
from serve_controller.core.objects import (
    CheckpointObject,
    Counters,
    HostRecord,
    ObjectChanges,
    ObjectKind,
    get_key,
)
from serve_controller.core.observed import ObservedState
from serve_controller.core.restored import MARGIN
from serve_controller.shell import admin as backups
from serve_controller.shell import admin as goal_waits
from serve_controller.shell import queries
from serve_controller.shell.admin import AdminApi, BackupTransfers
from serve_controller.shell.checkpoint_rows import KINDS, read_backup, write_backup
from serve_controller.shell.queries import error_view, parse_request
from tests.simulation.scenario import application, deploy
from tests.support.controller_parts import (
    G1,
    NOW,
    TAG,
    backend_of,
    checkpoint_of,
    deployment_of,
    endpoint_of,
    get_version,
    goal_of,
    observed_hosts,
    replica_of,
)
from tests.support.waiting import eventually

T = TypeVar("T")
V1 = get_version()
PENDING = goal_of(status=v.GoalStatus.PENDING)
NEEDED = {
    "name": "a",
    "action": "pause",
    "error": "ValueError: no weights",
    "confirm": "everything",
    "goal_id": "g1",
    "replica_config": {"import_path": "m:C"},
    "backend_tag": "a",
    "config": {"num_replicas": 2},
    "options": {"request_timeout_s": 1},
    "endpoint": "a",
    "traffic": {"a": 1},
    "weights": {"a": 1},
    "proportion": 0.5,
    "share": 0.01,
    "deployments": [{"name": "d", "replica_config": {"import_path": "m:C"}}],
    "ingress": "d",
    "host_id": "h",
    "verb": "delete_deployment",
    "num_replicas": 2,
    "upload_id": "u",
    "digest": "0" * 64,
    "page": 0,
    "pages": 1,
    "data": "",
}


class FakeClock:
    def now(self) -> float:
        return NOW


class FakeTerm:
    """A term that is told what it knows, and remembers what it was asked."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.epoch = 7
        self.checkpoint = checkpoint
        self.observed = observed_hosts("host-1")
        self.is_store_available = True
        self.autoscaling: dict[BackendTag, ScalingStatus] = {}
        self.events: deque[v.EventView] = deque(maxlen=10)
        self.executed: list[tuple[Command[Any], bytes, str]] = []
        self.history_asked: list[tuple[int, str | None, int | None]] = []
        self.error: Exception | None = None
        self.plans_asked = 0

    def on_change(self) -> None:
        self.plans_asked += 1

    async def execute(self, command: Command[Any], request: bytes, who: str) -> CommandReply:
        if self.error is not None:
            raise self.error
        self.executed.append((command, request, who))
        return ChangeReply(goal_id=G1, updating=True)

    async def read_history(self, limit: int, subject: str | None, before: int | None) -> list[v.HistoryView]:
        self.history_asked.append((limit, subject, before))
        return [
            v.HistoryView(
                id=3,
                at=NOW,
                principal="me",
                epoch=7,
                verb="deploy",
                subject=TAG,
                goal_id=G1,
                request={"name": "a"},
            )
        ]


class FakeBoundary:
    def __init__(self) -> None:
        self.crossed: list[str] = []

    async def cross(self, effect: str, perform: Callable[[], Awaitable[T]]) -> T:
        self.crossed.append(effect)
        return await perform()


async def read_load(targets: Targets, now: float) -> v.LoadView:
    return v.LoadView(at=now, endpoints=[], backends=[], unreachable=sorted(targets.urls))


class Desk:
    """An admin with what it stands on."""

    def __init__(self, *values: CheckpointObject) -> None:
        self.term: FakeTerm | None = FakeTerm(checkpoint_of(*values))
        self.led = self.term
        self.boundary = FakeBoundary()
        self.admin = AdminApi(
            "controller-1", FakeClock(), self.boundary, lambda: self.term, read_load=read_load
        )

    async def ask(self, verb: str, /, **fields: object) -> object:
        reply = await self.admin.handle(verb, msgspec.json.encode(fields), "me")
        return msgspec.json.decode(reply, type=VERBS[verb].reply_type())

    def record(self, *values: CheckpointObject) -> None:
        self.led.checkpoint = self.led.checkpoint.applied(ObjectChanges(values))

    async def waiters(self, count: int) -> None:
        await eventually(lambda: len(self.admin._waits) == count)


@pytest.fixture(autouse=True)
def reasons(monkeypatch: pytest.MonkeyPatch) -> list[GoalId]:
    """Goals for which was worked out what they wait for."""
    asked: list[GoalId] = []

    def waits_for(_checkpoint: Checkpoint, _observed: ObservedState, goal: object) -> str:
        asked.append(goal.goal_id)  # type: ignore[attr-defined]
        return "waits for a host"

    monkeypatch.setattr("serve_controller.core.views.hosts.waits_for", waits_for)
    return asked


@pytest.fixture
def desk() -> Desk:
    return Desk(backend_of(V1), deployment_of(), endpoint_of(), goal_of(), replica_of(1, V1))


# -- requests and errors -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", VERBS)
def test_every_request_that_is_encoded_is_parsed_back(verb: str) -> None:
    fields = {f.encode_name: NEEDED[f.encode_name] for f in msgspec.structs.fields(VERBS[verb]) if f.required}
    request = parse_request(verb, msgspec.json.encode(fields))
    assert parse_request(verb, msgspec.json.encode(request)) == request


def test_nothing_at_all_means_all_defaults() -> None:
    assert parse_request("list_deployments", b"") == q.ListDeployments()


@pytest.mark.parametrize(
    ("payload", "field"),
    [
        (b'{"nme":1}', "nme"),
        (b"{}", "name"),
        (b'{"name":7}', "name"),
        (b'{"name":"a","replica_config":{"import_path":"m:C","init_arg":1}}', "replica_config.init_arg"),
        (b'{"name":"a","replica_config":{"import_path":1}}', "replica_config.import_path"),
        (b'{"name":"a","replica_config":{"import_path":"m:C"},"methods":["GET",1]}', "methods[1]"),
        (
            b'{"name":"a","replica_config":{"import_path":"m:C","ray_actor_options":{"resources":{"x":"y"}}}}',
            "replica_config.ray_actor_options.resources[...]",
        ),
        (b"7", "request"),
        (b'{"name":"\xff"}', "request"),
        (b"[" * 50_000, "request"),
    ],
)
def test_what_is_wrong_is_named_by_its_path(payload: bytes, field: str) -> None:
    with pytest.raises(BadField) as refused:
        parse_request("deploy", payload)
    assert refused.value.field == field


def test_what_the_caller_wrote_comes_back_in_part_only() -> None:
    with pytest.raises(BadField) as refused:
        parse_request("deploy", b'{"' + b"x" * 100_000 + b'":1}')
    assert len(str(refused.value)) < 1000


def test_an_error_tells_its_code_and_field() -> None:
    view = error_view(BadField("a.b", "is odd"))
    assert (view.code, view.message, view.field) == ("bad_field", "a.b: is odd", "a.b")
    assert msgspec.json.encode(error_view(Conflict("taken"))) == b'{"code":"conflict","message":"taken"}'


# -- commands ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", sorted(COMMANDS.keys() - {"shutdown", "restore", "upload_code"}))
async def test_every_command_is_executed_as_sent_and_its_reply_crosses_the_boundary(
    desk: Desk, verb: str
) -> None:
    fields = {f.encode_name: NEEDED[f.encode_name] for f in msgspec.structs.fields(VERBS[verb]) if f.required}
    assert await desk.ask(verb, **fields) == ChangeReply(goal_id=G1, updating=True)
    ((command, payload, who),) = desk.led.executed
    assert isinstance(command, VERBS[verb])
    assert (msgspec.json.decode(payload), who) == (fields, "me")
    assert desk.boundary.crossed == ["reply"]


@pytest.mark.parametrize("payload", [b"", b" \n"])
@pytest.mark.parametrize("verb", sorted(COMMANDS))
async def test_a_command_without_a_content_is_refused_and_told_what_it_needs(
    desk: Desk, verb: str, payload: bytes
) -> None:
    """What publishes on others' behalf can send an empty message to any subject."""
    with pytest.raises(BadField, match=f"request: is empty; {verb} needs a JSON object with ") as refused:
        await desk.admin.handle(verb, payload, "deputy")
    for field in msgspec.structs.fields(VERBS[verb]):
        assert not field.required or field.name in str(refused.value)
    assert desk.led.executed == []


@pytest.mark.parametrize("payload", [b"{}", b'{"confirm":"yes"}', b'{"confirm":true}', b'{"confirm":""}'])
async def test_a_shutdown_must_be_confirmed(desk: Desk, payload: bytes) -> None:
    with pytest.raises(BadField, match=r"^confirm: "):
        await desk.admin.handle("shutdown", payload, "me")
    assert desk.led.executed == []


async def test_a_backup_is_checked_before_and_restored_as_one_command(desk: Desk) -> None:
    page = await desk.ask("get_backup")
    assert isinstance(page, v.BackupPage)
    assert page.pages == 1
    data = base64.b64encode(page.data).decode()
    fields = {"upload_id": "u", "page": 0, "pages": 1, "data": data}
    checked = await desk.ask("restore", **fields)
    assert isinstance(checked, RestoreReply)
    assert "1 deployments" in checked.summary
    assert checked.plan is not None
    assert checked.plan.replicas == [], "the same is deployed"
    assert desk.led.executed == []
    with pytest.raises(BadField, match=r"checksum|gzip|missing"):
        await desk.ask(
            "restore", **{**fields, "data": base64.b64encode(page.data[:-30]).decode()}, confirm=True
        )
    assert desk.led.executed == []
    await desk.admin.handle("restore", msgspec.json.encode({**fields, "confirm": True}), "me")
    ((command, payload, who),) = desk.led.executed
    assert isinstance(command, RestoreFrom)
    assert TAG in command.saved.backends
    assert who == "me"
    assert len(payload) < 500, "the file itself is no part of the audit log"


async def test_who_is_a_claim_of_plain_text(desk: Desk) -> None:
    await desk.admin.handle(
        "delete_deployment", b'{"name":"a"}', "  ann\x1b[2J\u202e\r\n\x9b1m\ud800 b\u00e9a "
    )
    assert desk.led.executed[0][2] == "ann [2J 1m b\u00e9a"


async def test_who_is_cut(desk: Desk) -> None:
    await desk.admin.handle("delete_deployment", b'{"name":"a"}', "w" * 10_000)
    assert len(desk.led.executed[0][2]) == 200


async def test_a_fenced_command_reads_as_a_change_of_leader_and_crosses_nothing(desk: Desk) -> None:
    desk.led.error = FencedOut("epoch 8 began")
    with pytest.raises(NotLeading, match="epoch 8 began"):
        await desk.ask("delete_deployment", name="a")
    assert desk.led.plans_asked == 1
    assert desk.boundary.crossed == []
    desk.term = None
    with pytest.raises(NotLeading):
        await desk.ask("delete_deployment", name="a")


async def test_who_sent_something_wrong_is_told_also_by_a_standby(desk: Desk) -> None:
    desk.term = None
    with pytest.raises(BadField):
        await desk.ask("deploy")


def test_every_command_has_a_decision_of_its_own_type() -> None:
    assert DECISIONS.keys() == {*COMMANDS.values(), RestoreFrom}
    for command, decision in DECISIONS.items():
        _checkpoint, taken, _now = list(get_type_hints(decision).values())[:3]
        assert taken is command


# -- queries -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", QUERIES)
async def test_every_query_is_answered_with_its_type(
    desk: Desk, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queries, "decide", _nothing_to_do)
    fields = {f.encode_name: NEEDED[f.encode_name] for f in msgspec.structs.fields(VERBS[verb]) if f.required}
    if verb == "plan":
        fields["request"] = {"name": "a"}
    assert await desk.ask(verb, **fields) is not None
    assert desk.boundary.crossed == []


async def test_the_status_leaves_replicas_out_on_request(desk: Desk) -> None:
    whole = await desk.ask("get_status")
    short = await desk.ask("get_status", replicas=False)
    assert isinstance(whole, v.StatusView)
    assert isinstance(short, v.StatusView)
    assert (whole.controller_id, whole.epoch, whole.store_available) == ("controller-1", 7, True)
    assert [len(d.replicas) for d in whole.deployments] == [1]
    assert [d.replicas for d in short.deployments] == [[]]
    assert [h.host_id for h in short.hosts] == ["host-1"]


async def test_lists_come_in_pages(desk: Desk) -> None:
    desk.record(backend_of(V1, "default/b"), backend_of(V1, "default/c"))
    page = await desk.ask("get_all_backends", limit=1, after="default/a")
    assert [view.backend_tag for view in page] == ["default/b"]  # type: ignore[attr-defined]
    for verb in ("get_all_backends", "get_snapshot", "list_deployments", "get_hosts", "get_http_proxies"):
        with pytest.raises(BadField) as refused:
            await desk.ask(verb, limit=0)
        assert refused.value.field == "limit"


async def test_events_are_answered_by_subject_and_within_the_limit(desk: Desk) -> None:
    for number in range(20):
        subject = TAG if number % 2 else "other/b"
        desk.led.events.append(
            audit_event(NOW + number, verb="deploy", subject=subject, principal="", goal_id=None)
        )
    events = await desk.ask("get_events", subject="a", limit=2)
    assert [e.at - NOW for e in events] == [17, 19]  # type: ignore[attr-defined]
    for limit in (0, 1001):
        with pytest.raises(BadField):
            await desk.ask("get_events", limit=limit)


async def test_history_is_asked_for_by_the_subject_that_was_recorded(desk: Desk) -> None:
    desk.record(HostRecord(host_id=HostId("host-1"), generation=1))
    (entry,) = await desk.ask("get_history", subject="a", limit=7, before=9)  # type: ignore[misc]
    assert entry.principal == "me"
    await desk.ask("get_history", subject="host-1")
    await desk.ask("get_history")
    assert desk.led.history_asked == [(7, "default/a", 9), (50, "host-1", None), (50, None, None)]
    for fields in ({"limit": 501}, {"before": 0}, {"before": 2**63}, {"subject": "../.."}):
        with pytest.raises(BadField) as refused:
            await desk.ask("get_history", **fields)
        assert refused.value.field == next(iter(fields))


# -- plans -------------------------------------------------------------------------------------------------------------


class Accepted(msgspec.Struct):
    changes: ObjectChanges


def _nothing_to_do(_checkpoint: Checkpoint, _command: Command[Any], _now: float) -> Accepted:
    return Accepted(ObjectChanges())


async def test_a_plan_says_what_would_happen_and_changes_nothing(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decide(checkpoint: Checkpoint, command: Command[Any], now: float) -> Accepted:
        assert command == DeleteDeployment(name="a")
        assert now == NOW
        return Accepted(ObjectChanges((msgspec.structs.replace(checkpoint.backends[TAG], deleting=True),)))

    monkeypatch.setattr(queries, "decide", decide)
    before = desk.led.checkpoint
    plan = await desk.ask("plan", verb="delete_deployment", request={"name": "a"})
    assert isinstance(plan, v.PlanView)
    assert [(r.action, r.replica_tag) for r in plan.replicas] == [(v.PlannedAction.STOP, "default/a#1")]
    assert desk.led.checkpoint is before
    assert desk.led.executed == []
    monkeypatch.setattr(queries, "decide", _nothing_to_do)
    plan = await desk.ask("plan", verb="delete_deployment", request={"name": "a"})
    assert isinstance(plan, v.PlanView)
    assert (plan.updating, plan.replicas) == (False, [])


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"verb": "get_status"}, "verb"),
        ({"verb": "plan", "request": {"verb": "plan"}}, "verb"),
        ({"verb": "x" * 10_000}, "verb"),
        ({"verb": "deploy", "request": {"name": "a", "replica_config": {}}}, "replica_config.import_path"),
        ({"verb": "deploy", "request": 7}, "request"),
        ({"verb": "deploy"}, "name"),
    ],
)
async def test_a_plan_is_refused_as_the_command_would_be(desk: Desk, fields: dict, field: str) -> None:
    with pytest.raises(BadField) as refused:
        await desk.ask("plan", **fields)
    assert refused.value.field == field
    assert len(str(refused.value)) < 1000


async def test_a_refusal_of_the_core_is_the_answer_to_a_plan(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_checkpoint: Checkpoint, _command: Command[Any], _now: float) -> Accepted:
        raise Conflict("route_prefix: taken")

    monkeypatch.setattr(queries, "decide", refuse)
    with pytest.raises(Conflict, match="taken"):
        await desk.ask("plan", verb="delete_deployment", request={"name": "a"})


# -- waiting -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("timeout_s", [-1, 31])
async def test_a_wait_has_a_limit(desk: Desk, timeout_s: float) -> None:
    with pytest.raises(BadField) as refused:
        await desk.ask("wait_for_goal", goal_id="g1", timeout_s=timeout_s)
    assert refused.value.field == "timeout_s"


async def test_a_goal_that_ended_is_answered_at_once_and_an_unknown_one_not_found(desk: Desk) -> None:
    view = await desk.ask("wait_for_goal", goal_id="g1", timeout_s=30)
    assert isinstance(view, v.GoalView)
    assert view.status is v.GoalStatus.SUCCEEDED
    with pytest.raises(NotFound):
        await desk.ask("wait_for_goal", goal_id="g9", timeout_s=30)


@pytest.mark.parametrize("timeout_s", [0, 0.01])
async def test_a_wait_that_is_over_says_what_the_goal_waits_for(timeout_s: float) -> None:
    desk = Desk(PENDING)
    view = await desk.ask("wait_for_goal", goal_id="g1", timeout_s=timeout_s)
    assert view == v.GoalView(goal_id=G1, status=v.GoalStatus.PENDING, message="waits for a host")
    assert len(desk.admin._waits) == 0


async def test_a_waiting_caller_is_answered_when_the_goal_ends_and_not_before(reasons: list[GoalId]) -> None:
    desk = Desk(PENDING, goal_of("g2", v.GoalStatus.PENDING))
    async with asyncio.TaskGroup() as tasks:
        asking = [
            tasks.create_task(desk.ask("wait_for_goal", goal_id="g1", timeout_s=30)) for _ in range(1_000)
        ]
        other = tasks.create_task(desk.ask("wait_for_goal", goal_id="g2", timeout_s=30))
        await desk.waiters(1_001)
        desk.record(goal_of("g2"))
        desk.admin.on_goals([GoalId("g2")])
        assert (await other).status is v.GoalStatus.SUCCEEDED  # type: ignore[attr-defined]
        desk.record(msgspec.structs.replace(PENDING, error="not the end"))
        desk.admin.on_goals([G1])
        await desk.waiters(1_000)
        assert not any(task.done() for task in asking)
        desk.record(goal_of(status=v.GoalStatus.FAILED, error="E: no"))
        desk.admin.on_goals({G1})
    views = {(task.result().status, task.result().error) for task in asking}  # type: ignore[attr-defined]
    assert views == {(v.GoalStatus.FAILED, "E: no")}
    assert len(desk.admin._waits) == 0
    assert reasons == []  # nobody worked out again and again what was waited for


async def test_many_that_give_up_at_once_work_it_out_once(reasons: list[GoalId]) -> None:
    desk = Desk(PENDING)
    asks = [desk.ask("wait_for_goal", goal_id="g1", timeout_s=0) for _ in range(100)]
    assert len({view.message for view in await asyncio.gather(*asks)}) == 1  # type: ignore[attr-defined]
    assert reasons == [G1]
    desk.record(HostRecord(host_id=HostId("h"), generation=1))
    await desk.ask("wait_for_goal", goal_id="g1", timeout_s=0)
    desk.led.observed = observed_hosts("host-2")
    await desk.ask("wait_for_goal", goal_id="g1", timeout_s=0)
    assert reasons == [G1, G1, G1]


async def test_the_end_of_the_term_sends_those_who_wait_to_the_next_leader() -> None:
    desk = Desk(PENDING)

    async def wait() -> None:
        with pytest.raises(NotLeading):
            await desk.ask("wait_for_goal", goal_id="g1", timeout_s=30)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(wait())
        await desk.waiters(1)
        desk.term = None
        desk.admin.on_term_end()
    assert len(desk.admin._waits) == 0


async def test_a_caller_that_goes_leaves_nothing_behind_and_the_number_is_limited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(goal_waits, "WAITERS_MAX", 1)
    desk = Desk(PENDING)
    async with asyncio.TaskGroup() as tasks:
        gone = tasks.create_task(desk.ask("wait_for_goal", goal_id="g1", timeout_s=30))
        await desk.waiters(1)
        with pytest.raises(LimitReached):
            await desk.ask("wait_for_goal", goal_id="g1", timeout_s=30)
        gone.cancel()
    assert len(desk.admin._waits) == 0
    assert desk.admin._waits._waiting == {}


def test_a_deploy_is_a_command() -> None:
    payload = b'{"name":"a","replica_config":{"import_path":"m:C"}}'
    assert isinstance(parse_request("deploy", payload), Deploy)


# Backups: the file, its way in pages, and what a restore makes of the present state.


DAY = [
    deploy("a", "v1", num=2, request_id="r1"),
    application("v1", "web", "model", request_id="r2"),
    c.CreateBackend(backend_tag="x", replica_config=deploy("x", "v1", num=1, request_id="r").replica_config),
    c.CreateEndpoint(endpoint="e", traffic={"x": 0.5, "a": 0.5}, route="/e"),
    c.ShadowTraffic(endpoint="a", backend_tag="x", proportion=0.5),
    c.SetHttpOptions(options={"request_timeout_s": 5.0}),
]
LATER = [
    c.DeleteEndpoint(endpoint="e"),
    deploy("a", "v2", num=1, request_id="r3", route="/elsewhere"),
    deploy("b", "v1", num=1, request_id="r4", route="/a"),
    c.ShadowTraffic(endpoint="a", backend_tag="x", proportion=0.0),
    c.DeleteBackend(backend_tag="x"),
    application("v2", "web", "cache", request_id="r5"),
    c.SetHttpOptions(options={"request_timeout_s": 9.0}),
]


def done(checkpoint: Checkpoint, *commands: c.Command[Any]) -> Checkpoint:
    for command in commands:
        checkpoint = checkpoint.applied(decide(checkpoint, command, NOW).changes)
    return checkpoint


def saved_of(checkpoint: Checkpoint) -> Checkpoint:
    return read_backup(write_backup(checkpoint, 7, NOW))[1]


def wished(checkpoint: Checkpoint) -> dict[str, object]:
    """What users asked for, apart from how often."""
    backends = {tag: b for tag, b in checkpoint.backends.items() if not b.deleting}
    return {
        "backends": {
            tag: (b.target.version, b.target.replica_config, b.target.backend_config)
            for tag, b in backends.items()
        },
        "endpoints": {tag: e.target for tag, e in checkpoint.endpoints.items()},
        "applications": {name: a.target for name, a in checkpoint.applications.items()},
        "deployments": {t: d.application for t, d in checkpoint.deployments.items() if t in backends},
        "http": checkpoint.http and checkpoint.http.target,
    }


def restored(checkpoint: Checkpoint, saved: Checkpoint) -> Checkpoint:
    return checkpoint.applied(decide(checkpoint, RestoreFrom(saved=saved, summary=""), NOW).changes)


# -- the file ----------------------------------------------------------------------------------------------------------


def test_a_file_says_what_it_was_made_of() -> None:
    checkpoint = done(Checkpoint(), *DAY)
    data = write_backup(checkpoint, 7, NOW)
    taken_at, saved = read_backup(data)
    kept = {get_key(v): v for v in checkpoint.all_objects() if get_key(v)[0] in KINDS}
    assert (taken_at, {get_key(v): v for v in saved.all_objects()}) == (NOW, kept)
    assert ObjectKind.GOAL not in {kind for kind, _ in kept}
    assert write_backup(checkpoint, 7, NOW) == data, "the same state gives the same file"
    assert check_backup(saved) == "3 deployments, 1 other backends, 4 endpoints"


def _changed(data: bytes, line: int, **fields: object) -> bytes:
    lines = gzip.decompress(data).splitlines()
    lines[line] = json.dumps({**json.loads(lines[line]), **fields}).encode()
    return gzip.compress(b"\n".join(lines) + b"\n")


def _spoiled() -> dict[str, tuple[bytes, str]]:
    data = write_backup(done(Checkpoint(), *DAY), 7, NOW)
    text = gzip.decompress(data)
    return {
        "empty": (b"", "header"),
        "something else": (b"PK\x03\x04 a zip", "gzip"),
        "other lines": (gzip.compress(b'{"a": 1}\n'), "header"),
        "half of it": (data[: len(data) // 2], "missing"),
        "without its end": (gzip.compress(b"".join(text.splitlines(keepends=True)[:-1])), "missing"),
        "one byte": (gzip.compress(text.replace(b"/e", b"/f", 1)), "checksum"),
        "newer schema": (_changed(data, 0, schema_version=99), "schema version 99"),
        "broken packing": (data[:60] + b"\x00" * 40 + data[100:], "is"),
    }


@pytest.mark.parametrize("what", _spoiled())
def test_a_file_that_is_not_whole_is_refused_with_the_reason(what: str) -> None:
    data, why = _spoiled()[what]
    with pytest.raises(BadField, match=why) as refused:
        read_backup(data)
    assert refused.value.field == "file"


def test_a_file_that_unpacks_to_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve_controller.shell.checkpoint_rows.TEXT_BYTES_MAX", 100_000)
    with pytest.raises(BadField, match="unpacks to more"):
        read_backup(gzip.compress(b" " * 1_000_000))


def test_a_backup_that_no_leader_wrote_is_refused() -> None:
    saved = saved_of(done(Checkpoint(), *DAY))
    endpoint = saved.endpoints[EndpointTag("default/e")]
    wrong = msgspec.structs.replace(endpoint.target, traffic={BackendTag("default/nobody"): 1.0})
    saved.endpoints = saved.endpoints.set(
        endpoint.endpoint_tag, msgspec.structs.replace(endpoint, target=wrong)
    )
    with pytest.raises(BadField, match="is not there") as refused:
        check_backup(saved)
    assert refused.value.field == "endpoints[default/e].traffic"


# -- the restore -------------------------------------------------------------------------------------------------------


def test_everything_is_to_be_again_what_it_was() -> None:
    then = done(Checkpoint(), *DAY)
    saved = saved_of(then)
    now = done(then, *LATER)
    assert wished(now) != wished(then)
    after = restored(now, saved)
    assert wished(after) == wished(then)
    assert {g.status for g in after.goals.values() if g.goal_id in now.goals} <= {
        GoalStatus.SUPERSEDED,
        *{g.status for g in now.goals.values() if g.status is not GoalStatus.PENDING},
    }
    assert not set(after.pending) & set(now.goals)
    assert after.backends[BackendTag("default/b")].deleting
    for name in ("goal", "ordinal", "generation", "snapshot"):
        assert getattr(after.counters, name) >= getattr(now.counters, name)
    assert wished(restored(after, saved)) == wished(then), "again comes to the same"


def test_what_is_the_same_is_left_alone() -> None:
    then = done(Checkpoint(), *DAY)
    after = restored(then, saved_of(then))
    for tag, backend in then.backends.items():
        assert after.backends[tag].target == backend.target


def test_another_store_gives_no_number_again_that_the_backup_knows() -> None:
    then = done(Checkpoint(), *DAY)
    after = restored(Checkpoint(), saved_of(then))
    assert wished(after) == wished(then)
    assert all(int(goal_id[1:]) > MARGIN for goal_id in after.goals)
    assert after.counters.ordinal >= MARGIN
    assert then.counters != Counters()


def test_revisions_come_back_with_what_was_gone() -> None:
    then = done(Checkpoint(), *DAY)
    assert restored(Checkpoint(), saved_of(then)).revisions == then.revisions


# -- the way -----------------------------------------------------------------------------------------------------------


class PassingClock:
    time = NOW

    def now(self) -> float:
        return self.time


@pytest.fixture
def transfers(monkeypatch: pytest.MonkeyPatch) -> BackupTransfers:
    monkeypatch.setattr(backups, "BACKUP_PAGE_BYTES_MAX", 500)
    return BackupTransfers(PassingClock())


async def test_pages_are_of_one_moment_whatever_changes_meanwhile(transfers: BackupTransfers) -> None:
    then = done(Checkpoint(), *DAY)
    term = FakeTerm(then)
    first = await transfers.page(term, GetBackup())
    assert first.pages > 2
    term.checkpoint = done(then, *LATER)
    rest = [
        await transfers.page(term, GetBackup(backup_id=first.backup_id, page=n))
        for n in range(1, first.pages)
    ]
    assert b"".join(p.data for p in (first, *rest)) == write_backup(then, term.epoch, NOW)
    with pytest.raises(BadField):
        await transfers.page(term, GetBackup(backup_id=first.backup_id, page=first.pages))
    with pytest.raises(NotFound):
        await transfers.page(term, GetBackup(backup_id="another", page=0))


async def test_what_is_kept_is_bounded_in_number_and_time(transfers: BackupTransfers) -> None:
    term = FakeTerm(done(Checkpoint(), *DAY))
    firsts = [await transfers.page(term, GetBackup()) for _ in range(backups.FILES_MAX + 1)]
    with pytest.raises(NotFound):
        await transfers.page(term, GetBackup(backup_id=firsts[0].backup_id, page=1))
    PassingClock.time += backups.IDLE_S + 1
    with pytest.raises(NotFound):
        await transfers.page(term, GetBackup(backup_id=firsts[-1].backup_id, page=1))


async def sent(transfers: BackupTransfers, data: bytes, *, skips: int = -1) -> object:
    parts = [data[n : n + 500] for n in range(0, len(data), 500)]
    upload_id, answer = uuid.uuid4().hex, None
    for number, part in enumerate(parts):
        if number != skips:
            page = c.Restore(upload_id=upload_id, page=number, pages=len(parts), data=part)
            answer = await transfers.take(page)
            assert await transfers.take(page) is not None, "a retry of a page"
    return answer


async def test_a_file_that_came_whole_is_told_of(transfers: BackupTransfers) -> None:
    then = done(Checkpoint(), *DAY)
    answer = await sent(transfers, write_backup(then, 7, NOW))
    assert isinstance(answer, tuple)
    assert "3 deployments" in answer[0]
    assert wished(answer[1]) == wished(then)


async def test_a_page_that_is_missing_is_noticed(transfers: BackupTransfers) -> None:
    with pytest.raises(BadField, match="from 0"):
        await sent(transfers, write_backup(done(Checkpoint(), *DAY), 7, NOW), skips=1)


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"pages": 0}, LimitReached),
        ({"pages": 10**9}, LimitReached),
        ({"data": b"x" * 501}, LimitReached),
        ({"page": 1}, BadField),
        ({"page": -1}, BadField),
        ({"upload_id": ""}, BadField),
    ],
)
async def test_an_absurd_page_is_refused(
    transfers: BackupTransfers, wrong: dict[str, object], error: type[ServeError]
) -> None:
    page = msgspec.structs.replace(c.Restore(upload_id="u", page=0, pages=1, data=b"x"), **wrong)
    with pytest.raises(error):
        await transfers.take(page)


def test_a_goal_of_an_application_covers_its_parts() -> None:
    then = done(Checkpoint(), *DAY)
    after = restored(then, saved_of(then))
    goals = {after.backends[BackendTag(f"shop/{name}")].goal_id for name in ("web", "model")}
    assert len(goals) == 1
    assert after.applications["shop"].goal_id in goals
    assert GoalId("") not in goals

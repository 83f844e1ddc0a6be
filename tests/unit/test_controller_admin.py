"""What comes in as JSON, what is answered and what an error reads like, without any bus."""

from __future__ import annotations

import asyncio
import base64
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec
import pytest

from serve_common.api import queries as q
from serve_common.api import views as v
from serve_common.api.commands import (
    AnyCommand,
    ChangeReply,
    CommandReply,
    DeleteDeployment,
    Deploy,
    RestoreReply,
)
from serve_common.api.verbs import COMMANDS, QUERIES, VERBS
from serve_common.errors import BadField, Conflict, FencedOut, LimitReached, NotFound, NotLeading
from serve_common.names import BackendTag, GoalId, HostId
from serve_controller.adapters.backup_file import BackupFiles
from serve_controller.core.autoscaling.values import ScalingStatus, Targets
from serve_controller.core.checkpoint import Checkpoint
from serve_controller.core.commands.restoring import RestoreFrom
from serve_controller.core.events import audit_event
from serve_controller.core.objects import CheckpointObject, HostRecord, ObjectChanges
from serve_controller.core.observed import ObservedState
from serve_controller.shell import admin as goal_waits
from serve_controller.shell import queries
from serve_controller.shell.admin import AdminApi
from serve_controller.shell.queries import error_view, parse_request
from tests.unit.controller_parts import (
    G1,
    NOW,
    TAG,
    backend_of,
    checkpoint_of,
    deployment_of,
    endpoint_of,
    goal_of,
    observed_hosts,
    replica_of,
    version_of,
)

T = TypeVar("T")
V1 = version_of()
PENDING = goal_of(status=v.GoalStatus.PENDING)
NEEDED = {
    "name": "a",
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
    "deployments": [{"name": "d", "replica_config": {"import_path": "m:C"}}],
    "ingress": "d",
    "host_id": "h",
    "verb": "delete_deployment",
    "num_replicas": 2,
    "upload_id": "u",
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
        self.executed: list[tuple[AnyCommand, bytes, str]] = []
        self.history_asked: list[tuple[int, str | None, int | None]] = []
        self.error: Exception | None = None
        self.plans_asked = 0

    def on_change(self) -> None:
        self.plans_asked += 1

    async def execute(self, command: AnyCommand, request: bytes, who: str) -> CommandReply:
        if self.error is not None:
            raise self.error
        self.executed.append((command, request, who))
        return ChangeReply(goal_id=G1, updating=True)

    async def read_history(self, limit: int, subject: str | None, before: int | None) -> list[v.HistoryView]:
        self.history_asked.append((limit, subject, before))
        return [
            v.HistoryView(
                id=3, at=NOW, who="me", epoch=7, verb="deploy", subject=TAG, goal_id=G1, request={"name": "a"}
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
            "controller-1", FakeClock(), self.boundary, lambda: self.term, read_load, backups=BackupFiles()
        )

    async def ask(self, verb: str, /, **fields: object) -> object:
        reply = await self.admin.answer(verb, msgspec.json.encode(fields), "me")
        return msgspec.json.decode(reply, type=VERBS[verb][1])

    def record(self, *values: CheckpointObject) -> None:
        self.led.checkpoint = self.led.checkpoint.applied(ObjectChanges(values))

    async def waiters(self, count: int) -> None:
        async with asyncio.timeout(30):
            while len(self.admin._waits) != count:  # noqa: ASYNC110 - nothing tells when a caller begins to wait
                await asyncio.sleep(0)


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
    fields = {f.encode_name: NEEDED[f.name] for f in msgspec.structs.fields(VERBS[verb][0]) if f.required}
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


@pytest.mark.parametrize("verb", sorted(COMMANDS.keys() - {"shutdown", "restore"}))
async def test_every_command_is_executed_as_sent_and_its_reply_crosses_the_boundary(
    desk: Desk, verb: str
) -> None:
    fields = {f.name: NEEDED[f.name] for f in msgspec.structs.fields(VERBS[verb][0]) if f.required}
    assert await desk.ask(verb, **fields) == ChangeReply(goal_id=G1, updating=True)
    ((command, payload, who),) = desk.led.executed
    assert isinstance(command, VERBS[verb][0])
    assert (msgspec.json.decode(payload), who) == (fields, "me")
    assert desk.boundary.crossed == ["reply"]


@pytest.mark.parametrize("payload", [b"", b" \n"])
@pytest.mark.parametrize("verb", sorted(COMMANDS))
async def test_a_command_without_a_content_is_refused_and_told_what_it_needs(
    desk: Desk, verb: str, payload: bytes
) -> None:
    """What publishes on others' behalf can send an empty message to any subject."""
    with pytest.raises(BadField, match=f"request: is empty; {verb} needs a JSON object with ") as refused:
        await desk.admin.answer(verb, payload, "deputy")
    for field in msgspec.structs.fields(VERBS[verb][0]):
        assert not field.required or field.name in str(refused.value)
    assert desk.led.executed == []


@pytest.mark.parametrize("payload", [b"{}", b'{"confirm":"yes"}', b'{"confirm":true}', b'{"confirm":""}'])
async def test_a_shutdown_must_be_confirmed(desk: Desk, payload: bytes) -> None:
    with pytest.raises(BadField, match=r"^confirm: "):
        await desk.admin.answer("shutdown", payload, "me")
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
    assert desk.led.executed == []
    with pytest.raises(BadField, match=r"checksum|gzip|missing"):
        await desk.ask(
            "restore", **{**fields, "data": base64.b64encode(page.data[:-30]).decode()}, confirm=True
        )
    assert desk.led.executed == []
    await desk.admin.answer("restore", msgspec.json.encode({**fields, "confirm": True}), "me")
    ((command, payload, who),) = desk.led.executed
    assert isinstance(command, RestoreFrom)
    assert TAG in command.saved.backends
    assert who == "me"
    assert len(payload) < 500, "the file itself is no part of the audit log"


async def test_who_is_a_claim_of_plain_text(desk: Desk) -> None:
    await desk.admin.answer(
        "delete_deployment", b'{"name":"a"}', "  ann\x1b[2J\u202e\r\n\x9b1m\ud800 b\u00e9a "
    )
    assert desk.led.executed[0][2] == "ann [2J 1m b\u00e9a"


async def test_who_is_cut(desk: Desk) -> None:
    await desk.admin.answer("delete_deployment", b'{"name":"a"}', "w" * 10_000)
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


# -- queries -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", QUERIES)
async def test_every_query_is_answered_with_its_type(
    desk: Desk, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queries, "decide", _nothing_to_do)
    fields = {f.name: NEEDED[f.name] for f in msgspec.structs.fields(VERBS[verb][0]) if f.required}
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
            audit_event(NOW + number, verb="deploy", subject=subject, who="", goal_id=None)
        )
    events = await desk.ask("get_events", subject="a", limit=2)
    assert [e.at - NOW for e in events] == [17, 19]  # type: ignore[attr-defined]
    for limit in (0, 1001):
        with pytest.raises(BadField):
            await desk.ask("get_events", limit=limit)


async def test_history_is_asked_for_by_the_subject_that_was_recorded(desk: Desk) -> None:
    desk.record(HostRecord(host_id=HostId("host-1"), generation=1))
    (entry,) = await desk.ask("get_history", subject="a", limit=7, before=9)  # type: ignore[misc]
    assert entry.who == "me"
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


def _nothing_to_do(_checkpoint: Checkpoint, _command: AnyCommand, _now: float) -> Accepted:
    return Accepted(ObjectChanges())


async def test_a_plan_says_what_would_happen_and_changes_nothing(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decide(checkpoint: Checkpoint, command: AnyCommand, now: float) -> Accepted:
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
    def refuse(_checkpoint: Checkpoint, _command: AnyCommand, _now: float) -> Accepted:
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

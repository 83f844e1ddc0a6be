"""The shell: terms that begin and end, also in the middle of something, and what must never be lost or hidden."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest

from serve_common.api.views import EventView, GoalStatus
from serve_common.errors import (
    BusUnavailable,
    FencedOut,
    LimitReached,
    NotFound,
    NotLeading,
    PermanentError,
    StoreUnavailable,
)
from serve_common.names import BackendTag, ControllerId, HostId
from serve_common.protocol.reports import HostGoal, HostReport, LeaderNotice
from serve_common.protocol.snapshots import Snapshot
from serve_common.runtime.tasks import TaskOwner
from serve_controller.core.autoscaling.values import ScalingDecision, ScalingDecisionKind, ScalingState
from serve_controller.core.observed import HOST_LOST_AFTER_S
from serve_controller.shell import leadership, service
from serve_controller.shell.boundary import OpenBoundary
from serve_controller.shell.observations import INBOX_MAX
from serve_controller.shell.service import ControllerService
from tests.simulation.world import SilentTelemetry
from tests.support.control_loop.orders import deploy
from tests.support.control_loop.pure_host import PureHost
from tests.support.memory_store import MemoryStore
from tests.support.waiting import eventually


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leadership, "RENEW_EVERY_S", 0.01)
    monkeypatch.setattr(leadership, "STANDBY_POLL_S", 0.01)
    monkeypatch.setattr(leadership, "STORE_RETRY_S", 0.01)
    monkeypatch.setattr(service, "IDLE_WAIT_S", 0.05)
    monkeypatch.setattr(service, "PING_EVERY_S", 0.01)
    monkeypatch.setattr("serve_controller.shell.control_loop.STORE_RETRY_S", 0.01)
    monkeypatch.setattr("serve_controller.shell.control_loop.BUS_RETRY_S", 0.01)


class MovedClock:
    """Moves with the loop, and when a test moves it."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def now(self) -> float:
        return 1_000_000.0 + asyncio.get_running_loop().time() + self.ahead_s


class FakeBus:
    def __init__(self) -> None:
        self.service: ControllerService | None = None
        self.notices: list[LeaderNotice] = []
        self.ended = 0
        self.bucket: dict[str, Snapshot] = {}
        self.goals: list[HostGoal] = []
        self.too_large: set[str] = set()
        self.available = True
        self.events: list[tuple[str, str, bytes]] = []
        """Kind, subject and payload of each."""
        self.kept: list[EventView] = []
        """What the stream still has of earlier terms."""
        self.swallows_cancellation = asyncio.Event()
        self.is_publishing = asyncio.Event()
        self.answers = asyncio.Event()
        """Cleared while it hangs."""
        self.answers.set()
        self.round_trips = 0

    async def announce(self, notice: LeaderNotice) -> None:
        self.notices.append(notice)

    async def round_trip(self, within_s: float) -> None:
        if not self.answers.is_set():
            raise BusUnavailable("it hangs")
        self.round_trips += 1

    async def start_term(self, notice: LeaderNotice) -> None:
        self.notices.append(notice)
        assert self.service is not None
        held = {key: (1, snapshot.snapshot_id) for key, snapshot in self.bucket.items()}
        self.service.on_bucket_entries(held, whole=True)

    async def end_term(self) -> None:
        self.ended += 1

    async def publish(self, key: str, snapshot: Snapshot) -> int:
        if not self.available:
            raise BusUnavailable("away")
        if key in self.too_large:
            raise LimitReached("too large")
        if self.swallows_cancellation.is_set():
            self.is_publishing.set()
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                self.swallows_cancellation.clear()  # as `asyncio.wait_for` does, when the answer is there, too
        self.bucket[key] = snapshot
        return snapshot.snapshot_id

    async def retract(self, key: str) -> None:
        self.bucket.pop(key, None)

    async def send_goal(self, goal: HostGoal) -> None:
        self.goals.append(goal)

    def publish_event(self, subject_kind: str, subject: str, payload: bytes) -> None:
        self.events.append((subject_kind, subject, payload))

    async def recent_events(self, limit: int) -> list[EventView]:
        return self.kept[-limit:]


class World:
    """One controller with its twins."""

    def __init__(self) -> None:
        self.clock = MovedClock()
        self.store = MemoryStore(self.clock.now)
        self.bus = FakeBus()
        self.failures: list[BaseException] = []
        self.service = self.controller("controller-1")
        self.bus.service = self.service
        self.tasks = TaskOwner("controller", on_failure=lambda _, error: self.failures.append(error))

    def controller(self, name: str) -> ControllerService:
        return ControllerService(
            controller_id=ControllerId(name),
            store=self.store,
            bus=self.bus,
            clock=self.clock,
            boundary=OpenBoundary(SilentTelemetry(), lambda: 0.0),
            telemetry=SilentTelemetry(),
        )

    async def until(self, check: Callable[[], object], timeout_s: float = 30.0) -> None:
        await eventually(check, within_s=timeout_s)

    async def until_leading(self, epoch: int = 1) -> None:
        await self.until(lambda: self.service.term is not None and self.service.term.epoch >= epoch)

    async def deploy(self, name: str = "a", **fields: object) -> str:
        reply = await self.service.admin.handle("deploy", msgspec.json.encode(deploy(name, **fields)))
        return str(msgspec.json.decode(reply)["goal_id"])

    async def wait_for(self, goal_id: str, timeout_s: float = 30.0) -> GoalStatus:
        request = msgspec.json.encode({"goal_id": goal_id, "timeout_s": timeout_s})
        reply = await self.service.admin.handle("wait_for_goal", request)
        return GoalStatus(msgspec.json.decode(reply)["status"])

    def replica_keys(self) -> set[tuple[str, str]]:
        """Of the recorded replicas."""
        return {key for key in self.store.rows if key[0] == "replica"}

    def lose(self) -> None:
        """Another controller leads from now on."""
        self.store.controller_id, self.store.epoch = ControllerId("other"), self.store.epoch + 1
        self.store.lease_expires_at = float("inf")


@asynccontextmanager
async def running() -> AsyncIterator[World]:
    world = World()
    world.tasks.start(world.service.run(), "run")
    try:
        await world.until_leading()
        yield world
    finally:
        await world.tasks.close(timeout_s=5.0)
        assert len(world.tasks) == 0


async def test_a_leader_announces_itself_and_gives_up_its_lease_when_it_is_stopped() -> None:
    async with running() as world:
        assert [(n.controller_id, n.epoch) for n in world.bus.notices] == [("controller-1", 1)]
    assert world.bus.ended == 1
    assert world.store.lease_expires_at == float("-inf")
    assert world.service.term is None
    assert world.failures == []


async def test_a_deploy_is_recorded_before_it_is_answered_and_then_published() -> None:
    async with running() as world:
        goal_id = await world.deploy(num=0)
        assert ("goal", goal_id) in world.store.rows
        assert [entry.verb for entry in world.store.history] == ["deploy"]
        assert await world.wait_for(goal_id) is GoalStatus.SUCCEEDED
        assert set(world.bus.bucket) == {"backends.default.a", "endpoints.default.a"}


async def test_a_command_that_came_without_a_content_is_recorded_all_the_same() -> None:
    """The database takes JSON only, and would refuse the whole change for its history."""
    async with running() as world:
        assert world.service.term is not None
        await world.service.term.execute(deploy("a", num=0), b"", "me")
        assert world.store.history[-1].request == "{}"


async def test_who_cannot_reach_the_store_is_not_ready_whether_it_leads_or_not() -> None:
    async with running() as world:
        assert world.service.readiness_error() is None
        second = world.controller("controller-2")
        world.tasks.start(second.run(), "second")
        await asyncio.sleep(0.02)
        assert second.readiness_error() is None, "it stands by"
        world.store.available = False
        with pytest.raises(StoreUnavailable):
            await world.deploy(num=0)
        assert "leads, but Postgres is away" in (world.service.readiness_error() or "")
        await world.until(lambda: second.readiness_error() is not None)
        assert "could not take over" in (second.readiness_error() or "")
        world.store.available = True
        await world.until(lambda: world.service.readiness_error() is None is second.readiness_error())


async def test_a_standby_refuses_and_does_nothing() -> None:
    async with running() as world:
        second = world.controller("controller-2")
        with pytest.raises(NotLeading):
            await second.admin.handle("list_deployments", b"")
        second.on_bucket_entries({}, whole=True)
        second.on_bus_restored()


async def test_a_term_that_begins_while_the_bus_is_away_takes_nobodys_silence_for_death() -> None:
    """A standby takes over in a NATS outage: when NATS comes back, all replicas must still be wanted."""
    host = PureHost("host-1")

    async with running() as world:
        world.service.on_report(host.report())
        await world.deploy(num=2)
        await world.until(lambda: world.bus.goals and len(world.bus.goals[-1].replicas) == 2)
        host.hear(world.bus.goals[-1])
        world.service.on_report(host.report())
        rows = {key for key in world.store.rows if key[0] == "replica"}
        assert len(rows) == 2

        world.service.on_bus_lost()
        world.lose()
        await world.until(lambda: world.service.term is None)
        world.store.lease_expires_at = float("-inf")
        await world.until_leading(epoch=3)
        world.clock.ahead_s += 10 * HOST_LOST_AFTER_S
        await asyncio.sleep(0.2)  # some cycles
        assert {key for key in world.store.rows if key[0] == "replica"} == rows

        world.service.on_bus_restored()
        world.service.on_report(host.report())
        await world.until(lambda: world.bus.goals[-1].epoch >= 3)
        assert {g.replica_tag for g in world.bus.goals[-1].replicas} == host.running()


@asynccontextmanager
async def with_two_replicas() -> AsyncIterator[tuple[World, PureHost, set[tuple[str, str]]]]:
    """A leader, a host that runs two replicas, and their recorded keys."""
    host = PureHost("host-1")
    async with running() as world:
        world.service.on_report(host.report())
        await world.deploy(num=2)
        await world.until(lambda: world.bus.goals and len(world.bus.goals[-1].replicas) == 2)
        host.hear(world.bus.goals[-1])
        world.service.on_report(host.report())
        yield world, host, world.replica_keys()


async def test_a_bus_that_hangs_makes_nobody_silent() -> None:
    """It resets no connection, so nothing tells of it but what is not answered."""
    async with with_two_replicas() as (world, host, keys):
        world.bus.answers.clear()
        world.clock.ahead_s += 3 * HOST_LOST_AFTER_S
        await world.until(lambda: "NATS does not answer" in (world.service.readiness_error() or ""))
        await asyncio.sleep(0.2)  # some cycles
        assert world.replica_keys() == keys

        world.bus.answers.set()
        await world.until(lambda: world.service.readiness_error() is None)
        assert len(world.bus.notices) == 2, "everybody is asked to report anew"
        world.clock.ahead_s += HOST_LOST_AFTER_S / 2
        await asyncio.sleep(0.2)
        assert world.replica_keys() == keys, "the host has as long as ever to be heard again"
        world.service.on_report(host.report())
        assert world.replica_keys() == keys


async def test_silence_counts_while_the_bus_answers() -> None:
    async with with_two_replicas() as (world, _, keys):
        gone = world.bus.round_trips
        while world.replica_keys() == keys:
            # In steps: a clock that leaps is a process that stood still, and then silence begins anew.
            world.clock.ahead_s += HOST_LOST_AFTER_S / 8
            await world.until(lambda gone=gone: world.bus.round_trips > gone)
            gone = world.bus.round_trips
            await asyncio.sleep(2 * service.IDLE_WAIT_S)  # a cycle or two
            assert world.clock.ahead_s < 3 * HOST_LOST_AFTER_S, "a host that is really gone must be lost"
        assert len(world.bus.goals) > 3, "it was asked before it counted as lost"


async def test_a_controller_that_stood_still_takes_nobody_for_lost() -> None:
    async with with_two_replicas() as (world, host, keys):
        for _ in range(5):
            world.clock.ahead_s += 2 * HOST_LOST_AFTER_S
            gone = world.bus.round_trips
            await world.until(lambda gone=gone: world.bus.round_trips > gone + 1)
            await asyncio.sleep(0.05)
            assert world.replica_keys() == keys
            world.service.on_report(host.report())


async def test_who_waits_for_a_goal_is_sent_on_as_soon_as_the_term_ends() -> None:
    async with running() as world:
        goal_id = await world.deploy(num=1)
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(_error_of(world.wait_for(goal_id, 30.0)))
            await asyncio.sleep(0)
            begun = asyncio.get_running_loop().time()
            world.lose()
        assert asyncio.get_running_loop().time() - begun < 25.0
        assert isinstance(waiting.result(), NotLeading)


async def _error_of(call: object) -> BaseException | None:
    try:
        await call
    except Exception as error:
        return error
    return None


async def test_a_command_that_meets_the_fence_is_sent_on_and_changes_nothing() -> None:
    async with running() as world:
        await world.deploy(num=0)
        before = dict(world.store.rows)
        world.lose()
        with pytest.raises(NotLeading):
            await world.deploy("late", num=0)
        assert world.store.rows == before
        await world.until(lambda: world.service.term is None)
        assert world.failures == []


async def test_a_command_that_waits_its_turn_when_the_term_ends_begins_no_new_epoch() -> None:
    async with running() as world:
        term = world.service.term
        assert term is not None
        term._is_checkpoint_certain = False
        epoch = world.store.epoch
        term.end()
        with pytest.raises(FencedOut):
            await term.execute(deploy(), b"{}")
        assert world.store.epoch == epoch


async def test_a_write_of_unknown_fate_is_read_back_under_a_new_epoch() -> None:
    async with running() as world:
        await world.deploy(num=0)
        world.store.loses_answers = True
        with pytest.raises(StoreUnavailable):
            await world.deploy("b", num=0)
        assert ("backend", "default/b") in world.store.rows, "it was made"
        await world.until(
            lambda: world.service.term is not None and not world.service.term.is_store_available
        )
        world.store.loses_answers = False
        await world.until(lambda: world.service.term is not None and world.service.term.is_store_available)
        term = world.service.term
        assert term is not None
        assert term.epoch > 1
        goal_id = await world.deploy("b", num=0)
        assert await world.wait_for(goal_id) is GoalStatus.SUCCEEDED
        assert world.bus.ended == 0, "it is still the same term"


def scaling_to(target: int) -> dict[BackendTag, ScalingDecision]:
    decision = ScalingDecision(
        target=target,
        state=ScalingState(),
        verdict=ScalingDecisionKind.UP,
        seen=6.0,
        wanted=3.0,
        why="6 requests seen",
    )
    return {BackendTag("default/a"): decision}


async def test_what_the_autoscaler_decided_is_recorded_with_a_plan_and_told() -> None:
    async with running() as world:
        limits = {"min_replicas": 0, "max_replicas": 5}
        await world.wait_for(await world.deploy(autoscaling_config=limits))
        goals = {key for key in world.store.rows if key[0] == "goal"}
        term = world.service.term
        assert term is not None
        term.scale(scaling_to(3))
        backend = BackendTag("default/a")
        await world.until(lambda: term.checkpoint.backends[backend].num_wanted == 3)
        assert {key for key in world.store.rows if key[0] == "goal"} == goals
        told = [
            msgspec.json.decode(payload) for kind, _, payload in world.bus.events if kind == "autoscaling"
        ]
        assert [event["message"] for event in told] == ["0 → 3 replicas: 6 requests seen"]


async def test_what_the_autoscaler_decides_while_the_store_is_away_is_the_newest_that_it_said() -> None:
    async with running() as world:
        limits = {"min_replicas": 0, "max_replicas": 5}
        await world.wait_for(await world.deploy(autoscaling_config=limits))
        term = world.service.term
        assert term is not None
        world.store.available = False
        term.scale(scaling_to(3))
        await world.until(lambda: not term.is_store_available)
        term.scale(scaling_to(4))
        await asyncio.sleep(0.05)  # some cycles
        assert term.checkpoint.backends[BackendTag("default/a")].num_wanted == 0
        world.store.available = True
        await world.until(lambda: term.checkpoint.backends[BackendTag("default/a")].num_wanted == 4)
        told = [payload for kind, _, payload in world.bus.events if kind == "autoscaling"]
        assert len(told) == 1
        assert world.failures == []


async def test_while_the_store_is_away_queries_are_answered_and_commands_refused() -> None:
    async with running() as world:
        await world.deploy(num=0)
        world.store.available = False
        with pytest.raises(StoreUnavailable):
            await world.deploy("b", num=0)
        assert b"default/a" in await world.service.admin.handle("list_deployments", b"")
        status = msgspec.json.decode(await world.service.admin.handle("get_status", b""))
        assert status["store_available"] is False
        world.store.available = True
        goal_id = await world.deploy("b", num=0)
        assert await world.wait_for(goal_id) is GoalStatus.SUCCEEDED
        assert world.failures == []


async def test_what_can_never_be_published_holds_up_nothing_else() -> None:
    async with running() as world:
        world.bus.too_large = {"backends.default.a"}
        stuck = await world.deploy("a", num=0)
        goal_id = await world.deploy("b", num=0)
        assert await world.wait_for(goal_id) is GoalStatus.SUCCEEDED
        assert await world.wait_for(stuck, 0.05) is GoalStatus.PENDING


async def test_while_the_bus_refuses_everything_is_tried_again() -> None:
    async with running() as world:
        world.bus.available = False
        goal_id = await world.deploy(num=0)
        assert await world.wait_for(goal_id, 0.1) is GoalStatus.PENDING
        world.bus.available = True
        assert await world.wait_for(goal_id) is GoalStatus.SUCCEEDED


async def test_a_cancellation_that_a_library_swallows_still_stops_the_controller() -> None:
    async with running() as world:
        world.bus.swallows_cancellation.set()
        await world.deploy(num=0)
        await world.bus.is_publishing.wait()
    # `running` has asserted that it stopped.
    assert world.bus.ended == 1


async def test_a_lost_leadership_ends_the_term_also_when_the_cancellation_is_swallowed() -> None:
    async with running() as world:
        world.bus.swallows_cancellation.set()
        await world.deploy(num=0)
        await world.bus.is_publishing.wait()
        world.lose()
        await world.until(lambda: world.service.term is None)


async def test_a_newer_leaders_notice_ends_the_term_and_an_older_one_does_not() -> None:
    async with running() as world:
        world.service.on_leader_notice(LeaderNotice(controller_id="x", epoch=1))
        await world.deploy(num=0)
        assert world.bus.ended == 0
        world.service.on_leader_notice(LeaderNotice(controller_id="x", epoch=70))
        # The store judges: this one may lead again, and a notice that it knows nothing of ends one term only.
        await world.until_leading(epoch=2)
        goal_id = await world.deploy("b", num=0)
        assert await world.wait_for(goal_id) is GoalStatus.SUCCEEDED
        assert world.bus.ended == 1


async def test_what_trying_again_cannot_help_ends_the_controller_aloud(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running() as world:

        async def refuse(*_: object) -> None:
            raise PermanentError("the password is wrong")

        monkeypatch.setattr(world.store, "record", refuse)
        with pytest.raises(PermanentError):
            await world.deploy(num=0)
        world.service.on_report(PureHost("host-1").report())
        await world.until(lambda: world.failures)
        assert "the password is wrong" in "".join(map(repr, world.failures))
        assert world.bus.ended == 1


async def test_a_burst_of_reports_is_taken_together_and_bounded() -> None:
    async with running() as world:
        host = PureHost("host-1")
        reports: list[HostReport] = [host.report() for _ in range(2000)]
        for report in reports:
            world.service.on_report(report)
        term = world.service.term
        assert term is not None
        await world.until(lambda: HostId("host-1") in term.observed.hosts)
        assert term.observed.hosts[HostId("host-1")].report.sequence == 2000, "one plan took them all"
        assert term._observations._inbox.maxlen == INBOX_MAX


async def test_who_changed_what_stands_in_the_history_and_goals_tell_their_progress() -> None:
    async with running() as world:
        goal_id = await world.deploy(num=0)
        assert await world.wait_for(goal_id) is GoalStatus.SUCCEEDED
        told = [
            msgspec.json.decode(p, type=EventView) for kind, subject, p in world.bus.events if kind == "goal"
        ]
        assert {subject for kind, subject, _ in world.bus.events if kind == "goal"} == {goal_id}
        assert {(each.kind, each.subject, each.goal_id) for each in told} == {("goal", goal_id, goal_id)}
        assert (told[0].state, told[-1].state) == ("pending", "succeeded")
        assert 0 < told[0].at <= told[-1].at
        assert [subject for kind, subject, _ in world.bus.events if kind == "audit"] == ["default/a"]
        payload = msgspec.json.encode({"name": "a"})
        await world.service.admin.handle("delete_deployment", payload, "somebody")
        (entry, _) = msgspec.json.decode(await world.service.admin.handle("get_history", b""))
        assert (entry["principal"], entry["verb"], entry["request"]) == (
            "somebody",
            "delete_deployment",
            {"name": "a"},
        )
        assert entry["old"] is not None


async def test_what_changes_nothing_stands_in_no_history() -> None:
    async with running() as world:
        await world.deploy(num=0)
        await world.deploy(num=0)
        assert len(world.store.history) == 1


async def test_events_of_earlier_terms_come_before_those_of_this_one() -> None:
    world = World()
    world.bus.kept = [EventView(at=1.0, kind="host", subject="host-9", message="was lost")]
    world.tasks.start(world.service.run(), "run")
    await world.until_leading()
    await world.deploy(num=0)
    await world.until(
        lambda: world.service.term is not None and world.service.term.events[0].subject == "host-9"
    )
    await world.tasks.close(timeout_s=5.0)


async def test_goals_survive_their_controller() -> None:
    """The next leader knows how each one ended, and goes on with those that are pending."""
    async with running() as world:
        done = await world.deploy(num=0)
        assert await world.wait_for(done) is GoalStatus.SUCCEEDED
        pending = await world.deploy("b", num=1)
        world.lose()
        await world.until(lambda: world.service.term is None)
        world.store.lease_expires_at = float("-inf")
        await world.until_leading(epoch=3)
        assert await world.wait_for(done) is GoalStatus.SUCCEEDED
        assert await world.wait_for(pending, 0.05) is GoalStatus.PENDING
        host = PureHost("host-1")
        world.service.on_report(host.report())
        await world.until(lambda: world.bus.goals)
        host.hear(world.bus.goals[-1])
        world.service.on_report(host.report())
        assert await world.wait_for(pending) is GoalStatus.SUCCEEDED


async def test_a_goal_that_never_was_is_told_from_one_that_ended() -> None:
    async with running() as world:
        goal_id = await world.deploy(num=0)
        assert await world.wait_for(goal_id) is GoalStatus.SUCCEEDED
        with pytest.raises(NotFound, match="never given"):
            await world.wait_for("g77")

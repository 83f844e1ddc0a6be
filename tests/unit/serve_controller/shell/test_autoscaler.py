"""The autoscaler's loop over a term: whom it reads when, what it hands over, what it tells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest

from serve_common.api.views import EventView
from serve_common.config.autoscaling import (
    AutoscalingConfig,
    AutoscalingContext,
    AutoscalingPolicy,
    PolicyScope,
    TimeStampedValue,
)
from serve_common.names import BackendTag, DeploymentID, HostId, ProxyId
from serve_common.protocol.reports import ProxyReport, Wake
from serve_controller.core.autoscaling.stats import StatsSeries
from serve_controller.core.autoscaling.values import (
    LoadRequest,
    LoadSample,
    ScalingDecision,
    ScalingDecisionKind,
    ScalingStatus,
    Targets,
)
from serve_controller.core.checkpoint import Checkpoint
from serve_controller.core.objects import Replica, ReplicaState
from serve_controller.core.observed import ObservedState, observe_proxy
from serve_controller.ports import PolicyFailed, PolicyResult
from serve_controller.shell.autoscaler import Autoscaler
from serve_controller.shell.program_policies import ProgramPolicies
from tests.support.controller_parts import (
    NOW,
    TAG,
    backend_of,
    checkpoint_of,
    get_version,
    observed_hosts,
    replica_of,
)

AT_ONCE = AutoscalingConfig(
    min_replicas=0, max_replicas=8, upscale_delay_s=0.0, downscale_delay_s=0.0, metrics_interval_s=10.0
)


class FakeClock:
    def __init__(self) -> None:
        self.time = NOW

    def now(self) -> float:
        return self.time


class FakeTerm:
    def __init__(self, checkpoint: Checkpoint, observed: ObservedState) -> None:
        self.autoscaling: dict[BackendTag, ScalingStatus] = {}
        self.checkpoint = checkpoint
        self.observed = observed
        self.scaled: list[dict[BackendTag, ScalingDecision]] = []
        self.told: list[EventView] = []

    def scale(self, decisions: Mapping[BackendTag, ScalingDecision]) -> None:
        self.scaled.append(dict(decisions))

    def notify(self, events: Sequence[EventView]) -> None:
        self.told += events


class FakeLoads:
    """Loads by backend; None is not known."""

    def __init__(self, **loads: float | None) -> None:
        self.loads = {f"default/{name}": load for name, load in loads.items()}
        self.asked: list[tuple[list[LoadRequest], Targets]] = []

    async def read(
        self, asks: Sequence[LoadRequest], targets: Targets, now: float
    ) -> Mapping[BackendTag, LoadSample]:
        self.asked.append((list(asks), targets))
        return {
            ask.backend_tag: LoadSample(
                at=now,
                seen=seen,
                burst=seen,
                source="scrape",
                missing="" if seen is not None else "p2 is silent",
            )
            for ask in asks
            for seen in [self.loads[ask.backend_tag]]
        }


class FakePolicies:
    def __init__(self, answer: PolicyResult | PolicyFailed | None = None) -> None:
        self.answer = answer
        self.asked: list[tuple[AutoscalingPolicy, str, AutoscalingContext]] = []

    async def run(self, policy: AutoscalingPolicy, app_dir: str, context: AutoscalingContext) -> PolicyResult:
        self.asked.append((policy, app_dir, context))
        assert self.answer is not None
        if isinstance(self.answer, PolicyFailed):
            raise self.answer
        return self.answer


class Rig:
    def __init__(
        self,
        loads: FakeLoads,
        *,
        config: AutoscalingConfig = AT_ONCE,
        num: int = 1,
        running: int | None = None,
        policies: FakePolicies | None = None,
        paused: str = "",
    ) -> None:
        version = get_version(num_replicas=num, autoscaling_config=msgspec.to_builtins(config))
        replicas = [replica_of(n, version) for n in range(1, (num if running is None else running) + 1)]
        checkpoint = checkpoint_of(backend_of(version, autoscaling_paused=paused), *replicas)
        observed = observed_hosts("host-1")
        for proxy_id, age_s in (("p1", 100.0), ("p2", 1.0)):
            report = ProxyReport(
                proxy_id=ProxyId(proxy_id),
                incarnation="i",
                sequence=1,
                started_at=NOW - age_s,
                applied_snapshot_id=1,
                metrics_url=f"http://{proxy_id}/metrics",
            )
            observed = observe_proxy(observed, report, NOW)
        self.clock = FakeClock()
        self.term = FakeTerm(checkpoint, observed)
        self.loads, self.policies = loads, policies or FakePolicies()
        self.autoscaler = Autoscaler(self.term, loads, self.policies, self.clock)

    async def look(self, after_s: float = 0.0) -> None:
        self.clock.time += after_s
        await self.autoscaler.evaluate(self.clock.time)

    def last_of_all(self) -> list[ScalingDecision]:
        return list(self.term.scaled[-1].values())

    @property
    def last(self) -> ScalingDecision:
        return self.term.scaled[-1][TAG]


async def test_a_load_is_read_with_everybody_who_must_have_been_heard_and_its_decision_is_handed_over() -> (
    None
):
    rig = Rig(FakeLoads(a=6.0))
    await rig.look()
    ((asks, targets),) = rig.loads.asked
    (ask,) = asks
    assert (ask.backend_tag, ask.config) == (TAG, AT_ONCE)
    assert ask.hosts == {HostId("host-1")}
    assert ask.proxies == {ProxyId("p1"), ProxyId("p2")}
    assert ask.started_at == {"p1": NOW - 100, "p2": NOW - 1, "host-1": NOW - 100}
    assert ask.num_replicas == 0, "it has only just begun to serve"
    assert targets.urls == {"http://p1/metrics", "http://p2/metrics"}
    assert rig.last.target == 3
    status = rig.term.autoscaling[TAG]
    assert (status.decision.seen, status.source, status.read_at) == (6.0, "scrape", NOW)


async def test_it_looks_again_only_when_the_interval_is_over() -> None:
    rig = Rig(FakeLoads(a=2.0))
    for after_s in (0.0, 1.0, 8.0):
        await rig.look(after_s)
    assert len(rig.loads.asked) == 1
    await rig.look(1.0)
    assert len(rig.loads.asked) == 2


async def test_what_is_paused_or_gone_is_not_read_and_its_status_is_forgotten() -> None:
    paused = Rig(FakeLoads(a=9.0), paused="scale")
    await paused.look()
    assert paused.loads.asked == []
    rig = Rig(FakeLoads(a=9.0))
    await rig.look()
    rig.term.checkpoint = checkpoint_of(backend_of(get_version(num_replicas=1)))
    await rig.look(10.0)
    assert len(rig.loads.asked) == 1
    assert rig.term.autoscaling == {}
    assert rig.autoscaler.counts() == {}


async def test_a_user_who_speaks_while_the_load_is_read_wins() -> None:
    rig = Rig(FakeLoads(a=9.0))
    read = rig.loads.read

    async def read_slowly(
        asks: Sequence[LoadRequest], targets: Targets, now: float
    ) -> Mapping[BackendTag, LoadSample]:
        found = await read(asks, targets, now)
        backend = rig.term.checkpoint.backends[TAG]
        paused = msgspec.structs.replace(backend, autoscaling_paused="scale")
        rig.term.checkpoint = checkpoint_of(paused, base=rig.term.checkpoint)
        return found

    rig.loads.read = read_slowly  # type: ignore[method-assign]
    await rig.look()
    assert rig.term.scaled == [{}]


async def test_a_load_that_is_not_known_holds_and_both_ends_of_that_are_told() -> None:
    rig = Rig(FakeLoads(a=None), num=2)
    await rig.look()
    assert (rig.last.target, rig.last.verdict) == (2, ScalingDecisionKind.HELD)
    await rig.look(10.0)
    rig.loads.loads["default/a"] = 4.0
    await rig.look(10.0)
    assert [event.state for event in rig.term.told] == ["held", rig.last.verdict.value]
    assert "p2 is silent" in rig.term.told[0].message
    assert rig.autoscaler.samples == {("scrape", "missing"): 2, ("scrape", "ok"): 1}
    verdicts, wakeups = rig.autoscaler.counts()[TAG]
    assert (verdicts["held"], wakeups) == (2, 0)


# -- policies of users -------------------------------------------------------------------------------------------------

BY_USER = msgspec.structs.replace(AT_ONCE, policy=AutoscalingPolicy(policy_function="m:f"))


async def test_a_policy_of_the_users_is_asked_and_its_memory_comes_back_to_it() -> None:
    policies = FakePolicies(PolicyResult(num_replicas=5, policy_state={"n": 1}))
    rig = Rig(FakeLoads(a=3.0), config=BY_USER, policies=policies, num=2)
    await rig.look()
    assert rig.last.target == 5
    _policy, _app_dir, context = policies.asked[0]
    assert (context.app_name, context.deployment_name) == ("default", "a")
    assert (context.current_num_replicas, context.total_num_requests, context.policy_state) == (2, 3.0, {})
    await rig.look(10.0)
    assert policies.asked[1][2].policy_state == {"n": 1}
    assert [reading.seen for reading in policies.asked[1][2].samples] == [3.0, 3.0]


async def test_a_policy_that_fails_holds_and_says_why() -> None:
    error = PolicyFailed("Traceback ...\nZeroDivisionError: division by zero")
    rig = Rig(FakeLoads(a=3.0), config=BY_USER, policies=FakePolicies(error), num=2)
    await rig.look()
    assert (rig.last.target, rig.last.verdict) == (2, ScalingDecisionKind.HELD)
    assert "the policy m:f failed: ZeroDivisionError: division by zero" in rig.last.why


async def test_a_policy_is_not_asked_about_a_load_that_is_not_known() -> None:
    rig = Rig(FakeLoads(a=None), config=BY_USER)
    await rig.look()
    assert rig.policies.asked == []
    assert rig.last.verdict is ScalingDecisionKind.HELD


class FakePrograms(ProgramPolicies):
    """Policies that came with programs, as replicas evaluate them."""

    def __init__(self, result: PolicyResult | PolicyFailed) -> None:
        self.result = result
        self.asked: list[tuple[list[str], AutoscalingContext]] = []

    def forget(self, tags: set[BackendTag]) -> None: ...

    async def record(
        self, tag: BackendTag, replicas: Sequence[Replica], config: AutoscalingConfig, now: float
    ) -> StatsSeries:
        return {"queue": {r.replica_tag: (TimeStampedValue(now, 7.0),) for r in replicas}}

    async def run(
        self,
        tag: BackendTag,
        policy: AutoscalingPolicy,
        replicas: Sequence[Replica],
        context: AutoscalingContext,
    ) -> PolicyResult:
        self.asked.append(([replica.replica_tag for replica in replicas], context))
        if isinstance(self.result, PolicyFailed):
            raise self.result
        return self.result


IN_PROGRAM = msgspec.structs.replace(
    AT_ONCE, policy=AutoscalingPolicy(policy_function="__main__:f", code="0" * 64)
)


def programs_rig(result: PolicyResult | PolicyFailed, **fields: Any) -> tuple[Rig, FakePrograms]:
    rig, programs = Rig(FakeLoads(a=3.0), config=IN_PROGRAM, **fields), FakePrograms(result)
    rig.autoscaler = Autoscaler(rig.term, rig.loads, rig.policies, rig.clock, programs)
    return rig, programs


async def test_a_programs_policy_is_evaluated_every_second_with_what_replicas_recorded() -> None:
    rig, programs = programs_rig(PolicyResult(num_replicas=4.2), num=2)
    await rig.look()
    await rig.look(1.0)
    assert rig.last.target == 5
    assert len(programs.asked) == 2
    tags, context = programs.asked[0]
    assert tags == [f"{TAG}#1", f"{TAG}#2"] == context.running_replicas
    assert context.aggregated_metrics == {"queue": dict.fromkeys(tags, 7.0)}
    assert context.raw_metrics["queue"][tags[0]] == [TimeStampedValue(NOW, 7.0)]
    assert (context.deployment_id, context.config) == (DeploymentID("a", "default"), IN_PROGRAM)


async def test_a_programs_policy_that_fails_leaves_the_number_and_is_called_less_often() -> None:
    rig, programs = programs_rig(PolicyFailed("Traceback\nValueError: no queue"), num=2)
    for _ in range(9):
        await rig.look(1.0)
    assert len(programs.asked) == 1
    assert (rig.last.target, rig.last.verdict) == (2, ScalingDecisionKind.HELD)
    assert "ValueError: no queue" in rig.term.told[0].message
    await rig.look(1.0)
    assert len(programs.asked) == 2


async def test_a_programs_policy_waits_for_a_replica_and_limits_apply_meanwhile() -> None:
    rig, programs = programs_rig(PolicyResult(num_replicas=8), num=2, running=0)
    await rig.look()
    assert rig.term.scaled == [{}]
    rig, programs = programs_rig(PolicyResult(num_replicas=8), num=9, running=0)
    await rig.look()
    assert rig.last.target == 8
    rig, programs = programs_rig(PolicyResult(num_replicas=8), num=0)
    rig.loads.loads["default/a"] = 0.0
    await rig.look()
    assert (rig.last.target, programs.asked) == (0, [])


OF_APPLICATION = msgspec.structs.replace(
    IN_PROGRAM,
    policy=AutoscalingPolicy(policy_function="m:f", code="0" * 64, scope=PolicyScope.APPLICATION),
)
OTHER = BackendTag("default/b")


class SharedPrograms(FakePrograms):
    """The policy of an application: what it returns for each backend, and the contexts that it got."""

    def __init__(self, numbers: dict[BackendTag, float] | PolicyFailed) -> None:
        super().__init__(PolicyFailed("it is no deployment's"))
        self.numbers = numbers
        self.shared: list[tuple[list[str], dict[BackendTag, AutoscalingContext]]] = []

    async def run_application(
        self,
        policy: AutoscalingPolicy,
        replicas: Sequence[Replica],
        contexts: Mapping[BackendTag, AutoscalingContext],
    ) -> dict[BackendTag, PolicyResult]:
        self.shared.append(([replica.replica_tag for replica in replicas], dict(contexts)))
        if isinstance(self.numbers, PolicyFailed):
            raise self.numbers
        return {
            tag: PolicyResult(num_replicas=number, policy_state={"of": tag})
            for tag, number in self.numbers.items()
        }


def shared_rig(
    numbers: dict[BackendTag, float] | PolicyFailed, *, others: int = 1
) -> tuple[Rig, SharedPrograms]:
    """Two backends of one application; the second has ``others`` running replicas."""
    rig = Rig(FakeLoads(a=3.0, b=1.0), config=OF_APPLICATION, num=2)
    version = get_version(num_replicas=others, autoscaling_config=msgspec.to_builtins(OF_APPLICATION))
    replicas = [replica_of(10 + n, version, tag=OTHER) for n in range(others)]
    rig.term.checkpoint = checkpoint_of(backend_of(version, OTHER), *replicas, base=rig.term.checkpoint)
    programs = SharedPrograms(numbers)
    rig.autoscaler = Autoscaler(rig.term, rig.loads, rig.policies, rig.clock, programs)
    return rig, programs


async def test_the_policy_of_an_application_is_called_once_for_all_of_its_backends() -> None:
    rig, programs = shared_rig({TAG: 4.2, OTHER: 3})
    await rig.look()
    await rig.look(1.0)
    [_, (tags, contexts)] = programs.shared
    assert tags == [f"{TAG}#1", f"{TAG}#2", f"{OTHER}#10"], "the oldest replica of all evaluates it"
    assert [contexts[tag].total_num_requests for tag in (TAG, OTHER)] == [3.0, 1.0]
    assert [contexts[tag].policy_state for tag in (TAG, OTHER)] == [{"of": TAG}, {"of": OTHER}]
    assert {tag: decision.target for tag, decision in rig.term.scaled[-1].items()} == {TAG: 5, OTHER: 3}


async def test_a_backend_that_the_policy_leaves_out_stays_and_one_without_replicas_is_decided_on() -> None:
    rig, programs = shared_rig({OTHER: 2}, others=0)
    await rig.look()
    assert {tag: decision.target for tag, decision in rig.term.scaled[-1].items()} == {OTHER: 2}
    assert len(programs.shared) == 1


async def test_all_backends_hold_where_the_policy_of_their_application_fails_or_a_load_is_unknown() -> None:
    rig, programs = shared_rig(PolicyFailed("ValueError: no"))
    await rig.look()
    await rig.look(1.0)
    assert len(programs.shared) == 1, "it is not called every second"
    assert {one.verdict for one in rig.term.scaled[0].values()} == {ScalingDecisionKind.HELD}
    assert {tag for tag, one in rig.term.scaled[0].items() if "ValueError: no" in one.why} == {TAG, OTHER}
    rig, programs = shared_rig({TAG: 4, OTHER: 3})
    rig.loads.loads["default/b"] = None
    await rig.look()
    assert programs.shared == []
    assert {one.verdict for one in rig.last_of_all()} == {ScalingDecisionKind.HELD}
    assert f"the load of {OTHER} is not known: p2 is silent" in rig.last.why


# -- waking ------------------------------------------------------------------------------------------------------------


def woken(tag: str = TAG, waiting: int = 5) -> Wake:
    return Wake(backend_tag=tag, waiting=waiting)


async def test_a_request_that_waits_wakes_what_was_scaled_to_zero_at_once() -> None:
    rig = Rig(FakeLoads(a=0.0), num=0)
    rig.autoscaler.wake(woken())
    assert (rig.last.target, rig.last.verdict) == (3, ScalingDecisionKind.WOKEN)
    assert rig.autoscaler.counts()[TAG][1] == 1


@pytest.mark.parametrize("tag", ["default/none", "", "a b"])
async def test_a_wake_up_of_what_is_not_there_is_nothing(tag: str) -> None:
    rig = Rig(FakeLoads(a=0.0), num=0)
    rig.autoscaler.wake(woken(tag))
    assert rig.term.scaled == []


async def test_nobody_wakes_what_runs_or_what_a_user_has_paused() -> None:
    for rig in (Rig(FakeLoads(a=0.0), num=1), Rig(FakeLoads(a=0.0), num=0, paused="scale")):
        rig.autoscaler.wake(woken())
        assert rig.term.scaled == []


async def test_a_replica_that_starts_is_not_woken_again() -> None:
    rig = Rig(FakeLoads(a=0.0), num=0)
    rig.autoscaler.wake(woken(waiting=4))
    assert rig.last.target == 2
    version = get_version(num_replicas=2, autoscaling_config=msgspec.to_builtins(AT_ONCE))
    starting = replica_of(1, version, ReplicaState.STARTING)
    rig.term.checkpoint = checkpoint_of(backend_of(version), starting)
    rig.clock.time += 10
    rig.autoscaler.wake(woken(waiting=4))
    assert len(rig.term.scaled) == 1

"""Policies that came with a program: which replica evaluates them, and what failing replicas do to others."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from serve_common.config.autoscaling import AutoscalingConfig, AutoscalingPolicy
from serve_common.errors import NotFound
from serve_common.names import BackendTag, HostId, ReplicaTag
from serve_common.protocol.evaluation import Evaluation, EvaluationResult, PolicyDecision
from serve_controller.core.objects import Replica
from serve_controller.ports import PolicyFailed, PolicyResult, ReplicaSilent
from serve_controller.shell.program_policies import RETRY_S, ProgramPolicies
from tests.support.controller_parts import TAG, get_version, replica_of
from tests.support.scaling import build_context

CONFIG = AutoscalingConfig(max_replicas=4)
POLICY = AutoscalingPolicy(policy_function="__main__:policy", policy_kwargs={"most": 3}, code="c0de")
CONTEXT = build_context()
Evaluate = Callable[[ReplicaTag, Evaluation], EvaluationResult]


class FakeReplicas:
    def __init__(self, evaluate: Evaluate) -> None:
        self.evaluates = evaluate
        self.asked: list[tuple[ReplicaTag, Evaluation]] = []

    async def evaluate(
        self, host_id: HostId, replica_tag: ReplicaTag, evaluation: Evaluation, timeout_s: float
    ) -> EvaluationResult:
        assert host_id == "host-1"
        assert 0 < timeout_s <= 2.0
        self.asked.append((replica_tag, evaluation))
        return self.evaluates(replica_tag, evaluation)


class Rig:
    def __init__(self, evaluate: Evaluate, pages: int = 1) -> None:
        version = get_version(num_replicas=2)
        self.running: list[Replica] = [replica_of(1, version), replica_of(2, version)]
        self.first, self.second = (replica.replica_tag for replica in self.running)
        self.replicas = FakeReplicas(evaluate)
        self.reads: list[str] = []
        self.pages = pages
        self.policies = ProgramPolicies(self.replicas, self.read)

    async def read(self, digest: str, page: int) -> tuple[bytes, int]:
        self.reads.append(digest)
        if digest == "gone":
            raise NotFound("code: gone is not stored")
        return b"pickle", self.pages

    async def run(self, policy: AutoscalingPolicy = POLICY) -> PolicyResult:
        return await self.policies.run(TAG, policy, self.running, CONTEXT)

    async def record(self, now: float) -> dict[str, dict[str, int]]:
        """How many values are in each series."""
        series = await self.policies.record(TAG, self.running, CONFIG, now)
        return {name: {r: len(points) for r, points in of.items()} for name, of in series.items()}

    @property
    def asked(self) -> list[ReplicaTag]:
        return [tag for tag, _ in self.replicas.asked]


async def test_the_oldest_replica_gets_the_pickle_which_is_read_once_and_its_result_is_the_policys() -> None:
    rig = Rig(lambda _tag, _: EvaluationResult(num_replicas=3.5, policy_state={"n": 1}))
    for _ in range(2):
        assert await rig.run() == PolicyResult(num_replicas=3.5, policy_state={"n": 1})
    assert (rig.asked, rig.reads) == ([rig.first] * 2, ["c0de"])
    call = rig.replicas.asked[0][1].policy
    assert call is not None
    assert (call.code, call.digest, call.kwargs, call.context) == (b"pickle", "c0de", {"most": 3}, CONTEXT)


async def test_after_a_silent_replica_the_next_one_evaluates_and_one_that_raises_is_asked_again() -> None:
    def evaluate(tag: ReplicaTag, _: Evaluation) -> EvaluationResult:
        if tag == rig.first:
            raise ReplicaSilent("it hangs")
        return EvaluationResult(error="ZeroDivisionError: by zero")

    rig = Rig(evaluate)
    with pytest.raises(ReplicaSilent):
        await rig.run()
    for _ in range(2):
        with pytest.raises(PolicyFailed, match="by zero"):
            await rig.run()
    assert rig.asked == [rig.first, rig.second, rig.second]


async def test_the_policy_of_an_application_is_called_once_with_all_contexts() -> None:
    def evaluate(_tag: ReplicaTag, _: Evaluation) -> EvaluationResult:
        decision = PolicyDecision(num_replicas=2.5, policy_state={"n": 1})
        return EvaluationResult(decisions=decisions or {"b": decision})

    decisions: dict[str, PolicyDecision] = {}
    rig, other = Rig(evaluate), build_context(deployment_name="b")
    contexts = {TAG: CONTEXT, BackendTag("default/b"): other}
    found = await rig.policies.run_application(POLICY, rig.running, contexts)
    assert found == {"default/b": PolicyResult(num_replicas=2.5, policy_state={"n": 1})}
    [(_, evaluation)] = rig.replicas.asked
    assert evaluation.policy is not None
    assert (evaluation.policy.context, evaluation.policy.application) == (None, [CONTEXT, other])
    decisions["c"] = PolicyDecision(num_replicas=1.0, policy_state={})
    with pytest.raises(PolicyFailed, match="not asked for"):
        await rig.policies.run_application(POLICY, rig.running, contexts)


@pytest.mark.parametrize(
    ("digest", "pages", "said"), [("gone", 1, "cannot be read"), ("c0de", 2, "larger than that of a policy")]
)
async def test_without_its_code_a_policy_fails_and_no_replica_is_asked(
    digest: str, pages: int, said: str
) -> None:
    rig = Rig(lambda _tag, _: EvaluationResult(), pages)
    with pytest.raises(PolicyFailed, match=said):
        await rig.run(AutoscalingPolicy(policy_function="m:f", code=digest))
    rig.running = []
    with pytest.raises(PolicyFailed, match=r"no replica runs|cannot be read|larger"):
        await rig.run()
    assert rig.asked == []


async def test_stats_of_one_that_fails_are_left_out_and_it_is_not_asked_again_at_once() -> None:
    def evaluate(tag: ReplicaTag, _: Evaluation) -> EvaluationResult:
        if tag == rig.first:
            raise ReplicaSilent("it hangs")
        return EvaluationResult(stats={"queue": 2.0})

    rig = Rig(evaluate)
    for second in range(3):
        assert await rig.record(float(second)) == {"queue": {rig.second: second + 1}}
    assert rig.asked.count(rig.first) == 1
    await rig.record(RETRY_S)
    assert rig.asked.count(rig.first) == 2
    rig.policies.forget({TAG})
    assert await rig.record(11.0) == {"queue": {rig.second: 5}}
    rig.policies.forget(set())
    assert await rig.record(12.0) == {"queue": {rig.second: 1}}


async def test_a_class_without_the_method_is_asked_once_for_each_version_of_its_code() -> None:
    rig = Rig(lambda _tag, _: EvaluationResult())
    for second in range(3):
        assert await rig.record(float(second)) == {}
    assert len(rig.asked) == 2
    new = get_version(7, num_replicas=2)
    rig.running = [replica_of(3, new)]
    await rig.record(3.0)
    assert len(rig.asked) == 3

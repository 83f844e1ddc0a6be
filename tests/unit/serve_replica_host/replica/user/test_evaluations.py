"""What a replica evaluates for the controller: policies of programs, and ``record_autoscaling_stats``."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from muster.sdk.code import dump_code
from serve_common.config.autoscaling import AutoscalingContext
from serve_common.names import DeploymentID
from serve_common.protocol.code import digest_code
from serve_common.protocol.evaluation import (
    RESULT_BYTES_MAX,
    Evaluation,
    EvaluationResult,
    PolicyCall,
    PolicyDecision,
)
from serve_common.runtime.threads import LoopThread
from serve_replica_host.replica.user import evaluations
from serve_replica_host.replica.user.code import UserCode
from serve_replica_host.replica.user.evaluations import Evaluations
from tests.support.scaling import build_context

released = threading.Event()
entered = threading.Event()


@pytest.fixture
def make() -> Iterator[Callable[[Any], Evaluations]]:
    thread = LoopThread("test")
    made: list[Evaluations] = []

    def build(target: Any) -> Evaluations:
        made.append(Evaluations(UserCode(target, None, 4), thread.submit))
        return made[-1]

    yield build
    released.set()
    for each in made:
        each.close()
    thread.stop(5.0)


def call(policy: Any, digest: str = "", **kwargs: Any) -> Evaluation:
    code = dump_code(policy, (), {}, name="policy")
    context = build_context(policy_state={"seen": 1})
    named = digest or digest_code(code)
    return Evaluation(policy=PolicyCall(name="m:f", digest=named, code=code, kwargs=kwargs, context=context))


class Counting:
    def __init__(self, step: int = 1) -> None:
        self.step, self.calls = step, 0

    def __call__(self, ctx: AutoscalingContext) -> tuple[int, dict[str, int]]:
        self.calls += self.step
        return self.calls, {"seen": ctx.policy_state["seen"] + 1}


class Polling:
    """Learns what it decides in a task that goes on between its calls."""

    def __init__(self) -> None:
        self.learned = 1
        self.task: asyncio.Task[None] | None = None

    async def poll(self) -> None:
        await asyncio.sleep(0.01)
        self.learned = 3

    def __call__(self, _: AutoscalingContext) -> int:
        if self.task is None:
            self.task = asyncio.get_running_loop().create_task(self.poll())
        return self.learned


async def later(_: AutoscalingContext) -> int:
    return 1


def leave(_: AutoscalingContext) -> int:
    raise SystemExit(3)


def hang(_: AutoscalingContext) -> int:
    entered.set()
    released.wait(30)
    return 1


def test_a_function_and_an_instance_of_a_class_decide_and_the_instance_lives_on(
    make: Callable[[Any], Evaluations],
) -> None:
    replica = make(object())
    assert replica.evaluate(call(lambda ctx: ctx.total_num_requests / 4)) == EvaluationResult(
        num_replicas=1.5
    )
    assert replica.evaluate(call(lambda ctx: (ctx.total_running_requests, {}))).policy_state == {}
    counting = call(Counting, step=2)
    results = [replica.evaluate(counting) for _ in range(2)]
    assert [(each.num_replicas, each.policy_state) for each in results] == [
        (2, {"seen": 2}),
        (4, {"seen": 2}),
    ]
    assert replica.evaluate(call(Counting, step=3)).num_replicas == 3


def of_application(policy: Any) -> Evaluation:
    code = dump_code(policy, (), {}, name="policy")
    contexts = [build_context(deployment_name=name, policy_state={"of": name}) for name in ("a", "b")]
    called = PolicyCall(name="m:f", digest=digest_code(code), code=code, kwargs={}, application=contexts)
    return Evaluation(policy=called)


def test_the_policy_of_an_application_decides_by_deployment(make: Callable[[Any], Evaluations]) -> None:
    def both(contexts: Any) -> Any:
        a, b = sorted(contexts)
        assert contexts[b].policy_state == {"of": "b"}
        return {a: 2.5, DeploymentID("b", "default"): 1}, {a: {"n": 1}}

    assert make(object()).evaluate(of_application(both)) == EvaluationResult(
        decisions={
            "a": PolicyDecision(num_replicas=2.5, policy_state={"n": 1}),
            "b": PolicyDecision(num_replicas=1.0, policy_state={}),
        }
    )
    one = make(object()).evaluate(of_application(lambda contexts: ({min(contexts): 3}, None)))
    assert one.decisions == {"a": PolicyDecision(num_replicas=3.0, policy_state={})}


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        (lambda _: 2, "returned a int; the policy of an application returns two dicts"),
        (lambda _: ([], {}), "returned a list; it must be a dict by DeploymentID"),
        (lambda _: ({DeploymentID("c", "default"): 1}, {}), "which it was not asked for"),
        (lambda contexts: ({}, {"a": {}}), "'a', which it was not asked for"),
        (lambda contexts: ({min(contexts): "two"}, {}), "returned 'two', a str"),
        (lambda contexts: ({min(contexts): 1}, {min(contexts): 7}), "returned a int as policy_state"),
    ],
)
def test_what_the_policy_of_an_application_may_not_return(
    make: Callable[[Any], Evaluations], policy: Any, said: str
) -> None:
    assert said in make(object()).evaluate(of_application(policy)).error


def test_tasks_of_a_policy_go_on_between_its_calls(make: Callable[[Any], Evaluations]) -> None:
    replica, polling = make(object()), call(Polling)
    assert replica.evaluate(polling).num_replicas == 1
    end = time.monotonic() + 20
    while replica.evaluate(polling).num_replicas != 3:
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("policy", "digest", "said"),
    [
        (lambda _: 1 / 0, "", "ZeroDivisionError"),
        (leave, "", "SystemExit"),
        (later, "", "async function"),
        (lambda _: "three", "", "returned 'three', a str"),
        (lambda _: (1, {"state": "x" * RESULT_BYTES_MAX}), "", "policy_state"),
        (lambda _: 1, "0" * 64, "was changed on its way"),
        (3, "", "is no function but a int"),
    ],
)
def test_what_cannot_decide_is_an_error_in_words(
    make: Callable[[Any], Evaluations], policy: Any, digest: str, said: str
) -> None:
    result = make(object()).evaluate(call(policy, digest))
    assert said in result.error
    assert len(result.error) < 16_000


def test_a_policy_that_hangs_takes_one_thread_and_others_are_refused_until_it_returns(
    make: Callable[[Any], Evaluations], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Busy:
        def record_autoscaling_stats(self) -> dict[str, float]:
            return {"busy": 1}

    replica = make(Busy())
    released.clear()
    thread = threading.Thread(target=replica.evaluate, args=(call(leave),))
    with monkeypatch.context() as patch:
        patch.setattr(evaluations, "load_code", lambda *_: (hang, (), {}))  # with this test's own events
        thread.start()
        assert entered.wait(20)
        assert "has not returned" in replica.evaluate(call(lambda _: 1)).error
        assert replica.evaluate(Evaluation()).stats == {"busy": 1.0}, "stats are another matter"
        released.set()
        thread.join(20)
    assert replica.evaluate(call(lambda _: 1)).num_replicas == 1


class Recorder:
    def __init__(self, value: Any) -> None:
        self.value = value

    def record_autoscaling_stats(self) -> Any:
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


class AsyncRecorder(Recorder):
    async def record_autoscaling_stats(self) -> Any:
        return self.value


def test_stats_are_recorded_by_plain_and_async_methods_and_are_none_without_one(
    make: Callable[[Any], Evaluations],
) -> None:
    for kind in (Recorder, AsyncRecorder):
        assert make(kind({"queue": 3, "share": 0.5})).evaluate(Evaluation()).stats == {
            "queue": 3.0,
            "share": 0.5,
        }
    assert make(object()).evaluate(Evaluation()) == EvaluationResult()


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([1], "returned a list; it must be a dict"),
        ({"queue": "3"}, "returned a str for 'queue'"),
        ({"queue": float("nan")}, "for 'queue'"),
        ({3: 1.0}, "names are texts"),
        ({f"n{number}": 1.0 for number in range(65)}, "returned 65 values; at most 64"),
        (ValueError("no queue today"), "no queue today"),
    ],
)
def test_what_is_no_dict_of_numbers_is_an_error_in_words(
    make: Callable[[Any], Evaluations], value: Any, said: str
) -> None:
    result = make(Recorder(value)).evaluate(Evaluation())
    assert said in result.error
    assert result.stats is None

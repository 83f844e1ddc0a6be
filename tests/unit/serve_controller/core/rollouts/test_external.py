"""External gates of rollouts: when they are asked, what answers come to, and what the rollout does then."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import pytest

from serve_common.api.commands import RolloutAction
from serve_common.api.queries import GetRollouts
from serve_common.config.external_gates import ExternalGate
from serve_common.config.rollout import RolloutConfig, check_rollout_config
from serve_common.errors import BadField
from serve_common.names import BackendTag, GoalId
from serve_common.protocol.gates import RESPONSE_BYTES_MAX, GateRequest, GateResponse, decode_gate_response
from serve_common.telemetry.catalogue.rollouts import ROLLOUT_GATE
from serve_controller.adapters.rollout_metrics import RolloutCollector
from serve_controller.core.observed import observe_gates
from serve_controller.core.rollouts.external import DueGate, get_due_gates, with_response, without_response
from serve_controller.core.rollouts.record import RolloutOutcome, RolloutState
from serve_controller.core.views.rollouts import view_rollouts
from tests.support.control_loop.rollout_world import BASELINE, CANARY, TAG, RolloutWorld

ACCURACY = ExternalGate(name="accuracy", responder="accuracy", at_least=0.9, every_s=5.0, max_failures=1)


class GatedWorld(RolloutWorld):
    """Asks the rollout's external gates as the shell does."""

    def __init__(self) -> None:
        super().__init__()
        self.responses: dict[str, GateResponse | str] = {}
        """By gate; a text is an error."""
        self.asked: list[tuple[str, float]] = []
        """Gates, and how long the step had lasted."""

    def sample(self) -> None:
        loop = self.loop
        for due in get_due_gates(loop.checkpoint, loop.observed.gates, loop.now):
            known = loop.observed.gates.get(due.key)
            response = self.responses.get(due.gate.name, "away")
            assert (due.request.backend_tag, due.request.canary, due.request.baseline) == (
                TAG,
                CANARY,
                BASELINE,
            )
            self.asked.append((due.gate.name, due.request.lasted_s))
            sample = (
                without_response(due, known, response, loop.now)
                if isinstance(response, str)
                else with_response(due, known, response, loop.now)
            )
            loop.observed = observe_gates(loop.observed, {due.key: sample}, {*loop.observed.gates, due.key})

    def exported(self) -> set[tuple[str, str]]:
        """Gates with their status, as Prometheus gets them."""
        term = SimpleNamespace(checkpoint=self.loop.checkpoint, observed=self.loop.observed)
        collector = RolloutCollector(lambda: term, lambda: self.loop.now)  # type: ignore[arg-type,return-value]
        return {
            (sample.labels["gate"], sample.labels["status"])
            for family in collector.collect()
            for sample in family.samples
            if sample.name == ROLLOUT_GATE.name and sample.value
        }

    def run(self, seconds: float, *, until: RolloutState | None = None) -> None:
        for _ in range(round(seconds * 4)):
            self.sample()
            super().run(0.25, until=until)
            if until is not None and self.rollout.state is until:
                return


def test_a_step_passes_only_after_a_good_answer_in_it() -> None:
    world = GatedWorld()
    world.start(gates=(ACCURACY,))
    world.run_to_step(0)
    world.run(120)
    assert world.rollout.step == 0
    assert world.rollout.reason == "accuracy: no answer: away"
    world.responses["accuracy"] = GateResponse(value=0.93)
    world.run_to_step(1)
    assert "accuracy: 0.93" in world.rollout.passed[0].why
    lasted_s = world.asked[-1][1]
    before = len(world.asked)
    world.run(4)
    assert len(world.asked) == before, "the first answer of a step comes after an interval"
    world.run(300, until=RolloutState.ENDED)
    assert world.rollout.outcome is RolloutOutcome.PROMOTED
    assert world.asked[0][1] >= ACCURACY.every_s
    assert lasted_s > ACCURACY.every_s


def test_bad_answers_in_a_row_abort_it_and_others_do_not() -> None:
    world = GatedWorld()
    goal_id = world.start(gates=(ACCURACY,))
    world.run_to_step(0)
    world.do(RolloutAction.PAUSE)
    for _ in range(6):
        world.responses["accuracy"] = GateResponse(value=0.5)
        world.run(5)
        world.responses["accuracy"] = GateResponse(value=0.95)
        world.run(5)
    assert world.rollout.state is RolloutState.PAUSED, "a bad one after a good one is no row"
    world.responses["accuracy"] = GateResponse(value=0.5, reason="of 1,000 digits")
    world.run(20, until=RolloutState.ENDED)
    assert world.rollout.outcome is RolloutOutcome.ABORTED
    assert world.rollout.reason == (
        "accuracy: 0.5, which must be at least 0.9: of 1,000 digits (2 bad answers in a row; 1 may be)"
    )
    world.loop.settle()
    assert world.loop.goal(goal_id).error == world.rollout.reason
    assert world.weights() == {TAG: 1.0}
    assert not list(get_due_gates(world.loop.checkpoint, world.loop.observed.gates, world.loop.now + 100))


def test_silence_between_bad_answers_neither_forgives_nor_aborts() -> None:
    world = GatedWorld()
    world.start(gates=(ACCURACY,))
    world.run_to_step(0)
    world.do(RolloutAction.PAUSE)
    world.responses["accuracy"] = GateResponse(value=0.5)
    world.run(6)
    world.responses.clear()
    world.run(60)
    assert world.rollout.outcome is None
    world.responses["accuracy"] = GateResponse(value=0.5)
    world.run(6, until=RolloutState.ENDED)
    assert world.rollout.outcome is RolloutOutcome.ABORTED


def test_an_old_answer_counts_for_nothing() -> None:
    world = GatedWorld()
    world.start(gates=(ACCURACY,), steps=("10% 60s", "100%"))
    world.run_to_step(0)
    world.responses["accuracy"] = GateResponse(value=0.95)
    world.run(6)
    # Nobody asks any more, as when the one who asks hangs.
    RolloutWorld.run(world, 120)
    assert world.rollout.step == 0
    assert world.rollout.reason.startswith("accuracy: no answer since")


def test_the_last_step_asks_too() -> None:
    world = GatedWorld()
    world.responses["accuracy"] = GateResponse(value=0.93)
    world.start(gates=(ACCURACY,), steps=("50%", "100%"))
    assert {gate for gate, _ in world.exported()} == set()
    world.run_to_step(0)
    assert {"errors", "latency_p50", "accuracy"} <= {gate for gate, _ in world.exported()}
    world.run_to_step(1)
    assert world.exported() == {("accuracy", "unknown")}, "nothing is left to compare"
    world.responses["accuracy"] = GateResponse(value=0.5)
    world.run(60, until=RolloutState.ENDED)
    assert world.rollout.outcome is RolloutOutcome.ABORTED, world.rollout.progress
    assert world.exported() == set()
    assert world.rollout.reason.startswith("accuracy: 0.5, which must be at least 0.9")
    assert world.weights() == {TAG: 1.0}


def test_a_rollout_of_one_step_waits_for_its_gates() -> None:
    world = GatedWorld()
    world.start(gates=(ACCURACY,), steps=("100%",))
    world.run_to_step(0)
    world.run(60)
    assert (world.rollout.state, world.rollout.reason) == (RolloutState.RUNNING, "accuracy: no answer: away")
    world.responses["accuracy"] = GateResponse(value=1.0)
    world.run(60, until=RolloutState.ENDED)
    assert world.rollout.outcome is RolloutOutcome.PROMOTED


def test_callers_see_what_a_gate_waits_for() -> None:
    world = GatedWorld()
    world.start(gates=(ACCURACY,))
    world.run_to_step(0)
    loop = world.loop
    [view] = view_rollouts(loop.checkpoint, loop.observed, loop.now, GetRollouts(name="a"))
    gate = view.gates[-1]
    assert (gate.kind, gate.is_external, gate.status) == ("accuracy", True, "unknown")
    assert gate.text == "waits for its first answer"
    world.responses["accuracy"] = GateResponse(value=1.0)
    world.run(6)
    [view] = view_rollouts(loop.checkpoint, loop.observed, loop.now, GetRollouts(name="a"))
    assert (view.gates[-1].status, view.gates[-1].text) == ("passed", "1")


def due_gate(gate: ExternalGate) -> DueGate:
    request = GateRequest(
        gate=gate.name,
        backend_tag=BackendTag(TAG),
        canary=CANARY,
        baseline=BASELINE,
        goal_id=GoalId("g1"),
        version="v2",
        step=0,
        share=0.1,
        is_shadow=False,
        lasted_s=10.0,
    )
    return DueGate(
        key=(BackendTag(TAG), GoalId("g1"), gate.name), gate=gate, request=request, in_force_at=5.0
    )


@pytest.mark.parametrize(
    ("limits", "response", "passed", "text"),
    [
        ({"at_least": 0.9}, GateResponse(value=0.9), True, "0.9"),
        ({"at_least": 0.9}, GateResponse(value=0.89), False, "0.89, which must be at least 0.9"),
        ({"at_most": 5}, GateResponse(value=5), True, "5"),
        ({"at_most": 5}, GateResponse(value=5.5), False, "5.5, which must be at most 5"),
        ({"min_ratio": 0.98}, GateResponse(value=0.98, baseline_value=1.0), True, "0.98; baseline: 1"),
        (
            {"min_ratio": 0.98},
            GateResponse(value=0.9, baseline_value=1.0),
            False,
            "0.9; baseline: 1, which must be at least 0.98 times the baseline's",
        ),
        ({"max_ratio": 2}, GateResponse(value=3, baseline_value=2), True, "3; baseline: 2"),
        (
            {"max_ratio": 2},
            GateResponse(value=5, baseline_value=2),
            False,
            "5; baseline: 2, which must be at most 2 times the baseline's",
        ),
        ({"max_ratio": 2}, GateResponse(value=5), None, "no answer: it has no value of the baseline"),
        ({"at_least": 0.9}, GateResponse(passed=True), None, "no answer: it has no value"),
        ({"at_least": 0.9}, GateResponse(passed=False, value=0.95), False, "0.95"),
        ({}, GateResponse(passed=True), True, "passed"),
        ({}, GateResponse(passed=False, reason="smells"), False, "not passed: smells"),
        ({}, GateResponse(value=1.0), None, "no answer: it says neither that it passed nor that it did not"),
        ({}, GateResponse(), None, "no answer: it says neither that it passed nor that it did not"),
    ],
)
def test_what_an_answer_comes_to(
    limits: dict[str, float], response: GateResponse, passed: bool | None, text: str
) -> None:
    gate = ExternalGate(name="one", responder="one", **limits)  # type: ignore[arg-type]  # by name
    sample = with_response(due_gate(gate), None, response, 7.0)
    assert (sample.passed, sample.text) == (passed, text)
    assert sample.failures == (1 if passed is False else 0)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"name": "A"}, "gates[0].name"),
        ({"name": "a b"}, "gates[0].name"),
        ({"name": "errors"}, "gates[0].name"),
        ({"name": "x" * 41}, "gates[0].name"),
        ({"responder": ""}, "gates[0]"),
        ({"webhook": "http://x/"}, "gates[0]"),
        ({"responder": "", "webhook": "ftp://x/"}, "gates[0].webhook"),
        ({"responder": "", "webhook": "http://"}, "gates[0].webhook"),
        ({"responder": "", "webhook": "http://[::1"}, "gates[0].webhook"),
        ({"responder": "a.*"}, "gates[0].responder"),
        ({"responder": "", "promql": "up"}, "gates[0]"),
        ({"responder": "", "promql": "u" * 5000, "at_least": 1.0}, "gates[0].promql"),
        ({"at_least": float("nan")}, "gates[0].at_least"),
        ({"every_s": 0.1}, "gates[0].every_s"),
        ({"max_failures": -1}, "gates[0].max_failures"),
    ],
)
def test_a_bad_configuration_is_refused_with_its_field(fields: dict[str, object], field: str) -> None:
    gate = msgspec.structs.replace(ExternalGate(name="one", responder="one"), **fields)
    with pytest.raises(BadField) as caught:
        check_rollout_config(RolloutConfig(gates=(gate,)))
    assert caught.value.field == f"rollout.{field}"


def test_gates_have_a_limit_and_names_of_their_own() -> None:
    gates = tuple(ExternalGate(name=f"g{n}", responder="one") for n in range(11))
    check_rollout_config(RolloutConfig(gates=gates[:10]))
    for wrong in (gates, (gates[0], gates[0])):
        with pytest.raises(BadField, match=r"rollout\.gates"):
            check_rollout_config(RolloutConfig(gates=wrong))


@pytest.mark.parametrize(
    "data", [b"", b"nonsense", b"[]", b'{"value": "1"}', b'{"value": 1e999}', b" " * (RESPONSE_BYTES_MAX + 1)]
)
def test_an_answer_that_cannot_be_read_is_none(data: bytes) -> None:
    with pytest.raises(BadField):
        decode_gate_response(data)

"""Looks at a backend one after another, as the controller takes them."""

from __future__ import annotations

from typing import Any

from serve_common.config.autoscaling import AutoscalingConfig
from serve_controller.core.autoscaling.policy import decide_scaling, wake
from serve_controller.core.autoscaling.values import LoadSample, ScalingDecision, ScalingInput, ScalingState

BEGIN = 1_700_000_000.0


class Rounds:
    """A backend whose replicas run as soon as they are decided on, unless ``starts`` is False."""

    def __init__(self, num_replicas: int, *, starts: bool = True, **config: Any) -> None:
        self.config = AutoscalingConfig(
            **{"min_replicas": 1, "max_replicas": 100, "panic_threshold": 0, **config}
        )
        self.num_replicas = self.num_running = num_replicas
        self.starts = starts
        self.state = ScalingState()
        self.now = BEGIN

    def inputs(self, asked: int | None = None) -> ScalingInput:
        return ScalingInput(
            config=self.config,
            num_replicas=self.num_replicas,
            num_running=self.num_running,
            policy_target=asked,
        )

    def look(self, seen: float | None, *, asked: int | None = None, **reading: Any) -> ScalingDecision:
        """One look at a load of ``seen``, and then a metrics interval passes."""
        newest = LoadSample(**{"at": self.now - 2, "seen": seen, **reading})
        return self.took(decide_scaling(self.inputs(asked), [newest], self.state, self.now))

    def looks(self, seen: float | None, times: int, **reading: Any) -> list[ScalingDecision]:
        return [self.look(seen, **reading) for _ in range(times)]

    def wake(self, waiting: int) -> ScalingDecision:
        return self.took(wake(self.inputs(), waiting, self.now, self.state), passing_s=0)

    def took(self, decision: ScalingDecision, passing_s: float | None = None) -> ScalingDecision:
        self.state, self.num_replicas = decision.state, decision.target
        self.num_running = self.num_replicas if self.starts else min(self.num_running, self.num_replicas)
        self.now += self.config.metrics_interval_s if passing_s is None else passing_s
        return decision

"""A deployment under load in the closed loop of the pure core, and its rollout."""

from __future__ import annotations

from serve_common.api.commands import ControlRollout, RolloutAction, StartRollout
from serve_common.config.rollout import RolloutConfig
from serve_common.names import BackendTag, EndpointTag
from serve_common.protocol.snapshots import EndpointSnapshot
from serve_common.protocol.subjects import endpoint_key
from serve_controller.core.rollouts.record import Rollout, RolloutState
from tests.support.control_loop.closed_loop import Loop
from tests.support.control_loop.orders import deploy
from tests.support.control_loop.pure_host import PureHost
from tests.support.control_loop.traffic import Behaviour, Traffic, model

TAG = "default/a"
CANARY, BASELINE = BackendTag("default/a--canary"), BackendTag("default/a--baseline")
QUICK = ("10%", "50%", "100%")
"""Steps that last no longer than their verdict needs."""


class RolloutWorld:
    """A deployment with two replicas under load, and its rollout."""

    def __init__(
        self,
        new: Behaviour | None = None,
        *,
        rate: float = 600.0,
        is_checked: bool = True,
        num: int = 2,
    ) -> None:
        self.loop = Loop(PureHost("host-1", 8.0), PureHost("host-2", 8.0), is_checked=is_checked)
        self.loop.done(deploy(num=num, cpus=0.5))
        self.traffic = Traffic(self.loop, TAG, model(), new or model(), rate=rate, seed=1)

    def start(self, *, steps: tuple[str, ...] = QUICK, code: str = "good:Code", **fields: object) -> str:
        goal_id = self.loop.ask(
            StartRollout(
                name="a",
                version="v2",
                replica_config={"import_path": code},
                rollout=RolloutConfig(steps=steps, **fields),  # type: ignore[arg-type]  # by name
            )
        ).goal_id
        assert goal_id is not None
        return goal_id

    def do(self, action: RolloutAction, **fields: object) -> None:
        self.loop.command(ControlRollout(name="a", action=action, **fields))  # type: ignore[arg-type]  # by name

    @property
    def rollout(self) -> Rollout:
        return self.loop.checkpoint.rollouts[BackendTag(TAG)]

    def run(self, seconds: float, *, until: RolloutState | None = None) -> None:
        """Time under load."""
        for _ in range(round(seconds * 4)):
            self.traffic.flow(0.25)
            self.loop.step(0.25)
            if until is not None and self.rollout.state is until:
                return

    def run_to_step(self, step: int) -> None:
        """Until requests go by that step."""
        for _ in range(2_000):
            if self.rollout.step == step and self.rollout.is_in_force:
                self.loop.steps(2, 0.01)  # the plan that publishes it
                return
            self.run(0.25)
        raise AssertionError(self.rollout.progress)

    def weights(self) -> dict[str, float]:
        """How the bucket splits requests."""
        content = self.loop.bucket[endpoint_key(EndpointTag(TAG))].content
        assert isinstance(content, EndpointSnapshot)
        return {str(tag): round(weight, 6) for tag, weight in content.traffic.items()}

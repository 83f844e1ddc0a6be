"""What happened to a rollout, in words."""

from __future__ import annotations

from collections.abc import Iterator

from serve_controller.core.rollouts.record import Rollout, RolloutState


def rollout_changes(known: Rollout | None, rollout: Rollout) -> Iterator[tuple[str, str]]:
    """State and message of each event of a rollout."""
    version = rollout.candidate.version or "unversioned"
    if known is None or (known.goal_id != rollout.goal_id and known.started_at != rollout.started_at):
        if known is not None and known.is_active and known.outcome is None:
            former = known.candidate.version or "unversioned"
            yield "superseded", f"version {former}: version {version} was deployed"
        yield "started", f"version {version}: {', '.join(map(str, rollout.steps))}"
        return
    for passed in rollout.passed[len(known.passed) :]:
        yield "passed", f"step {passed.step} after {passed.requests} requests: {passed.why}"
    if rollout.is_in_force and not known.is_in_force:
        yield (
            "step",
            f"requests go by step {rollout.step + 1} of {len(rollout.steps)}: {rollout.steps[rollout.step]}",
        )
    if rollout.state is not known.state:
        if rollout.state is RolloutState.PAUSED:
            yield "paused", f"stays at step {rollout.step + 1} of {len(rollout.steps)}"
        elif known.state is RolloutState.PAUSED and rollout.state is RolloutState.RUNNING:
            yield "resumed", f"goes on at step {rollout.step + 1} of {len(rollout.steps)}"
        elif rollout.state is RolloutState.PROMOTING:
            yield "promoting", f"version {version} takes the place of the old one"
    if rollout.outcome is not known.outcome and rollout.outcome is not None:
        yield rollout.outcome.value, f"version {version}: {rollout.reason}"

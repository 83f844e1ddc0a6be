"""What rollouts mean for what is wanted, and what they promise: apart from how they are done."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from serve_common.api import commands as c
from serve_common.config import backend as merging
from serve_common.config.external_gates import ExternalGate
from serve_common.names import BackendTag, deployment_tag
from serve_common.protocol.gates import GateRequest, GateResponse
from serve_common.protocol.snapshots import EndpointSnapshot, Snapshot
from serve_controller.core.rollouts.record import (
    BASELINE_SUFFIX,
    CANARY_SUFFIX,
    Rollout,
    RolloutOutcome,
    RolloutState,
    canary_tag,
)
from tests.simulation.wishes import LOADED, Made, Wishes, modelled
from tests.simulation.world_store import Check, Commit

if TYPE_CHECKING:
    from tests.simulation.world import World

SUFFIXES = (CANARY_SUFFIX, BASELINE_SUFFIX)
BAD = "bad"
"""Versions whose names begin so fail every second request."""
FOUL = "foul"
"""A version that serves well, and that external gates refuse."""
OUTSIDE = ExternalGate(name="outside", responder="outside", every_s=1.0)


def gate_response(request: GateRequest, now: float) -> GateResponse | None:
    """What the world outside answers about a version; None: nothing, as it does every seventh second."""
    return None if int(now) % 7 == 0 else GateResponse(passed=request.version != FOUL)


def of_rollout(tag: str, made: Made) -> Made:
    """The rollout says how many replicas its backends have, so no number is kept."""
    if not tag.endswith(SUFFIXES):
        return made
    return made._replace(config=msgspec.structs.replace(made.config, num_replicas=LOADED))


def start(now: Wishes, command: c.StartRollout) -> None:
    """Two backends more: the new version, and the old one beside it."""
    tag = deployment_tag(command.name)
    old = now.backends[tag]
    new = Made(
        merging.merged(old.code, command.replica_config, "replica_config"),
        merging.merged(old.config, command.backend_config, "backend_config"),
        command.version,
    )
    for suffix, made in ((CANARY_SUFFIX, new), (BASELINE_SUFFIX, old)):
        config = msgspec.structs.replace(made.config, autoscaling_config=None)
        now.backends[tag + suffix] = of_rollout(tag + suffix, made._replace(config=config))


def forget(now: Wishes, good: Wishes, rollout: Rollout) -> None:
    """What only the rollout needed is to go, but for a failed version that is kept."""
    keeps = rollout.outcome is RolloutOutcome.ABORTED and rollout.config.keeps_failed
    for suffix in SUFFIXES[1:] if keeps else SUFFIXES:
        now.drop(rollout.backend_tag + suffix)
        good.drop(rollout.backend_tag + suffix)


def follow(now: Wishes, good: Wishes, known: Rollout | None, rollout: Rollout) -> bool:
    """What a recorded move of a rollout means; True when its version succeeded."""
    tag = rollout.backend_tag
    had_promoted = known is not None and known.goal_id == rollout.goal_id and known.promoted_code_version
    if rollout.promoted_code_version and not had_promoted:
        candidate, present = rollout.candidate, now.backends[tag].config
        config = msgspec.structs.replace(candidate.backend_config, num_replicas=present.num_replicas)
        now.backends[tag] = Made(candidate.replica_config, modelled(config), candidate.version)
    is_decided = rollout.outcome is not None and (known is None or known.outcome is None)
    if is_decided and rollout.outcome is RolloutOutcome.ABORTED and had_promoted and tag in good.backends:
        now.backends[tag] = good.backends[tag]
    if rollout.state is RolloutState.ENDED:
        forget(now, good, rollout)
    return is_decided and rollout.outcome is RolloutOutcome.PROMOTED


class RolloutsKeepTheirWord(Check):
    """A new version gets requests only where proxies know it, and is judged by requests that there were, each once."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.by_command: set[str] = set()
        """Goals of rollouts that a person let go on."""

    def on_commit(self, commit: Commit) -> None:
        for entry in commit.history:
            if entry.verb == "control_rollout":
                self.by_command.add(commit.after.rollouts[BackendTag(entry.subject)].goal_id)
        for rollout in commit.puts(Rollout):
            self._look(commit.before.rollouts.get(rollout.backend_tag), rollout)

    def _look(self, known: Rollout | None, rollout: Rollout) -> None:
        check, tag = self.world.check, rollout.backend_tag
        version = rollout.candidate.version or ""
        is_bad, is_foul = version.startswith(BAD), version == FOUL
        seen = max((gate.worse.seen.canary for gate in rollout.gates), default=0)
        counted = self.world.requests.get(canary_tag(tag), 0)
        check(seen <= counted, f"{tag} was judged by {seen} requests, and there were {counted}")
        is_promoted = rollout.promoted_code_version and not (known and known.promoted_code_version)
        if is_promoted and rollout.goal_id not in self.by_command:
            check(not is_bad, f"{tag} {version} is promoted")
            check(not (is_foul and rollout.config.gates), f"{tag} {version} is promoted past its gates")
            is_shown = all(passed.requests for passed in rollout.passed)
            check(is_shown, f"{tag} is promoted on missing data: {rollout.passed}")
        if rollout.outcome is RolloutOutcome.ABORTED and not is_bad:
            check(
                not rollout.reason.startswith(("errors", "client_errors", "latency")),
                f"{tag} {version} is accused: {rollout.reason}",
            )
            check(
                is_foul or not rollout.reason.startswith(OUTSIDE.name),
                f"{tag} {version} is accused from outside: {rollout.reason}",
            )

    def on_publish(self, key: str, snapshot: Snapshot) -> None:
        content = snapshot.content
        if not isinstance(content, EndpointSnapshot):
            return
        record = self.world.store.checkpoint.snapshots.get(key)
        if record is None or record.snapshot.snapshot_id != snapshot.snapshot_id:
            return  # a leader that stood still puts an older one, which no router takes
        for tag in content.traffic:
            # After the store went back everything is told anew, in any order.
            if (
                not tag.endswith(CANARY_SUFFIX)
                or self.world.checks.is_bucket_lost
                or self.world.lost_snapshot
            ):
                continue
            for proxy in self.world.proxies:
                if proxy.serves and proxy.proxy_id in self.world.store.checkpoint.proxies:
                    self.world.check(
                        tag in proxy.backends, f"{tag} gets requests, and {proxy.proxy_id} does not know it"
                    )

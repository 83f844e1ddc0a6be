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
from serve_controller.core.checkpoint import Checkpoint
from serve_controller.core.rollouts.record import (
    BASELINE_SUFFIX,
    CANARY_SUFFIX,
    Rollout,
    RolloutOutcome,
    RolloutState,
    canary_tag,
    rolled_out,
)
from tests.simulation.wishes import LOADED, Made, Wishes, modelled
from tests.simulation.world_store import Check, Commit

if TYPE_CHECKING:
    from tests.simulation.sim_proxy import SimProxy
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
        config = msgspec.structs.replace(made.config, autoscaling_config=None, rollout=None)
        now.backends[tag + suffix] = of_rollout(tag + suffix, made._replace(config=config))


def is_started_by(command: object, before: Checkpoint, after: Checkpoint) -> Rollout | None:
    """The rollout that a deploy has started, or goes on with."""
    match command:
        case c.Deploy():
            tag = deployment_tag(command.name)
        case c.UpdateBackendConfig():
            tag = deployment_tag(command.backend_tag)
        case _:
            return None
    known, rollout = before.rollouts.get(tag), after.rollouts.get(tag)
    return rollout if rollout is not None and rollout != known and rollout.outcome is None else None


def must_roll_out(command: object, now: Wishes, good: Wishes, before: Checkpoint) -> bool:
    """Whether a deploy may not replace what runs at once: by what was decided so far."""
    if not isinstance(command, c.Deploy) or command.skips_rollout or command.backend_config.rollout is None:
        return False
    tag = deployment_tag(command.name)
    backend, old, proven = before.backends.get(tag), now.backends.get(tag), good.backends.get(tag)
    if backend is None or backend.deleting or backend.halted or old is None or proven is None:
        return False
    if not any(tag in reach.traffic for reach in now.endpoints.values()):
        return False
    is_other = command.version is None or (command.version, command.replica_config) != (old.version, old.code)
    is_back = (command.version, command.replica_config) == (proven.version, proven.code)
    return is_other and (command.version is None or not is_back) and backend.last_good is not None


def start_deployed(now: Wishes, rollout: Rollout) -> None:
    """Its two backends, as soon as it has any of its own."""
    tag, candidate = rollout.backend_tag, rollout.candidate
    old = now.backends[tag]
    new = Made(candidate.replica_config, candidate.backend_config, candidate.version)
    for suffix, made in ((CANARY_SUFFIX, new), (BASELINE_SUFFIX, old)):
        config = msgspec.structs.replace(made.config, autoscaling_config=None, rollout=None)
        now.backends[tag + suffix] = of_rollout(tag + suffix, made._replace(config=config))


def _promote(now: Wishes, rollout: Rollout) -> None:
    """What the deployment is then: what was changed meanwhile by itself stays."""
    tag, candidate, present = rollout.backend_tag, rollout.candidate, now.backends[rollout.backend_tag].config
    wanted, deployed = candidate.backend_config, rollout.deployed
    number = present.num_replicas
    if deployed is not None:
        former = modelled(deployed.former_config)
        fields = {
            name: getattr(
                modelled(wanted) if getattr(present, name) == getattr(former, name) else present, name
            )
            for name in type(present).__struct_fields__
        }
        now.backends[tag] = Made(
            candidate.replica_config, modelled(type(present)(**fields)), candidate.version
        )
        reach = now.endpoints.get(tag)
        if deployed.endpoint is not None and deployed.former_endpoint is not None and reach is not None:
            names = ("route", "methods", "traffic")
            changed = {
                name: getattr(deployed.endpoint, name)
                for name in names
                if getattr(reach, name) == getattr(deployed.former_endpoint, name)
            }
            options = {
                name: getattr(deployed.endpoint.options, name)
                for name in type(reach.options).__struct_fields__
                if getattr(reach.options, name) == getattr(deployed.former_endpoint.options, name)
            }
            changed["options"] = msgspec.structs.replace(reach.options, **options)
            now.endpoints[tag] = reach._replace(**changed)
        return
    config = msgspec.structs.replace(wanted, num_replicas=number)
    now.backends[tag] = Made(candidate.replica_config, modelled(config), candidate.version)


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
    if known is not None and rollout.has_backends and not known.has_backends:
        start_deployed(now, rollout)
    if rollout.promoted_code_version and not had_promoted:
        _promote(now, rollout)
    is_decided = rollout.outcome is not None and (known is None or known.outcome is None)
    is_aborted = is_decided and rollout.outcome is RolloutOutcome.ABORTED and had_promoted
    if is_aborted and tag in good.backends and _is_candidate(rollout, now.backends[tag]):
        now.backends[tag] = good.backends[tag]
        if rollout.deployed is not None and tag in good.endpoints:
            now.endpoints[tag] = good.endpoints[tag]
    if rollout.state is RolloutState.ENDED:
        forget(now, good, rollout)
    return is_decided and rollout.outcome is RolloutOutcome.PROMOTED


def _is_candidate(rollout: Rollout, made: Made) -> bool:
    """Whether no other version was deployed while it was promoted."""
    candidate = rollout.candidate
    return (made.code, made.version) == (candidate.replica_config, candidate.version)


class RolloutsKeepTheirWord(Check):
    """A new version gets requests only where proxies know it, and is judged by requests that there were, each once."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.by_command: set[str] = set()
        """Goals of rollouts that a person let go on."""
        self.known: set[tuple[str, str, str]] = set()
        """Proxy, backend and rollout: that it has known replicas of."""
        self.routed: set[tuple[str, str, str]] = set()
        """Key, backend and rollout: that requests have gone to."""

    def on_proxy(self, proxy: SimProxy) -> None:
        self.known |= {
            (proxy.proxy_id, tag, backend.rollout_id)
            for tag, backend in proxy.backends.items()
            if backend.rollout_id and backend.replicas
        }

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
            rollout_id = self.world.store.checkpoint.rollouts[rolled_out(tag)].goal_id
            is_first = (key, tag, rollout_id) not in self.routed
            self.routed.add((key, tag, rollout_id))
            for proxy in self.world.proxies:
                if is_first and proxy.serves and proxy.proxy_id in self.world.store.checkpoint.proxies:
                    self.world.check(
                        (proxy.proxy_id, tag, rollout_id) in self.known,
                        f"{tag} gets requests, and {proxy.proxy_id} knows no replica of it",
                    )

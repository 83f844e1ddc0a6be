"""The durable record of a rollout, and where its requests go."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from functools import cache
from typing import Final

import msgspec

from serve_common.config.backend import BackendConfig, EndpointOptions, ReplicaConfig
from serve_common.config.rollout import RolloutConfig, RolloutStep, parse_steps
from serve_common.names import BackendTag, GoalId, ReplicaTag
from serve_common.protocol.reports import RequestCounts
from serve_common.protocol.snapshots import ShadowComparison
from serve_controller.core.rollouts.judge import Gate, new_gates

CANARY_SUFFIX: Final = "--canary"
BASELINE_SUFFIX: Final = "--baseline"


def canary_tag(tag: BackendTag) -> BackendTag:
    """The backend that runs the new version while it is judged."""
    return BackendTag(f"{tag}{CANARY_SUFFIX}")


def baseline_tag(tag: BackendTag) -> BackendTag:
    """The backend that runs the old version beside it."""
    return BackendTag(f"{tag}{BASELINE_SUFFIX}")


def get_compared(tag: BackendTag) -> BackendTag | None:
    """The backend that a canary or a baseline is compared with; None for other tags."""
    for own, other in ((CANARY_SUFFIX, BASELINE_SUFFIX), (BASELINE_SUFFIX, CANARY_SUFFIX)):
        if tag.endswith(own):
            return BackendTag(tag.removesuffix(own) + other)
    return None


def rolled_out(tag: BackendTag) -> BackendTag:
    """The deployment whose rollout a backend belongs to, if it belongs to one: its canary, its baseline, or itself."""
    return BackendTag(tag.removesuffix(CANARY_SUFFIX).removesuffix(BASELINE_SUFFIX))


def rollout_owned(tag: BackendTag) -> str:
    """The key that the goal of a rollout owns."""
    return f"rollouts.{tag}"


class RolloutState(Enum):
    """State of a rollout."""

    RUNNING = "running"
    PAUSED = "paused"
    """It stays at its step; a version that is shown to be worse is still aborted."""
    PROMOTING = "promoting"
    """The canary has all requests while the replicas of the deployment are replaced."""
    CLOSING = "closing"
    """It is decided how it ends (`Rollout.outcome`), and the deployment has all requests, as soon as every proxy knows;
    then canary and baseline go."""
    ENDED = "ended"


class RolloutOutcome(Enum):
    """How a rollout ends."""

    PROMOTED = "promoted"
    ABORTED = "aborted"
    SUPERSEDED = "superseded"
    """The deployment was deployed, rolled back or deleted meanwhile, or went back with its application."""


STEPPING: Final = frozenset({RolloutState.RUNNING, RolloutState.PAUSED})


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """The version that is rolled out."""

    replica_config: ReplicaConfig
    backend_config: BackendConfig
    version: str | None


class AbortedVersion(msgspec.Struct, frozen=True, kw_only=True):
    """A version that is not to be tried again for a while."""

    version_digest: str
    decided_at: float
    refused_until: float
    """Seconds since 1970."""
    reason: str


class EndpointFields(msgspec.Struct, frozen=True, kw_only=True):
    """What a deploy sets of the endpoint of its deployment."""

    route: str | None
    methods: list[str]
    traffic: dict[BackendTag, float]
    options: EndpointOptions
    is_ingress: bool


class Deployed(msgspec.Struct, frozen=True, kw_only=True):
    """What the deploy that started a rollout changes beside the version: applied when that is promoted.

    What was changed since by other commands stays as they set it, so the former values are known too.
    """

    former_config: BackendConfig
    keeps_code: bool = False
    """Whether only the configuration is another one, so that replicas are reconfigured in place."""
    endpoint: EndpointFields | None = None
    """None: the endpoint is left alone."""
    former_endpoint: EndpointFields | None = None


class PassedStep(msgspec.Struct, frozen=True, kw_only=True):
    """A step that is over, for people."""

    step: str
    passed_at: float
    requests: int
    """Requests of the canary that were compared in it."""
    why: str


@cache
def _steps(texts: tuple[str, ...]) -> tuple[RolloutStep, ...]:
    return parse_steps(texts)


class Rollout(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout of a new version of a deployment; the last one stays until the next."""

    backend_tag: BackendTag
    goal_id: GoalId
    candidate: Candidate
    config: RolloutConfig
    started_at: float
    base_code_version: int
    base_config_version: int
    """Versions of the deployment that it was started with; with others the rollout is superseded."""
    state: RolloutState = RolloutState.RUNNING
    outcome: RolloutOutcome | None = None
    """How it ended, or ends; None while that is open."""
    step: int = 0
    """The present step, from 0."""
    is_in_force: bool = False
    """Whether requests go as the step says; until then its replicas start, and requests go as in the step before."""
    in_force_at: float = 0.0
    """When that began, seconds since 1970."""
    approved: bool = False
    """Someone said that the step is over."""
    skips_to_end: bool = False
    """Someone said that it is to be promoted."""
    gates: tuple[Gate, ...] = new_gates()
    judged_at: float = 0.0
    counted: dict[BackendTag, RequestCounts] = {}
    """What proxies have counted so far, as far as it was judged."""
    counted_by: tuple[str, ...] = ()
    """Digests of the incarnations of the proxies that had."""
    recent_times: dict[int, float] = {}
    """Number of the old version's last requests by their time, in buckets; older ones count less."""
    differences: tuple[str, ...] = ()
    """Where the canary's responses to copies differ, for people: they look once it has been aborted."""
    running: tuple[ReplicaTag, ...] = ()
    """Replicas of canary and baseline that were seen running."""
    failures: dict[BackendTag, int] = {}
    """How many of them died or fell ill."""
    passed: tuple[PassedStep, ...] = ()
    promoted_code_version: int = 0
    """Code version that the deployment is promoted to; 0 before."""
    promoted_config_version: int = 0
    """Configuration that replicas are promoted to where their code stays; 0 otherwise."""
    deployed: Deployed | None = None
    """What else its deploy changes; None: it was started by `StartRollout`."""
    has_backends: bool = True
    """Whether canary and baseline are its own; until then those of the rollout that it superseded go."""
    pauses_autoscaling: bool = False
    """It has paused the deployment's autoscaling, and resumes it at its end."""
    reason: str = ""
    """Why it ended, or ends, or waits."""
    decided_at: float | None = None
    """When it was decided how it ends."""
    ended_at: float | None = None
    aborted: tuple[AbortedVersion, ...] = ()
    """Versions that were aborted before this rollout, and are still refused."""

    @property
    def steps(self) -> tuple[RolloutStep, ...]:
        """The steps of its configuration."""
        return _steps(self.config.steps)

    @property
    def traffic_step(self) -> RolloutStep | None:
        """The step by which requests go now; None while the old version has all of them."""
        if self.state is RolloutState.PROMOTING:
            return self.steps[-1]
        if self.state not in STEPPING:
            return None
        at = self.step if self.is_in_force else self.step - 1
        return self.steps[at] if at >= 0 else None

    @property
    def progress(self) -> str:
        """Where it is, for people."""
        at = f"step {self.step + 1} of {len(self.steps)} ({self.steps[self.step]})"
        if self.outcome is not None:
            return f"{self.outcome.value} at {at}: {self.reason}"
        if self.state is RolloutState.RUNNING and self.judged_step is not None:
            return f"{at} is judged"  # its figures change all the time
        what = (
            "is prepared" if self.state is RolloutState.RUNNING and not self.is_in_force else self.state.value
        )
        return f"{at} {what}: {self.reason}" if self.reason else f"{at} {what}"

    def with_goal(self, goal_id: GoalId) -> Rollout:
        """The rollout as part of another goal; proxies count anew, because they count by the goal."""
        if goal_id == self.goal_id:
            return self
        return msgspec.structs.replace(self, goal_id=goal_id, counted={}, counted_by=())

    def is_promoted_to(self, code_version: int, config_version: int) -> bool:
        """Whether these are the versions that it has promoted the deployment to."""
        return code_version == self.promoted_code_version and self.promoted_config_version in (
            0,
            config_version,
        )

    @property
    def is_active(self) -> bool:
        """Whether it has not ended."""
        return self.state is not RolloutState.ENDED

    @property
    def samples_gates(self) -> bool:
        """Whether its external gates are asked now: in every step, also in the last one, where nothing is compared."""
        return self.state in STEPPING and self.is_in_force

    @property
    def judged_step(self) -> int | None:
        """The number of the present step among those that are judged, from 0; None while nothing is compared."""
        is_judged = self.state in STEPPING and self.is_in_force and self.step < len(self.steps) - 1
        return self.step if is_judged else None


def baseline_share(step: RolloutStep) -> float:
    """Share of the requests that the baseline gets: as many as the canary, as long as there are as many left."""
    return step.share if step.is_shadow else min(step.share, 1 - step.share)


def get_comparisons(
    traffic: Iterable[BackendTag], rollouts: Mapping[BackendTag, Rollout]
) -> list[ShadowComparison]:
    """Which responses to copies proxies compare at an endpoint: those of the shadow steps of its backends' rollouts."""
    active = [rollouts[tag] for tag in traffic if tag in rollouts]
    return [
        ShadowComparison(
            own=rollout.backend_tag,
            canary=canary_tag(rollout.backend_tag),
            baseline=baseline_tag(rollout.backend_tag),
            tolerance=rollout.config.difference_tolerance,
            ignored_paths=list(rollout.config.ignored_paths),
        )
        for rollout in active
        if rollout.traffic_step is not None and rollout.traffic_step.is_shadow
    ]


def split_traffic(
    traffic: Mapping[BackendTag, float],
    shadows: Mapping[BackendTag, float],
    rollouts: Mapping[BackendTag, Rollout],
) -> tuple[dict[BackendTag, float], dict[BackendTag, float]]:
    """Where the requests of an endpoint go, and their copies, with the rollouts of its backends."""
    weights, copies = dict(traffic), dict(shadows)
    for tag, weight in traffic.items():
        rollout = rollouts.get(tag)
        step = None if rollout is None else rollout.traffic_step
        if step is None:
            continue
        to = copies if step.is_shadow else weights
        shares = {canary_tag(tag): step.share, baseline_tag(tag): baseline_share(step)}
        if not step.is_shadow:
            weights[tag] = max(weight * (1 - sum(shares.values())), 0.0)
        to.update({name: weight * share for name, share in shares.items() if share > 0})
        if not step.is_shadow and weights[tag] < 1e-9:
            del weights[tag]
    return weights, copies

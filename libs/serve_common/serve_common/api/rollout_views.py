"""Rollouts in replies of the admin API."""

from __future__ import annotations

import msgspec

from serve_common.names import GoalId


class GateView(msgspec.Struct, frozen=True, kw_only=True):
    """What the requests of a rollout's present step have shown about one thing."""

    kind: str
    """``errors``, ``client_errors``, ``latency_p50``, ``latency_p99``, ``differences``, or the name of an
    external gate."""
    status: str
    """``passed``, ``failed`` or ``unknown``."""
    text: str
    """The figures, for people."""
    is_external: bool = False
    """Whether something outside is asked, and no requests are compared."""
    canary_requests: int
    """Requests of the new version that were compared."""
    requests_needed: int | None
    """About how many more the verdict needs, should both versions go on as they are; None where nobody can say."""


class DifferencesView(msgspec.Struct, frozen=True, kw_only=True):
    """What the responses to copies have shown in a rollout's shadow steps, as the proxies that run have counted it."""

    compared: int
    """Requests of which the responses of all three were compared: the caller's, the new version's, the baseline's."""
    different: int
    """Those in which the new version's response differs from the caller's, beyond what is known to vary."""
    baseline_different: int
    """Those in which the baseline's does."""
    examples: list[str]
    """Some paths at which the new version's differ, with the beginning of both values."""


class PassedStepView(msgspec.Struct, frozen=True, kw_only=True):
    """A step that is over."""

    step: str
    """The step, as it was given."""
    passed_at: float
    """When it was over, in seconds since 1970."""
    requests: int
    """Requests of the new version that were compared in it."""
    why: str
    """Why it passed."""


class RolloutView(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout; the last one of a deployment is shown until the next."""

    backend_tag: str
    """Tag of the deployment or backend."""
    goal_id: GoalId
    """Its goal."""
    version: str | None
    """The user's name for the new version."""
    state: str
    """``running``, ``paused``, ``promoting``, ``closing`` (it is decided how it ends) or ``ended``."""
    outcome: str
    """``promoted``, ``aborted`` or ``superseded``; empty while that is open."""
    reason: str
    """Why it ended, or what it waits for."""
    steps: list[str]
    """All steps."""
    step: int
    """Number of the present one, from 0."""
    is_in_force: bool
    """Whether requests go by the present step; until then its replicas start."""
    in_force_at: float | None
    """Since when they do, in seconds since 1970."""
    gates: list[GateView]
    """What the present step's requests have shown."""
    passed: list[PassedStepView]
    """Steps that are over."""
    differences: DifferencesView | None = None
    """Compared responses; None where none were."""
    replica_failures: dict[str, int]
    """Replicas of canary and baseline that died or fell ill."""
    started_at: float
    """In seconds since 1970."""
    decided_at: float | None
    """When it was decided how it ends."""
    ended_at: float | None
    """When nothing was left of it."""

"""Starts a rollout: its record, and the backends of its canary and its baseline."""

from __future__ import annotations

import hashlib
from typing import Final

import msgspec

from serve_common.config.rollout import RolloutConfig
from serve_common.names import GoalId
from serve_common.values import truncate
from serve_controller.core.checkpoint import Draft
from serve_controller.core.objects import Backend
from serve_controller.core.rollouts.closing import PAUSED_BY
from serve_controller.core.rollouts.record import (
    AbortedVersion,
    Candidate,
    Deployed,
    Rollout,
    RolloutOutcome,
    baseline_tag,
    canary_tag,
)
from serve_controller.core.versions import Wanted, make_backend, replica_part

ABORTED_MAX: Final = 20
"""Aborted versions of a deployment that are remembered, the latest."""
_REASON_LENGTH_MAX: Final = 300


def get_version_digest(candidate: Candidate) -> str:
    """What tells versions apart: all that their replicas are made of, but not their number, nor the rollout's steps."""
    made_of = (candidate.version, candidate.replica_config, replica_part(candidate.backend_config))
    return hashlib.blake2b(msgspec.json.encode(made_of), digest_size=16).hexdigest()


def get_aborted(former: Rollout | None, now: float) -> tuple[AbortedVersion, ...]:
    """The versions of a deployment that are still refused, with that of its last rollout; the latest come last."""
    if former is None:
        return ()
    aborted = former.aborted
    if former.outcome is RolloutOutcome.ABORTED and former.decided_at is not None:
        latest = AbortedVersion(
            version_digest=get_version_digest(former.candidate),
            decided_at=former.decided_at,
            refused_until=former.decided_at + former.config.cool_down_s,
            reason=truncate(former.reason, _REASON_LENGTH_MAX),
        )
        aborted = (*(one for one in aborted if one.version_digest != latest.version_digest), latest)
    return tuple(one for one in aborted if now < one.refused_until)[-ABORTED_MAX:]


def put_rollout(
    draft: Draft,
    backend: Backend,
    candidate: Candidate,
    *,
    config: RolloutConfig,
    goal_id: GoalId,
    now: float,
    deployed: Deployed | None = None,
) -> None:
    """Record a rollout of ``backend``.

    Where another one is under way, its canary and baseline may still get requests: then those of this one come later.
    """
    tag, target = backend.backend_tag, backend.target
    former = draft.rollouts.get(tag)
    pauses = backend.autoscaling is not None
    if pauses:
        draft.put(msgspec.structs.replace(backend, autoscaling_paused=PAUSED_BY))
    rollout = Rollout(
        backend_tag=tag,
        goal_id=goal_id,
        candidate=candidate,
        config=config,
        started_at=now,
        base_code_version=target.code_version,
        base_config_version=target.config_version,
        deployed=deployed,
        has_backends=former is None or not former.is_active,
        aborted=get_aborted(former, now),
        pauses_autoscaling=pauses,
    )
    draft.put(rollout)
    if rollout.has_backends:
        put_backends(draft, rollout, backend)


def put_backends(draft: Draft, rollout: Rollout, backend: Backend) -> None:
    """Make canary and baseline; the rollout says how many replicas they have."""
    tag, target = rollout.backend_tag, backend.target
    old = Candidate(
        replica_config=target.replica_config, backend_config=target.backend_config, version=target.version
    )
    for one, version in ((canary_tag(tag), rollout.candidate), (baseline_tag(tag), old)):
        config = msgspec.structs.replace(
            version.backend_config, num_replicas=1, autoscaling_config=None, rollout=None
        )
        wanted = Wanted(version.replica_config, config, version.version, is_same_code=False)
        draft.put(make_backend(draft.backends.get(one), one, rollout.goal_id, wanted))

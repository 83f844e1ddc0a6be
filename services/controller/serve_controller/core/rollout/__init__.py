"""How a backend gets from what runs to what should run, without taking away what serves.

Why "new before old": the old replicas of a changed code version, or of a host that is drained, go only as far as new
ones serve in their place. Only where there is no room for even one more replica does an old one make room first, within
the unavailable budget, and only if the new one would fit into what it leaves.
"""

from __future__ import annotations

import msgspec

from serve_controller.core.checkpoint import Draft
from serve_controller.core.objects import Backend
from serve_controller.core.placement import Ledger
from serve_controller.core.replica_reports import SHORT_LIFE_S, stuck_at
from serve_controller.core.rollout.reconfiguring import reconfigure
from serve_controller.core.rollout.standing import current_replicas, wanted_replicas
from serve_controller.core.rollout.starting import place, start
from serve_controller.core.rollout.stopping import stop_old, stop_surplus, take_out_of_goals
from serve_controller.core.transitions import ROUTED

__all__ = ["look_again_at", "roll"]


def roll(draft: Draft, ledger: Ledger, backend: Backend, now: float) -> None:
    """Start, place, reconfigure and stop replicas of one backend, one step nearer to its target."""
    tag = backend.backend_tag
    _forgive(draft, backend, now)
    start(draft, draft.backends[tag], now)
    place(draft, ledger, draft.backends[tag], now)
    stop_surplus(draft, draft.backends[tag], now)
    stop_old(draft, ledger, draft.backends[tag], now)
    reconfigure(draft, ledger, draft.backends[tag], now)
    take_out_of_goals(draft, draft.backends[tag])
    _prune_versions(draft, draft.backends[tag])


def look_again_at(draft: Draft, backend: Backend, now: float) -> float | None:
    """When time alone makes another step possible, or None."""
    times = []
    if backend.retry_at > now and backend.num_wanted > 0:
        times.append(backend.retry_at)
    if backend.start_failures > 0:
        times += [r.since + SHORT_LIFE_S for r in wanted_replicas(draft, backend) if r.state in ROUTED]
    for replica in draft.replicas_of(backend.backend_tag).values():
        at = stuck_at(backend, replica)
        if at is not None:
            times.append(at)
    return min((at for at in times if at > now), default=None)


def _forgive(draft: Draft, backend: Backend, now: float) -> None:
    """A replica of the target that came up after the last failure and has served for a while ends the series.

    One that served before it proves nothing: it may run on a better host, or with an older configuration. But where as
    many as are wanted have served for so long, none is left to start that could prove more.
    """
    if not backend.start_failures:
        return
    lived = [
        r
        for r in current_replicas(draft, backend)
        if r.state in ROUTED
        and r.config_version == backend.target.config_version
        and now >= r.since + SHORT_LIFE_S  # the same sum as in `look_again_at`
    ]
    if any(r.since >= backend.retry_at for r in lived) or len(lived) >= backend.num_wanted > 0:
        draft.put(msgspec.structs.replace(backend, start_failures=0, retry_at=0.0))


def _prune_versions(draft: Draft, backend: Backend) -> None:
    """Forget versions that no replica runs."""
    if not backend.others and backend.kept is None:
        return
    used = {r.config_version for r in draft.replicas_of(backend.backend_tag).values()}
    kept = backend.kept if backend.kept is not None and backend.kept.config_version in used else None
    named = {v.config_version for v in (backend.target, backend.last_good, kept) if v is not None}
    others = []
    for version in backend.others:
        if version.config_version in used and version.config_version not in named:
            named.add(version.config_version)
            others.append(version)
    if others != backend.others or kept != backend.kept:
        draft.put(msgspec.structs.replace(backend, others=others, kept=kept))

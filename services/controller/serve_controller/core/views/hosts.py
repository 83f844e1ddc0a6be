"""Hosts, proxies and goals as callers see them, and the paging of lists."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import Any, Final, TypeVar

from immutables import Map

from serve_common.api.queries import PAGE_LIMIT_MAX, PagedQuery
from serve_common.api.views import GoalStatus, GoalView, HostView, ProxyView
from serve_common.errors import BadField, NotFound
from serve_common.names import GoalId
from serve_controller.core.checkpoint import Checkpoint
from serve_controller.core.goals import waits_for
from serve_controller.core.objects import parse_number
from serve_controller.core.observed import ObservedState, host_status, is_proxy_silent


def view_goal(checkpoint: Checkpoint, observed: ObservedState, goal_id: GoalId) -> GoalView:
    """One goal. Raises `NotFound`, whose message distinguishes an unknown id from a forgotten one.

    What a pending goal waits for is derived each time; it is never stored.
    """
    goal = checkpoint.goals.get(goal_id)
    if goal is None:
        if 0 < parse_number(goal_id) <= checkpoint.counters.goal:
            raise NotFound(f"goal_id: {goal_id} ended and is forgotten by now")
        raise NotFound(f"goal_id: {goal_id[:80]!r} was never given")
    message = waits_for(checkpoint, observed, goal) if goal.status is GoalStatus.PENDING else ""
    return GoalView(goal_id=goal_id, status=goal.status, error=goal.error, message=message)


Name = TypeVar("Name", bound=str)

ALL: Final[PagedQuery[Any]] = PagedQuery()
"""Everything on one page."""


def paginate(names: Iterable[Name], query: PagedQuery[Any]) -> list[Name]:
    """The names that the query asks for, in order. Raises `BadField` for a limit outside 1 to `PAGE_LIMIT_MAX`.

    Pages continue after a name and not at a number: objects come and go between two pages, and one that exists all the
    time must be on exactly one page.
    """
    later = (name for name in names if name > query.after)
    if query.limit is None:
        return sorted(later)
    return heapq.nsmallest(checked_limit(query.limit, PAGE_LIMIT_MAX), later)


def checked_limit(limit: int, limit_max: int) -> int:
    """``limit`` when it is within 1 to ``limit_max``; raises `BadField` otherwise."""
    if not 1 <= limit <= limit_max:
        shown = limit if abs(limit) < 10**18 else "far too large" if limit > 0 else "far too small"
        raise BadField("limit", f"is {shown}; it must be between 1 and {limit_max}")
    return limit


def view_hosts(
    checkpoint: Checkpoint, observed: ObservedState, now: float, query: PagedQuery[Any] = ALL
) -> list[HostView]:
    """All hosts that reported lately, in the order of their ids."""
    views = []
    for host_id in paginate(observed.hosts, query):
        host, record = observed.hosts[host_id], checkpoint.hosts.get(host_id)
        views.append(
            HostView(
                host_id=host_id,
                status=host_status(observed, host_id, now).value,
                report_age_s=round(now - host.last_seen_at, 3),
                resources=host.report.resources,
                num_replicas=len(checkpoint.by_host.get(host_id, Map())),
                draining=record is not None and record.draining,
            )
        )
    return views


def view_proxies(observed: ObservedState, now: float, query: PagedQuery[Any] = ALL) -> list[ProxyView]:
    """All proxies that reported lately, in the order of their ids."""
    views = []
    for proxy_id in paginate(observed.proxies, query):
        proxy = observed.proxies[proxy_id]
        is_lost = is_proxy_silent(observed, proxy, now)
        status = "lost" if is_lost else "leaving" if proxy.report.leaving else "live"
        views.append(
            ProxyView(
                proxy_id=proxy_id,
                status=status,
                report_age_s=round(now - proxy.last_seen_at, 3),
                address=proxy.report.address,
                applied_snapshot_id=proxy.report.applied_snapshot_id,
            )
        )
    return views

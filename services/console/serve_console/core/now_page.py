"""What the page Now shows: every deployment in one row, and in words what is wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from muster.client.rates import LoadRates
from serve_common.api.rollout_views import RolloutView
from serve_common.api.views import (
    AutoscalingView,
    DeploymentStatus,
    DeploymentView,
    EndpointView,
    ReplicaView,
)
from serve_common.names import short_name
from serve_console.core.rollouts_page import OPEN_STATES, find_shares
from serve_console.core.system import System

ERROR_SHARE_BAD: Final = 0.01
"""Share of errors from which a row says so."""
RUNNING_STATES: Final = frozenset({"running", "updating"})
TROUBLED_MAX: Final = 12
_MESSAGE_MAX: Final = 200


class Dot(msgspec.Struct, frozen=True):
    """One replica as a dot."""

    name: str
    state: str


class NowRow(msgspec.Struct, frozen=True, kw_only=True):
    """One deployment."""

    name: str
    """Its full name."""
    title: str
    """Its name as its user typed it."""
    status: str
    version: str
    """The target version; empty: unversioned."""
    old_versions: list[str]
    """Other versions that replicas still run."""
    route: str | None
    split: list[tuple[str, float]]
    """Where its endpoint's requests go, where that is not only the deployment itself."""
    shadows: list[tuple[str, float]]
    rates: LoadRates | None
    is_failing: bool
    """Whether one request in a hundred fails, or more."""
    running: int
    wanted: int
    dots: list[Dot]
    wrong: str
    """What is wrong or under way, in one line; empty: nothing."""
    rollout: str
    """The open rollout's step in words; empty: there is none."""
    autoscaling: str
    """``up``, ``down``, ``held``, ``paused`` …; empty: not autoscaled."""


class NowGroup(msgspec.Struct, frozen=True, kw_only=True):
    """One application with its deployments, or the deployments without one."""

    name: str
    """Empty: those without an application."""
    status: str
    message: str
    route: str | None
    rows: list[NowRow]


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of the whole stack."""

    deployments: int
    unhealthy: int
    updating: int
    running: int
    wanted: int
    requests_per_s: float | None
    error_share: float | None
    """None: no requests, or not known."""
    p99_s: float | None
    """The highest of all deployments."""
    queued: float | None
    hosts_live: int
    hosts: int
    proxies_live: int
    proxies: int


def build_groups(system: System) -> list[NowGroup]:
    """All applications and deployments: applications by name, then what has none."""
    rows: dict[str, list[NowRow]] = {}
    for view in system.deployments:
        rows.setdefault(view.application, []).append(build_row(system, view))
    groups = [
        NowGroup(
            name=view.name,
            status="unhealthy" if view.build_error else view.status.value,
            message=get_key_line(view.build_error or view.message),
            route=view.route_prefix,
            rows=rows.pop(view.name, []),
        )
        for view in sorted(system.applications.values(), key=lambda view: view.name)
    ]
    groups += [
        NowGroup(name=name, status="", message="", route=None, rows=found) for name, found in rows.items()
    ]
    return sorted(groups, key=lambda group: (group.name != "", group.name))


def find_troubled(groups: Sequence[NowGroup]) -> list[NowRow]:
    """The rows that need attention: unhealthy ones first, then those whose requests fail; at most 12."""
    rows = [row for group in groups for row in group.rows]
    unhealthy = [row for row in rows if row.status == "unhealthy"]
    failing = [row for row in rows if row.is_failing and row.status != "unhealthy"]
    return (unhealthy + failing)[:TROUBLED_MAX]


def build_row(system: System, view: DeploymentView) -> NowRow:
    """The row of one deployment."""
    endpoint = system.endpoints.get(view.name)
    rollout = system.rollouts.get(view.name)
    autoscaling = system.autoscaling.get(view.name)
    rates = system.rates.get(view.name)
    running = sum(replica.state in RUNNING_STATES for replica in view.replicas)
    wanted = view.backend_config.num_replicas if autoscaling is None else autoscaling.num_replicas
    return NowRow(
        name=view.name,
        title=short_name(view.name),
        status=view.status.value,
        version=view.version or "",
        old_versions=find_old_versions(view),
        route=view.route_prefix,
        split=find_split(view.name, endpoint, rollout),
        shadows=[] if endpoint is None else sorted(endpoint.shadows.items()),
        rates=rates,
        is_failing=is_failing(rates),
        running=running,
        wanted=wanted,
        dots=[
            Dot(short_name(replica.replica_tag), replica.state)
            for replica in (*view.replicas, *view.rollout_replicas)
        ],
        wrong=describe_trouble(view),
        rollout=describe_rollout(rollout),
        autoscaling=describe_autoscaling(autoscaling),
    )


def find_old_versions(view: DeploymentView) -> list[str]:
    """Versions, other than the target, that replicas run."""
    return sorted(
        {replica.version or "unversioned" for replica in view.replicas if replica.version != view.version}
    )


def find_split(
    name: str, endpoint: EndpointView | None, rollout: RolloutView | None
) -> list[tuple[str, float]]:
    """Shares of an endpoint's requests, the largest first: of its backends, and behind them of a rollout's versions.

    Empty where all requests go to its own deployment as it was before.
    """
    if endpoint is None:
        return []
    versions = [] if rollout is None else find_shares(rollout)
    if set(endpoint.traffic) == {name} and not versions:
        return []
    shares = dict(endpoint.traffic)
    own = shares.pop(name, 0.0) if versions else 0.0
    others = sorted(shares.items(), key=lambda part: (-part[1], part[0]))
    return [*others, *((version, own * share) for version, share in versions)]


def is_failing(rates: LoadRates | None) -> bool:
    """Whether at least one request in a hundred fails."""
    if rates is None or not rates.errors_per_s or not rates.requests_per_s:
        return False
    return rates.errors_per_s > ERROR_SHARE_BAD * rates.requests_per_s


def describe_trouble(view: DeploymentView) -> str:
    """What is wrong or under way, in one line."""
    if view.message:
        return get_key_line(view.message)
    if view.status is DeploymentStatus.HEALTHY:
        return ""
    messages = Counter(get_key_line(replica.message) for replica in view.replicas if replica.message)
    if not messages:
        return ""
    [(message, count)] = messages.most_common(1)
    return message if count == 1 else f"{message} ({count} replicas)"


def describe_rollout(view: RolloutView | None) -> str:
    """The present step of a rollout that is open; empty otherwise."""
    if view is None or view.state not in OPEN_STATES:
        return ""
    step = view.steps[view.step] if view.step < len(view.steps) else ""
    paused = "paused at " if view.state == "paused" else ""
    return f"{paused}step {view.step + 1} of {len(view.steps)}{f': {step}' if step else ''}"


def describe_autoscaling(view: AutoscalingView | None) -> str:
    """The last decision in one word."""
    if view is None:
        return ""
    return "paused" if view.paused else view.verdict


def compute_totals(system: System) -> Totals:
    """The figures above the list."""
    deployments = system.deployments
    statuses = Counter(view.status for view in deployments)
    known = [system.rates[view.name] for view in deployments if view.name in system.rates]
    requests = _sum([rates.requests_per_s for rates in known])
    errors = _sum([rates.errors_per_s for rates in known])
    hosts = [] if system.status is None else system.status.hosts
    proxies = [] if system.status is None else system.status.proxies
    return Totals(
        deployments=len(deployments),
        unhealthy=statuses[DeploymentStatus.UNHEALTHY],
        updating=statuses[DeploymentStatus.UPDATING],
        running=sum(_count_running(view.replicas) for view in deployments),
        wanted=sum(_wanted(system.autoscaling, view) for view in deployments),
        requests_per_s=requests,
        error_share=errors / requests if requests and errors is not None else None,
        p99_s=max((rates.p99_s for rates in known if rates.p99_s is not None), default=None),
        queued=_sum([rates.queued for rates in known]),
        hosts_live=sum(host.status == "live" for host in hosts),
        hosts=len(hosts),
        proxies_live=sum(proxy.status == "live" for proxy in proxies),
        proxies=len(proxies),
    )


def _count_running(replicas: Sequence[ReplicaView]) -> int:
    return sum(replica.state in RUNNING_STATES for replica in replicas)


def _wanted(autoscaling: Mapping[str, AutoscalingView], view: DeploymentView) -> int:
    scaled = autoscaling.get(view.name)
    return view.backend_config.num_replicas if scaled is None else scaled.num_replicas


def _sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def get_key_line(text: str) -> str:
    """What says most: of a traceback its last line, of other texts the first."""
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    if not lines:
        return ""
    line = lines[-1] if any(line.startswith("Traceback ") for line in lines) else lines[0]
    return line if len(line) <= _MESSAGE_MAX else f"{line[: _MESSAGE_MAX - 1]}…"

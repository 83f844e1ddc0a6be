"""Dry run: what a command would do.

A forecast compares two checkpoints: the command is decided as if in earnest, so that it is refused for the same
reasons, and its effects are the difference between what is and what would be wanted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from typing import Final

from immutables import Map

from serve_common.api.views import PlannedAction, PlannedReplica, PlanView
from serve_common.names import BackendTag, HostId, replica_tag
from serve_common.values import truncate
from serve_controller.core.audit import (
    changed_fields,
    changed_names,
    code_change,
    config_change,
    endpoint_changes,
    format_traffic,
    light_changes,
)
from serve_controller.core.checkpoint import Checkpoint, Draft
from serve_controller.core.goals import deployments_removed_by
from serve_controller.core.objects import (
    Backend,
    BackendVersion,
    EndpointConfig,
    Replica,
    ReplicaState,
    parse_number,
)
from serve_controller.core.observed import ObservedState
from serve_controller.core.placement import Ledger, Placer
from serve_controller.core.rolling_update import stop_rank
from serve_controller.core.transitions import ROUTED, WANTED


def build_notes(before: Checkpoint, after: Checkpoint, with_replicas: Collection[BackendTag]) -> list[str]:
    """Notes on all changes other than those of replicas. ``with_replicas``: backends with planned replicas.

    Routes, traffic and options change at once and touch no replica, which matters to the operator who plans a change.
    """
    return [
        *_applications(before, after),
        *_backends(before, after, with_replicas),
        *_rollouts(before, after),
        *_endpoints(before, after),
        *_http(before, after),
        *_hosts(before, after),
        *_goals(before, after),
    ]


def _applications(before: Checkpoint, after: Checkpoint) -> Iterator[str]:
    for name in changed_names(before.applications, after.applications):
        known, application = before.applications.get(name), after.applications.get(name)
        if application is None or application.deleting:
            if known is not None and not known.deleting:
                yield f"the application {name} goes away with its deployments"
        elif known is None or known.deleting:
            yield f"the application {name} is made: its route leads to {application.target.ingress}"
        elif known.target != application.target:
            was, becomes = set(known.target.deployments), set(application.target.deployments)
            texts = [f"{tag} is added" for tag in sorted(becomes - was)]
            texts += [f"{tag} is dropped" for tag in sorted(was - becomes)]
            if known.target.ingress != application.target.ingress:
                when = "" if application.target.takes_over is None else " once all of it runs"
                texts.append(f"its route leads to {application.target.ingress}{when}")
            if texts:
                yield f"the application {name} changes: {', '.join(texts)}"


def _backends(before: Checkpoint, after: Checkpoint, with_replicas: Collection[BackendTag]) -> Iterator[str]:
    for tag in changed_names(before.backends, after.backends):
        known, backend = before.backends.get(tag), after.backends.get(tag)
        if known is None or backend is None or backend.deleting or known.deleting:
            if tag not in with_replicas:
                yield f"{tag} {'is made' if known is None else 'goes away'}; it has no replicas"
            continue
        texts = light_changes(known.target.backend_config, backend.target.backend_config)
        if texts:
            untouched = "" if tag in with_replicas else "; no replica is touched"
            yield f"{tag}: {', '.join(texts)}{untouched}"


def _rollouts(before: Checkpoint, after: Checkpoint) -> Iterator[str]:
    for tag in changed_names(before.rollouts, after.rollouts):
        known, rollout = before.rollouts.get(tag), after.rollouts.get(tag)
        if rollout is None:
            continue
        is_new = known is None or known.goal_id != rollout.goal_id
        if known is not None and known.outcome is None and (is_new or rollout.outcome is not None):
            yield f"the rollout of {tag} to version {known.candidate.version or 'unversioned'} ends"
        if is_new:
            version = rollout.candidate.version or "unversioned"
            yield (
                f"a rollout of {tag} starts: its requests go to version {version} by the steps "
                f"{', '.join(map(str, rollout.steps))}, and its replicas are replaced at the end"
            )
        elif rollout.deployed != (known and known.deployed):
            yield f"the rollout of {tag} goes on; what else is changed follows when it is promoted"


def _endpoints(before: Checkpoint, after: Checkpoint) -> Iterator[str]:
    for tag in changed_names(before.endpoints, after.endpoints):
        known, endpoint = before.endpoints.get(tag), after.endpoints.get(tag)
        if endpoint is None:
            assert known is not None
            route = known.target.route
            yield f"the endpoint {tag} goes away" + (
                "" if route is None else f", and with it its route {route}"
            )
        elif known is None:
            sends = format_traffic(endpoint.target.traffic.items())
            yield f"the endpoint {tag} is made{_at_route(endpoint.target)}: it sends to {sends}"
        elif texts := endpoint_changes(known.target, endpoint.target):
            yield f"the endpoint {tag} changes: {'; '.join(texts)}"


def _at_route(config: EndpointConfig) -> str:
    return ", headless" if config.route is None else f" at {config.route}"


def _http(before: Checkpoint, after: Checkpoint) -> Iterator[str]:
    if texts := changed_fields(before.http_options, after.http_options):
        yield f"all proxies: {', '.join(texts)}"


def _hosts(before: Checkpoint, after: Checkpoint) -> Iterator[str]:
    for host_id in changed_names(before.hosts, after.hosts):
        known, host = before.hosts.get(host_id), after.hosts.get(host_id)
        was, becomes = (record is not None and record.draining for record in (known, host))
        if becomes and not was:
            yield f"nothing more is placed on the host {host_id}"
        elif was and not becomes:
            yield f"replicas may be placed on the host {host_id} again; none is moved there"


def _goals(before: Checkpoint, after: Checkpoint) -> Iterator[str]:
    replaced = [goal for goal_id, goal in before.pending.items() if goal_id not in after.pending]
    for goal in sorted(replaced, key=lambda g: parse_number(g.goal_id)):
        yield f"the pending goal {goal.goal_id} ({goal.kind.value} {goal.subject}) is replaced"


PLANNED_MAX: Final = 1_000
"""Most replicas in one reply, which must fit into one NATS message. A note counts them all."""
NOTES_MAX: Final = 300
WHY_LENGTH_MAX: Final = 300
NOTE_LENGTH_MAX: Final = 500
HOSTS_SHOWN_MAX: Final = 5


def forecast(before: Checkpoint, after: Checkpoint, observed: ObservedState, now: float) -> PlanView:
    """Forecast the effects of a command whose changes lead from ``before`` to ``after``, until its goal is reached."""
    drained = _newly_drained(before, after)
    moved = {replica.backend_tag for host_id in drained for replica in _on_host(after, host_id)}
    dropped = _dropped(before, after)
    tags = {*changed_names(before.backends, after.backends), *moved, *dropped}
    plans = [_BackendPlan(before, after, tag, drained, dropped.get(tag, "")) for tag in sorted(tags)]
    replicas = [replica for plan in plans for replica in plan.replicas()]
    notes = build_notes(before, after, {plan.tag for plan in plans if plan.replicas()})
    notes += _capacity_notes(after, plans, observed, now)
    if len(replicas) > PLANNED_MAX:
        counts = ", ".join(f"{sum(r.action is a for r in replicas)} to {a.value}" for a in PlannedAction)
        notes.insert(0, f"only the first {PLANNED_MAX} of {len(replicas)} replicas are named: {counts}")
    if len(notes) > NOTES_MAX:
        notes[NOTES_MAX:] = [f"and {len(notes) - NOTES_MAX} more notes"]
    return PlanView(
        updating=bool(replicas or notes) or _differs(before, after),
        replicas=replicas[:PLANNED_MAX],
        notes=[truncate(note, NOTE_LENGTH_MAX) for note in notes],
    )


def _differs(before: Checkpoint, after: Checkpoint) -> bool:
    """Whether there is any change."""
    return (
        bool(changed_names(before.backends, after.backends))
        or bool(changed_names(before.endpoints, after.endpoints))
        or bool(changed_names(before.applications, after.applications))
        or bool(changed_names(before.build_failures, after.build_failures))
        or bool(changed_names(before.captures, after.captures))
        or bool(changed_names(before.rollouts, after.rollouts))
        or before.http != after.http
    )


def _newly_drained(before: Checkpoint, after: Checkpoint) -> set[HostId]:
    hosts = set()
    for host_id in changed_names(before.hosts, after.hosts):
        known, host = before.hosts.get(host_id), after.hosts.get(host_id)
        if host is not None and host.draining and not (known is not None and known.draining):
            hosts.add(host_id)
    return hosts


def _dropped(before: Checkpoint, after: Checkpoint) -> dict[BackendTag, str]:
    """Deployments left out of an application, with its name: they are deleted once the rest of it runs."""
    dropped = {}
    for name in changed_names(before.applications, after.applications):
        application = after.applications.get(name)
        goal = None if application is None else after.pending.get(application.goal_id)
        if goal is not None:
            dropped.update(dict.fromkeys(deployments_removed_by(after, goal), name))
    return dropped


def _on_host(checkpoint: Checkpoint, host_id: HostId) -> Iterable[Replica]:
    replicas = checkpoint.by_host.get(host_id, Map()).values()
    return (replica for replica in replicas if replica.state in WANTED)


class _BackendPlan:
    """Planned actions on one backend's replicas."""

    def __init__(
        self,
        before: Checkpoint,
        after: Checkpoint,
        tag: BackendTag,
        drained: Collection[HostId],
        dropped_by: str,
    ) -> None:
        self.tag = tag
        self.starts: list[PlannedReplica] = []
        self.stops: list[PlannedReplica] = []
        self._reconfigured: list[PlannedReplica] = []
        self._hosts = after.hosts
        self._known = before.backends.get(tag)
        self._is_deployment = tag in before.deployments or tag in after.deployments
        self._running = sorted(
            (r for r in before.get_replicas(tag).values() if r.state in WANTED), key=lambda r: r.ordinal
        )
        backend = after.backends.get(tag)
        if backend is None or backend.deleting:
            if self._known is not None and not self._known.deleting:
                self._stop(self._running, f"{self._what} goes away")
        elif dropped_by:
            self._stop(self._running, f"the application {dropped_by} has it no longer")
        elif self._known is None or _replica_inputs(self._known) != _replica_inputs(backend):
            self._plan_target(self._known, backend)
        elif not backend.halted:
            self._plan_drained(drained)

    @property
    def _what(self) -> str:
        return "the deployment" if self._is_deployment else "the backend"

    def replicas(self) -> list[PlannedReplica]:
        """All actions, in order."""
        return [*self.starts, *self.stops, *self._reconfigured]

    def _plan_target(self, known: Backend | None, backend: Backend) -> None:
        """Plan for the new target, by the rules of a rolling update."""
        target = backend.target
        stay: list[Replica] = []
        num_moved = 0
        for replica in self._running:
            was = _get_version(known, replica)
            if not _serves(backend, replica):
                self._stop([replica], f"{self._what} is new" if was is None else code_change(was, target))
            elif self._is_draining(replica):
                self._stop([replica], f"the host {replica.host_id} is drained")
                num_moved += 1
            else:
                stay.append(replica)
        surplus = len(stay) - backend.num_wanted
        if surplus > 0:
            stay.sort(key=stop_rank)
            why = _num_change(known, backend) or f"{backend.num_wanted} replicas are wanted"
            self._stop(stay[:surplus], why)
            stay = sorted(stay[surplus:], key=lambda r: r.ordinal)
        else:
            self._start_missing(known, backend, -surplus, num_moved)
        for replica in stay:
            if _needs_reconfigure(backend, replica):
                was = _get_version(known, replica)
                why = "a newer configuration" if was is None else config_change(was, target)
                self._reconfigured.append(self._planned(PlannedAction.RECONFIGURE, replica, why))

    def _start_missing(self, known: Backend | None, backend: Backend, missing: int, num_moved: int) -> None:
        if known is None:
            self._start(missing, f"{self._what} is new")
        elif known.deleting:
            self._start(missing, f"{self._what} is made again")
        elif known.target.code_version != backend.target.code_version:
            self._start(missing, code_change(known.target, backend.target))
        else:
            added = min(max(backend.num_wanted - known.num_wanted, 0), missing)
            moved = min(num_moved, missing - added)
            self._start(moved, "instead of one on a host that is drained")
            self._start(missing - added - moved, "is missing already, whatever the command changes")
            self._start(added, _num_change(known, backend))

    def _plan_drained(self, drained: Collection[HostId]) -> None:
        """Plan for drained hosts: replacements are started elsewhere first."""
        for replica in self._running:
            if replica.host_id in drained:
                why = f"the host {replica.host_id} is drained"
                self._start(1, f"{why}: instead of {replica.replica_tag}")
                self._stop([replica], why)

    def _is_draining(self, replica: Replica) -> bool:
        host = None if replica.host_id is None else self._hosts.get(replica.host_id)
        return host is not None and host.draining

    def _start(self, count: int, why: str) -> None:
        self.starts += [self._planned(PlannedAction.START, None, why)] * count

    def _stop(self, replicas: Iterable[Replica], why: str) -> None:
        self.stops += [self._planned(PlannedAction.STOP, replica, why) for replica in replicas]

    def _planned(self, action: PlannedAction, replica: Replica | None, why: str) -> PlannedReplica:
        return PlannedReplica(
            action=action,
            backend_tag=self.tag,
            replica_tag=None if replica is None else replica.replica_tag,
            why=truncate(why, WHY_LENGTH_MAX),
        )


def _replica_inputs(backend: Backend) -> object:
    """The fields of a backend that decide on its replicas."""
    return backend.target, backend.deleting, backend.halted, backend.retained


def _serves(backend: Backend, replica: Replica) -> bool:
    """Whether the replica runs the target's code, or a version that a failed update kept."""
    if replica.code_version == backend.target.code_version:
        return True
    retained = backend.retained
    return retained is not None and replica.code_version == retained.code_version and replica.state in ROUTED


def _needs_reconfigure(backend: Backend, replica: Replica) -> bool:
    """Whether the replica runs or starts with another configuration than the target's, and is to be reconfigured."""
    if replica.state is ReplicaState.SHOULD_START or replica.code_version != backend.target.code_version:
        return False
    is_retained = backend.retained is not None and replica.config_version == backend.retained.config_version
    return replica.config_version != backend.target.config_version and not is_retained


def _get_version(known: Backend | None, replica: Replica) -> BackendVersion | None:
    if known is None:
        return None
    same_code = (v for v in known.versions() if v.code_version == replica.code_version)
    return known.get_version(replica.config_version) or next(same_code, None)


def _num_change(known: Backend | None, backend: Backend) -> str:
    """Why more or fewer replicas are wanted; empty when they are not."""
    if known is None or known.num_wanted == backend.num_wanted:
        return ""
    return f"num_replicas {known.num_wanted} → {backend.num_wanted}"


def _capacity_notes(
    after: Checkpoint, plans: Iterable[_BackendPlan], observed: ObservedState, now: float
) -> list[str]:
    """Notes on how many of the new replicas would fit on which hosts, beside everything that runs now."""
    draft = Draft(after)
    ledger = Ledger(draft, observed, now)
    notes = []
    for plan in plans:
        if not plan.starts:
            continue
        count, version = len(plan.starts), after.backends[plan.tag].target
        where = _place(draft, ledger, plan.tag, version, count)
        fit = sum(where.values())
        new = f"{count} new replica{'s' if count > 1 else ''}"
        if fit == count:
            notes.append(f"{plan.tag}: there is room for {new}: {_shown_hosts(where)}")
            continue
        capacity = f"there is room for {fit} of {new}" + (f" ({_shown_hosts(where)})" if fit else "")
        wait = "the others wait, also for the room of those that stop" if plan.stops else "the others wait"
        notes.append(f"{plan.tag}: {capacity}; {wait}: {ledger.why_not(plan.tag, version)}")
    return notes


def _place(
    draft: Draft, ledger: Ledger, tag: BackendTag, version: BackendVersion, count: int
) -> Counter[HostId]:
    """Put as many replicas into the draft as fit, so that the next backend's placement includes them."""
    placer = Placer(ledger, tag, version)
    where: Counter[HostId] = Counter()
    for _ in range(count):
        host_id = placer.place()
        if host_id is None:
            break
        where[host_id] += 1
        draft.put(
            Replica(
                replica_tag=replica_tag(tag, draft.next_ordinal()),
                backend_tag=tag,
                code_version=version.code_version,
                config_version=version.config_version,
                state=ReplicaState.STARTING,
                since=0.0,
                host_id=host_id,
                needs=placer.needs,
                goal_bytes=placer.goal_bytes,
            )
        )
    return where


def _shown_hosts(where: Counter[HostId]) -> str:
    hosts = sorted(where)
    shown = [f"{where[host_id]} on {host_id}" for host_id in hosts[:HOSTS_SHOWN_MAX]]
    more = len(hosts) - HOSTS_SHOWN_MAX
    return ", ".join(shown) + (f" and more on {more} others" if more > 0 else "")

"""The pure core in a closed loop: reconcile, record, perform, report, without shell, store or bus.

Why beside the simulated world: here every single plan is looked at, and a test can put any state and any report in
front of the core. Hosts and proxies keep their contracts unless a test makes them lie.
"""

from __future__ import annotations

import contextlib
from typing import Any

from immutables import Map

from serve_common.api.commands import ChangeReply, Command
from serve_common.api.views import GoalStatus
from serve_common.config.backend import HttpOptions
from serve_common.names import BackendTag, GoalId, HostId, ProxyId, ReplicaTag
from serve_common.protocol.reports import HostReport, ProxyReport, RequestCounts
from serve_common.protocol.snapshots import BackendSnapshot, HttpSnapshot, Snapshot
from serve_common.protocol.subjects import backend_key
from serve_common.routing.request_counts import RequestCounter, renewed_counter
from serve_controller.core.checkpoint import Checkpoint, Draft
from serve_controller.core.commands import decide
from serve_controller.core.commands.changes import Accepted
from serve_controller.core.goals import waits_for
from serve_controller.core.objects import Backend, Goal, Replica, ReplicaState
from serve_controller.core.observed import (
    IdentityTaken,
    ObservedState,
    observe_break,
    observe_bucket,
    observe_host,
    observe_proxy,
    observe_sent,
)
from serve_controller.core.reconcile import (
    Action,
    PublishSnapshot,
    ReconcilePlan,
    RetractSnapshot,
    SendHostGoal,
    reconcile,
)
from tests.support.control_loop.promises import Remembered, check_plan
from tests.support.control_loop.pure_host import PureHost

START = 1_000_000.0


class Loop:
    """One controller's core with its hosts, a bucket and proxies, on a clock that a test moves."""

    def __init__(self, *hosts: PureHost, proxies: int = 1, is_checked: bool = True) -> None:
        self.now = START
        self.epoch = 1
        self.checkpoint = Checkpoint()
        self.observed = ObservedState(since=self.now)
        self.hosts = list(hosts) or [PureHost("host-1"), PureHost("host-2")]
        self.proxies = {ProxyId(f"proxy-{n}"): 0 for n in range(1, proxies + 1)}
        """The newest snapshot id that each has applied."""
        self.are_proxies_slow = False
        """They apply nothing."""
        self.missing_middlewares: set[str] = set()
        """Of these, proxies say that they cannot be imported."""
        self.bucket: dict[str, Snapshot] = {}
        self.request_counts: dict[BackendTag, RequestCounter] = {}
        self.differences: dict[BackendTag, list[str]] = {}
        """What the first proxy counts of backends that are judged."""
        self.sequence = 0
        self.is_checked = is_checked
        self.remembered = Remembered()

    # What a caller does

    def command(self, command: Command[Any]) -> Accepted:
        """Decide and record."""
        accepted = decide(self.checkpoint, command, self.now)
        self.checkpoint = self.checkpoint.applied(accepted.changes)
        return accepted

    def ask(self, command: Command[Any]) -> ChangeReply:
        """Decide and record; what the caller is answered."""
        reply = self.command(command).reply
        assert isinstance(reply, ChangeReply)
        return reply

    def done(self, command: Command[Any]) -> str:
        """Ask, settle, and see it succeed; the goal's id."""
        goal_id = self.command(command).goal_id
        assert goal_id is not None
        self.settle()
        assert self.goal_status(goal_id) is GoalStatus.SUCCEEDED, self.goal(goal_id).error
        return goal_id

    def goal(self, goal_id: str | None) -> Goal:
        return next(g for g in self.checkpoint.goals.values() if g.goal_id == goal_id)

    def goal_status(self, goal_id: str | None) -> GoalStatus:
        return self.goal(goal_id).status

    def waiting_for(self, goal_id: str | None) -> str:
        """What people are told that a pending goal waits for."""
        return waits_for(self.checkpoint, self.observed, self.goal(goal_id))

    # What happens

    def on_report(self, report: HostReport | ProxyReport) -> None:
        """A report comes."""
        with contextlib.suppress(IdentityTaken):
            if isinstance(report, HostReport):
                host = self.checkpoint.hosts.get(report.host_id)
                holder = "" if host is None else host.holder
                self.observed = observe_host(self.observed, report, self.now, holder)
            else:
                proxy = self.checkpoint.proxies.get(report.proxy_id)
                holder = "" if proxy is None else proxy.holder
                self.observed = observe_proxy(self.observed, report, self.now, holder)

    def on_bus_break(self, since: float | None) -> None:
        """The bus goes away (None) or comes back."""
        self.observed = observe_break(self.observed, since)

    def lose_bucket(self) -> None:
        """All that it holds."""
        self.bucket.clear()

    def hear_hosts(self) -> None:
        for host in self.hosts:
            if host.is_up:
                self.on_report(host.report())

    def hear_proxies(self) -> None:
        newest = max((s.snapshot_id for s in self.bucket.values()), default=0)
        for proxy_id in self.proxies:
            if not self.are_proxies_slow:
                self.proxies[proxy_id] = newest
            self.sequence += 1
            refused = self._refused_http(self.proxies[proxy_id])
            report = ProxyReport(
                proxy_id=proxy_id,
                incarnation="only",
                sequence=self.sequence,
                started_at=1.0,
                applied_snapshot_id=self.proxies[proxy_id],
                http_error="" if refused is None else "cannot be imported",
                http_error_snapshot_id=0 if refused is None else refused,
                request_counts=self._request_counts() if proxy_id == next(iter(self.proxies)) else {},
                differences=self.differences,
            )
            self.on_report(report)

    def _request_counts(self) -> dict[BackendTag, RequestCounts]:
        contents = [snapshot.content for snapshot in self.bucket.values()]
        judged = {c.backend_tag for c in contents if isinstance(c, BackendSnapshot) and c.is_judged}
        counted = {tag: self.get_counter(tag).report() for tag in sorted(judged)}
        self.request_counts = {tag: self.request_counts[tag] for tag in counted}
        return counted

    def get_counter(self, tag: BackendTag) -> RequestCounter:
        """What counts the requests of a backend; nobody reports it where that is not judged."""
        snapshot = self.bucket.get(backend_key(tag))
        content = None if snapshot is None else snapshot.content
        rollout_id = content.rollout_id if isinstance(content, BackendSnapshot) else GoalId("")
        counter = renewed_counter(self.request_counts.get(tag), rollout_id) or RequestCounter(rollout_id)
        self.request_counts[tag] = counter
        return counter

    def _refused_http(self, applied: int) -> int | None:
        for snapshot in self.bucket.values():
            content = snapshot.content
            if isinstance(content, HttpSnapshot) and snapshot.snapshot_id <= applied:
                return snapshot.snapshot_id if self._is_refused(content.options) else None
        return None

    def _is_refused(self, options: HttpOptions) -> bool:
        return options is not None and bool(self.missing_middlewares & set(options.middlewares))

    def plan(self) -> ReconcilePlan:
        """One plan of what is known now, checked against every promise, not yet recorded."""
        held: Map[str, int] = Map({key: snapshot.snapshot_id for key, snapshot in self.bucket.items()})
        self.observed = observe_bucket(self.observed, held)
        plan = reconcile(self.checkpoint, self.observed, self.epoch, self.now)
        if self.is_checked:
            assert _same(plan, reconcile(self.checkpoint, self.observed, self.epoch, self.now))
            check_plan(self.checkpoint, self.observed, plan, self.epoch, self.remembered)
        return plan

    def cycle(self) -> ReconcilePlan:
        """Plan, record and perform."""
        plan = self.plan()
        self.record(plan)
        for action in plan.actions:
            self.perform(action)
        return plan

    def record(self, plan: ReconcilePlan) -> None:
        """Make its changes durable."""
        self.checkpoint = self.checkpoint.applied(plan.changes)

    def perform(self, action: Action) -> None:
        """As routers and hosts see it."""
        match action:
            case PublishSnapshot():
                self.bucket[action.key] = action.snapshot
            case RetractSnapshot():
                self.bucket.pop(action.key, None)
            case SendHostGoal():
                goal = action.goal
                for host in self.hosts:
                    if host.host_id == goal.host_id:
                        host.hear(goal)
                self.sent(goal.host_id, (goal.epoch, goal.generation))

    def sent(self, host_id: HostId, goal: tuple[int, int]) -> None:
        """A goal was sent."""
        self.observed = observe_sent(self.observed, host_id, goal, self.now)

    def step(self, seconds: float = 0.1) -> ReconcilePlan:
        """Time passes, everybody reports, and the controller makes one plan."""
        self.now += seconds
        self.hear_hosts()
        self.hear_proxies()
        return self.cycle()

    def steps(self, count: int, seconds: float = 0.1) -> None:
        for _ in range(count):
            self.step(seconds)

    def settle(self, limit: int = 80, seconds: float = 0.5) -> None:
        """Step until a plan changes nothing and asks for nothing; fails when that does not come."""
        quiet = 0
        for _ in range(limit):
            plan = self.step(seconds)
            quiet = 0 if plan.changes or plan.actions or self.checkpoint.pending else quiet + 1
            if quiet == 2:
                return
        waits = {goal_id: self.waiting_for(goal_id) for goal_id in self.checkpoint.pending}
        raise AssertionError(f"no calm: {waits}, {[str(r) for r in self.all_replicas()]}")

    def take_over(self) -> None:
        """Another controller leads from what was recorded and knows nothing else."""
        self.epoch += 1
        self.observed = ObservedState(since=self.now)

    # What is there

    def backend(self, tag: str = "default/a") -> Backend:
        return self.checkpoint.backends[BackendTag(tag)]

    def replicas(self, tag: str = "default/a") -> dict[ReplicaTag, Replica]:
        return dict(self.checkpoint.get_replicas(BackendTag(tag)))

    def all_replicas(self) -> list[Replica]:
        found = (r for replicas in self.checkpoint.replicas.values() for r in replicas.values())
        return sorted(found, key=lambda r: r.ordinal)

    def states(self, tag: str = "default/a") -> list[ReplicaState]:
        return [r.state for r in sorted(self.replicas(tag).values(), key=lambda r: r.ordinal)]

    def running(self, tag: str = "default/a") -> set[ReplicaTag]:
        """What really runs."""
        return {t for host in self.hosts for t in host.running() if t.rpartition("#")[0] == tag}

    def hosts_of(self, tag: str = "default/a") -> list[str]:
        """Where its replicas run, as often as they do."""
        return sorted(host.host_id for host in self.hosts for t in host.running() & self.running(tag))

    def routed(self, tag: str = "default/a") -> set[ReplicaTag]:
        """Whom the bucket tells routers to send requests to."""
        for snapshot in self.bucket.values():
            if isinstance(snapshot.content, BackendSnapshot) and snapshot.content.backend_tag == tag:
                return set(snapshot.content.replicas)
        return set()

    def user_configs(self, tag: str = "default/a") -> list[object]:
        """What the running replicas really run with."""
        return [
            host.user_config[t] for host in self.hosts for t in sorted(host.running() & self.running(tag))
        ]


def _same(one: ReconcilePlan, other: ReconcilePlan) -> bool:
    return (one.changes, one.actions, one.due, one.faults) == (
        other.changes,
        other.actions,
        other.due,
        other.faults,
    )


def check_fixpoint(loop: Loop, rounds_max: int = 12) -> None:
    """With nothing new heard, planning comes to rest: the last round changes nothing."""
    checkpoint = loop.checkpoint
    for _ in range(rounds_max):
        plan = reconcile(checkpoint, loop.observed, loop.epoch, loop.now)
        assert plan.faults == (), plan.faults
        checkpoint = plan.checkpoint
        if not plan.changes:
            return
    raise AssertionError(f"still changing after {rounds_max} rounds: {plan.changes}")


def check_converged(loop: Loop) -> None:
    """What runs, what is recorded and what is routed are the same, and are what is wanted."""
    tags = {t.rpartition("#")[0] for host in loop.hosts for t in host.held}
    for tag in tags | set(loop.checkpoint.backends):
        backend = loop.checkpoint.backends.get(BackendTag(tag))
        wanted = 0 if backend is None else backend.num_wanted
        rows = loop.replicas(tag)
        assert loop.running(tag) == set(rows), f"{tag}: {loop.running(tag)} run, {set(rows)} are recorded"
        assert len(rows) == wanted, f"{len(rows)} of {wanted} replicas of {tag}"
        if backend is None or backend.halted:
            continue
        assert all(r.state is ReplicaState.RUNNING for r in rows.values())
        assert loop.routed(tag) == set(rows)
        _check_versions(loop, backend)


def _check_versions(loop: Loop, backend: Backend) -> None:
    """Every replica is told, and really runs, the target, or what a failed update left (`OnFailure.KEEP`)."""
    good = {v.config_version: v for v in (backend.target, backend.retained) if v is not None}
    for host in loop.hosts:
        for tag in sorted(host.running() & loop.running(backend.backend_tag)):
            replica = loop.replicas(backend.backend_tag)[tag]
            version = good.get(replica.config_version)
            assert version is not None, f"{tag} runs configuration {replica.config_version}"
            assert replica.code_version == version.code_version
            assert host.held[tag].config_version == replica.config_version
            told, really = version.backend_config.user_config, host.user_config[tag]
            assert really == told, f"{tag} runs with {really} and not with {told}"


def draft_of(loop: Loop) -> Draft:
    return Draft(loop.checkpoint)

"""The pure core in a closed loop: reconcile, record, perform, report, without shell, store or bus.

Why beside the simulated world: here every single plan is looked at, and a test can put any state and any report in
front of the core. Hosts and proxies keep their contracts unless a test makes them lie.
"""

from __future__ import annotations

import msgspec

from serve_common.names import BackendTag, HostId, ProxyId, ReplicaTag
from serve_common.values import BackendConfig, RayActorOptions, ReplicaConfig
from serve_common.wires.commands import DeleteDeployment, Deploy
from serve_common.wires.host import HostGoal, HostReport, ReplicaReport, ReplicaStatus
from serve_common.wires.proxy import ProxyReport
from serve_common.wires.snapshots import BackendSnapshot, Snapshot
from serve_common.wires.views import GoalStatus
from serve_controller.core.checkpoint import Checkpoint, Draft
from serve_controller.core.decide import Accepted, decide
from serve_controller.core.objects import Backend, Replica, ReplicaState
from serve_controller.core.observed import (
    ObservedState,
    observe_bucket,
    observe_host,
    observe_proxy,
    observe_sent,
)
from serve_controller.core.reconcile import (
    Plan,
    PublishSnapshot,
    RetractSnapshot,
    SendHostGoal,
    reconcile,
)
from serve_controller.core.rollout import budget_of
from serve_controller.core.transitions import IN_HOST_GOAL, TRANSITIONS, WANTED

BAD_CODE = "bad:Code"
"""Its constructor raises."""
START = 1_000_000.0


def deploy(
    name: str = "a",
    *,
    version: str | None = "v1",
    num: int = 1,
    config: object = None,
    code: str = "good:Code",
    route: str | None = None,
    cpus: float = 1.0,
    retries: int = 3,
    request_id: str | None = None,
) -> Deploy:
    """A deploy command; what a test does not name has the default."""
    return Deploy(
        name=name,
        version=version,
        request_id=request_id,
        route_prefix=route,
        replica_config=ReplicaConfig(import_path=code, ray_actor_options=RayActorOptions(num_cpus=cpus)),
        backend_config=BackendConfig(
            num_replicas=num, user_config=config, max_constructor_retry_count=retries
        ),
    )


class PureHost:
    """A host by its contract: the newest whole goal is obeyed, and everything it holds is reported."""

    def __init__(self, host_id: str, cpus: float = 4.0) -> None:
        self.host_id = HostId(host_id)
        self.cpus = cpus
        self.lives = 0
        self.is_up = True
        self.is_deaf = False
        """Hears no goal, but goes on reporting."""
        self.dies_at: set[object] = set()
        """User configs at which a replica's process ends, when it starts with them or is given them."""
        self.raises_at: set[object] = set()
        """User configs at which ``reconfigure`` raises; at a start that is a failed start."""
        self.is_unhealthy: set[str] = set()
        self._begin()

    def _begin(self) -> None:
        self.lives += 1
        self.number = (0, 0)
        self.held: dict[ReplicaTag, ReplicaReport] = {}
        self.asked: dict[ReplicaTag, int] = {}
        self.user_config: dict[ReplicaTag, object] = {}
        """What each replica really runs with."""
        self.spent: set[ReplicaTag] = set()
        self.sequence = 0

    def restart(self) -> None:
        """The process dies and another one comes up: nothing of before runs."""
        self._begin()

    def hear(self, goal: HostGoal) -> None:
        """Obey a goal; starts, drains and reconfigurations are done at once."""
        if not self.is_up or self.is_deaf or (goal.epoch, goal.generation) < self.number:
            return
        self.number = (goal.epoch, goal.generation)
        wanted = {g.replica_tag: g for g in goal.replicas}
        for tag in [tag for tag in self.held if tag not in wanted]:
            del self.held[tag]
            self.spent.add(tag)
        for tag, replica in wanted.items():
            if tag not in self.held:
                assert tag not in self.spent, f"{tag} ended on {self.host_id} and was asked for again"
                self._start(tag, replica.config_version, replica.user_config, replica.replica_config)
            elif self.asked[tag] < replica.config_version:
                self._reconfigure(tag, replica.config_version, replica.user_config)

    def _start(self, tag: ReplicaTag, version: int, user_config: object, code: ReplicaConfig) -> None:
        self.asked[tag] = version
        failed = user_config in (self.raises_at | self.dies_at) or code.import_path == BAD_CODE
        status = ReplicaStatus.FAILED if failed else ReplicaStatus.RUNNING
        self.user_config[tag] = user_config
        self.held[tag] = ReplicaReport(
            replica_tag=tag,
            status=status,
            config_version=0 if failed else version,
            error="RuntimeError: no" if failed else "",
        )

    def _reconfigure(self, tag: ReplicaTag, version: int, user_config: object) -> None:
        held = self.held[tag]
        self.asked[tag] = version
        if held.status not in (ReplicaStatus.RUNNING, ReplicaStatus.UNHEALTHY):
            return
        if user_config in self.dies_at:
            self.held[tag] = msgspec.structs.replace(held, status=ReplicaStatus.DEAD, error="exit code 1")
        elif user_config in self.raises_at:
            self.held[tag] = msgspec.structs.replace(
                held, config_error_version=version, error="ValueError: no such config"
            )
        else:
            self.user_config[tag] = user_config
            self.held[tag] = msgspec.structs.replace(held, config_version=version, error="")

    def kill(self, tag: ReplicaTag) -> None:
        """The replica's process ends by itself."""
        if tag in self.held:
            self.held[tag] = msgspec.structs.replace(
                self.held[tag], status=ReplicaStatus.DEAD, error="killed"
            )

    def report(self) -> HostReport:
        """The whole inventory."""
        self.sequence += 1
        return HostReport(
            host_id=self.host_id,
            incarnation=str(self.lives),
            sequence=self.sequence,
            started_at=float(self.lives),
            epoch=self.number[0],
            generation=self.number[1],
            resources={"CPU": self.cpus},
            replicas=[self._told(held) for held in self.held.values()],
        )

    def _told(self, held: ReplicaReport) -> ReplicaReport:
        if held.replica_tag in self.is_unhealthy and held.status is ReplicaStatus.RUNNING:
            return msgspec.structs.replace(held, status=ReplicaStatus.UNHEALTHY)
        return held

    def running(self) -> set[ReplicaTag]:
        """Replicas whose process lives."""
        return {t for t, r in self.held.items() if r.status not in (ReplicaStatus.FAILED, ReplicaStatus.DEAD)}


class Loop:
    """One controller's core with its hosts, a bucket and a proxy, on a clock that a test moves."""

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
        self.bucket: dict[str, Snapshot] = {}
        self.sequence = 0
        self.is_checked = is_checked
        self.history = History()

    # What a caller does

    def command(self, command: Deploy | DeleteDeployment) -> Accepted:
        """Decide and record."""
        accepted = decide(self.checkpoint, command, self.now)
        self.checkpoint = self.checkpoint.applied(accepted.changes)
        return accepted

    def goal_status(self, goal_id: str | None) -> GoalStatus:
        return next(g.status for g in self.checkpoint.goals.values() if g.goal_id == goal_id)

    # What happens

    def hear_hosts(self) -> None:
        for host in self.hosts:
            if host.is_up:
                self.observed = observe_host(self.observed, host.report(), self.now)

    def hear_proxies(self) -> None:
        newest = max((s.snapshot_id for s in self.bucket.values()), default=0)
        for proxy_id in self.proxies:
            if not self.are_proxies_slow:
                self.proxies[proxy_id] = newest
            self.sequence += 1
            report = ProxyReport(
                proxy_id=proxy_id,
                sequence=self.sequence,
                started_at=1.0,
                applied_snapshot_id=self.proxies[proxy_id],
            )
            self.observed = observe_proxy(self.observed, report, self.now)

    def plan(self) -> Plan:
        """One plan of what is known now, checked against every promise, not yet recorded."""
        bucket = {key: snapshot.snapshot_id for key, snapshot in self.bucket.items()}
        self.observed = observe_bucket(self.observed, bucket)
        plan = reconcile(self.checkpoint, self.observed, self.epoch, self.now)
        if self.is_checked:
            assert plan == reconcile(self.checkpoint, self.observed, self.epoch, self.now) or _same(
                plan, reconcile(self.checkpoint, self.observed, self.epoch, self.now)
            )
            check_plan(self.checkpoint, self.observed, plan, self.epoch, self.history)
        return plan

    def cycle(self) -> Plan:
        """Plan, record and perform."""
        plan = self.plan()
        self.checkpoint = self.checkpoint.applied(plan.changes)
        for action in plan.actions:
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
                    number = (goal.epoch, goal.generation)
                    self.observed = observe_sent(self.observed, goal.host_id, number, self.now)
        return plan

    def step(self, seconds: float = 0.1) -> Plan:
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
            pending = any(g.status is GoalStatus.PENDING for g in self.checkpoint.goals.values())
            quiet = 0 if plan.changes or plan.actions or pending else quiet + 1
            if quiet == 2:
                return
        raise AssertionError(f"no calm: {sorted(map(str, self.replicas().values()))}")

    def take_over(self) -> None:
        """Another controller leads from what was recorded and knows nothing else."""
        self.epoch += 1
        self.observed = ObservedState(since=self.now)

    # What is there

    def backend(self, tag: str = "default/a") -> Backend:
        return self.checkpoint.backends[BackendTag(tag)]

    def replicas(self, tag: str = "default/a") -> dict[ReplicaTag, Replica]:
        return dict(self.checkpoint.replicas.get(BackendTag(tag), {}))

    def states(self, tag: str = "default/a") -> list[ReplicaState]:
        return [r.state for r in sorted(self.replicas(tag).values(), key=lambda r: r.ordinal)]

    def running(self, tag: str = "default/a") -> set[ReplicaTag]:
        """What really runs."""
        return {t for host in self.hosts for t in host.running() if t.rpartition("#")[0] == tag}

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


class History:
    """What a single plan cannot show."""

    def __init__(self) -> None:
        self.goals_sent: dict[tuple[HostId, int, int], HostGoal] = {}
        self.ended: dict[str, GoalStatus] = {}
        self.ordinals: dict[int, ReplicaTag] = {}
        self.snapshot_ids: dict[int, tuple[str, Snapshot]] = {}


def _same(one: Plan, other: Plan) -> bool:
    return (one.changes, one.actions, one.look_again_at, one.faults) == (
        other.changes,
        other.actions,
        other.look_again_at,
        other.faults,
    )


def contents(checkpoint: Checkpoint) -> set[str]:
    """Everything in it, comparable."""
    return {msgspec.json.encode((type(value).__name__, value)).decode() for value in checkpoint.all_objects()}


def all_replicas(checkpoint: Checkpoint) -> dict[ReplicaTag, Replica]:
    return {tag: r for replicas in checkpoint.replicas.values() for tag, r in replicas.items()}


def check_plan(before: Checkpoint, observed: ObservedState, plan: Plan, epoch: int, history: History) -> None:
    """Every promise that a single plan can keep or break."""
    assert plan.faults == (), plan.faults
    after = plan.checkpoint
    assert contents(before.applied(plan.changes)) == contents(after)
    _check_replicas(before, after, history)
    _check_surge(before, after)
    _check_room(before, observed, after)
    _check_host_goals(after, plan, epoch, history)
    _check_snapshots(after, plan, history)
    for goal in after.goals.values():
        ended = history.ended.get(goal.goal_id)
        assert ended is None or goal.status is ended, f"{goal.goal_id} ended {ended}, then {goal.status}"
        if goal.status is not GoalStatus.PENDING:
            history.ended[goal.goal_id] = goal.status
    counters = (before.counters, after.counters)
    assert all(x <= y for x, y in zip(*map(msgspec.structs.astuple, counters), strict=True))


def _check_replicas(before: Checkpoint, after: Checkpoint, history: History) -> None:
    former = all_replicas(before)
    for tag, replica in all_replicas(after).items():
        assert replica.state is not ReplicaState.STOPPED, "a stopped replica's row is deleted"
        backend = after.backends[replica.backend_tag]
        assert tag == replica.replica_tag
        assert (replica.host_id is None) == (replica.state is ReplicaState.SHOULD_START)
        assert replica.config_version in {v.config_version for v in backend.versions()}
        assert history.ordinals.setdefault(replica.ordinal, tag) == tag, "an ordinal was given twice"
        known = former.get(tag)
        if known is None:
            assert replica.ordinal > before.counters.ordinal
            continue
        assert known.host_id in (None, replica.host_id), f"{tag} moved from {known.host_id}"
        assert replica.state in _reachable(known.state), f"{tag}: {known.state} to {replica.state}"


def _reachable(state: ReplicaState) -> set[ReplicaState]:
    found, new = {state}, {state}
    while new:
        new = {to for at in new for to in TRANSITIONS[at].values()} - found
        found |= new
    return found


def _check_surge(before: Checkpoint, after: Checkpoint) -> None:
    for tag, backend in after.backends.items():
        now = sum(r.state in WANTED for r in after.replicas.get(tag, {}).values())
        was = sum(r.state in WANTED for r in before.replicas.get(tag, {}).values())
        told = max(v.backend_config.num_replicas for v in backend.versions())
        most = told + budget_of(told) if backend.num_wanted else 0
        assert now <= max(was, most), f"{now} replicas of {tag} for {backend.num_wanted} wanted"


def _check_room(before: Checkpoint, observed: ObservedState, after: Checkpoint) -> None:
    former = all_replicas(before)
    placed_on: set[HostId] = set()
    used: dict[HostId, float] = {}
    for tag, replica in all_replicas(after).items():
        if replica.host_id is None:
            continue
        versions = after.backends[replica.backend_tag].versions()
        version = next(v for v in versions if v.config_version == replica.config_version)
        cpus = version.replica_config.ray_actor_options.num_cpus
        used[replica.host_id] = used.get(replica.host_id, 0.0) + cpus
        known = former.get(tag)
        if known is None or known.host_id is None:
            placed_on.add(replica.host_id)
    for host_id in placed_on:
        host = observed.hosts[host_id]
        assert not host.report.leaving, f"something was placed on {host_id}, which leaves"
        assert used[host_id] <= host.report.resources["CPU"] + 1e-6, f"{host_id} is given {used[host_id]} CPU"


def _check_host_goals(after: Checkpoint, plan: Plan, epoch: int, history: History) -> None:
    seen: dict[ReplicaTag, HostId] = {}
    for action in plan.actions:
        if not isinstance(action, SendHostGoal):
            continue
        goal = action.goal
        tags = {g.replica_tag for g in goal.replicas}
        assert len(tags) == len(goal.replicas)
        assert tags == {
            tag
            for tag, r in all_replicas(after).items()
            if r.host_id == goal.host_id and r.state in IN_HOST_GOAL
        }
        for tag in tags:
            assert seen.setdefault(tag, goal.host_id) == goal.host_id, f"{tag} is in two hosts' goals"
        number = (goal.host_id, epoch, goal.generation)
        assert goal.epoch == epoch
        assert history.goals_sent.setdefault(number, goal) == goal, f"{number} names two different goals"


def _check_snapshots(after: Checkpoint, plan: Plan, history: History) -> None:
    ids = [a.snapshot.snapshot_id for a in plan.actions if isinstance(a, PublishSnapshot)]
    assert ids == sorted(ids), "snapshots are published in the order of their ids"
    kinds = [isinstance(a, SendHostGoal) for a in plan.actions]
    assert kinds == sorted(kinds), "routers hear before hosts drain"
    for action in plan.actions:
        if isinstance(action, PublishSnapshot):
            value = (action.key, action.snapshot)
            assert history.snapshot_ids.setdefault(action.snapshot.snapshot_id, value) == value
            assert after.snapshots[action.key].snapshot == action.snapshot


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
    tags = {t.rpartition("#")[0] for host in loop.hosts for t in host.running()}
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
        target = backend.target
        assert {(r.code_version, r.config_version) for r in rows.values()} <= {
            (target.code_version, target.config_version)
        }
        configs = loop.user_configs(tag)
        assert configs == [target.backend_config.user_config] * wanted, f"{tag} runs with {configs}"


def draft_of(loop: Loop) -> Draft:
    return Draft(loop.checkpoint)

"""What must be so once everything works again and nobody asks for anything: liveness, and one truth everywhere."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import msgspec

from serve_common.api import commands as c
from serve_common.api.views import GoalStatus
from serve_common.config.backend import RayActorOptions, ReplicaConfig
from serve_common.names import BackendTag, EndpointTag, parse_backend_tag
from serve_controller.core.objects import BackendVersion, ReplicaState
from serve_controller.core.rollouts.record import rolled_out
from tests.simulation.check_budgets import wanted_of
from tests.simulation.clients import Step
from tests.simulation.sim_host import BAD_CONFIG, Code
from tests.simulation.stories import TOO_LARGE

if TYPE_CHECKING:
    from tests.simulation.world import World

CPUS_MAX = 5.0
"""So much may be asked for in the calm, of eight or more: there must be room for what is replaced."""


def mending(world: World) -> list[Step]:
    """What a sensible client does before the calm: asks for no more than fits, of code that works."""
    steps = [Step(c.UndrainHost(host_id=host_id)) for host_id in sorted(world.checks.reference.now.drained)]
    steps += [
        Step(c.ControlRollout(name=tag, action=c.RolloutAction.ABORT))
        for tag in sorted(world.store.checkpoint.active_rollouts)
    ]
    # At least one of each, at last with CPUs that some host has.
    wishes = {
        tag: made
        for tag, made in world.checks.reference.now.backends.items()
        if rolled_out(BackendTag(tag)) == tag
    }
    asked = sum(min(made.code.ray_actor_options.num_cpus, 1.0) for made in wishes.values())
    for tag, made in sorted(wishes.items()):
        cpus = made.code.ray_actor_options.num_cpus
        is_bad = made.code.import_path in (Code.DIES.value, Code.SICK.value)
        if made.config.autoscaling_config is not None:
            # It may have been deployed with no replica at all: no goal tried its code or its configuration.
            is_bad = made.code.import_path != Code.GOOD.value or made.config.user_config == BAD_CONFIG
        if is_bad or cpus == TOO_LARGE:
            cpus = 0.5
            good = ReplicaConfig(
                import_path=Code.GOOD.value, ray_actor_options=RayActorOptions(num_cpus=cpus)
            )
            steps.append(Step(_made_good(world, tag, good)))
        per_host = made.config.max_replicas_per_host
        # What may not be together finds no place where the hosts that are left are full.
        num = world.store.checkpoint.backends[BackendTag(tag)].target.backend_config.num_replicas
        fits = per_host is None or num <= 1
        asked += (num - 1) * cpus
        if asked > CPUS_MAX or not fits:
            asked -= (num - 1) * cpus
            fewer = {"num_replicas": 1, "autoscaling_config": None}
            steps.append(Step(c.UpdateBackendConfig(backend_tag=tag, config=fewer)))
    groups = world.checks.reference.now.groups
    moving = [name for name, group in sorted(groups.items()) if group.takes_over is not None]
    # While its route moves, the ingress is not changed by itself: the application is deployed anew instead.
    kept = [s for s in steps if not _is_of(s.command, moving)]
    return [*kept, *(Step(_application_made_good(world, name)) for name in moving)]


def _is_of(command: c.Command[Any], groups: Collection[str]) -> bool:
    return isinstance(command, c.Deploy) and command.name.partition("/")[0] in groups


def _application_made_good(world: World, name: str) -> c.Command[Any]:
    wishes = world.checks.reference.now
    group = wishes.groups[name]
    good = ReplicaConfig(import_path=Code.GOOD.value, ray_actor_options=RayActorOptions(num_cpus=0.5))
    specs = []
    for tag in sorted(group.members):
        made = wishes.backends[tag]
        config = msgspec.structs.replace(made.config, num_replicas=1, autoscaling_config=None)
        specs.append(
            c.DeploymentSpec(
                name=tag.partition("/")[2], replica_config=good, backend_config=config, version="mended"
            )
        )
    ingress = group.ingress.partition("/")[2]
    return c.DeployApplication(
        name=name, deployments=specs, ingress=ingress, route_prefix=group.takes_over, skips_rollout=True
    )


def _made_good(world: World, tag: str, good: ReplicaConfig) -> c.Command[Any]:
    wishes = world.checks.reference.now
    config = wishes.backends[tag].config
    if config.autoscaling_config is not None:
        user_config = None if config.user_config == BAD_CONFIG else config.user_config
        # The number counts for nothing; the model keeps none.
        config = msgspec.structs.replace(config, num_replicas=1, user_config=user_config)
    if tag.partition("/")[2] in ("x", "y"):
        return c.CreateBackend(backend_tag=tag, replica_config=good, backend_config=config)
    reach = wishes.endpoints[tag]
    return c.Deploy(
        name=tag,
        version="mended",
        # What is mended does not work, so there is nothing to compare with.
        skips_rollout=True,
        replica_config=good,
        backend_config=config,
        route_prefix=reach.route,
        methods=reach.methods,
    )


def has_unheard_load(world: World) -> bool:
    """Whether an autoscaler said something that no plan has taken in yet: its controller stood still."""
    return any(x.term is not None and bool(x.term._scalings) for x in world.controllers)


def why_not_calm(world: World) -> str:
    """What is still under way; empty when nothing is."""
    checkpoint = world.store.checkpoint
    if any(x.process.stalled_until > world.time for x in world.controllers):
        return "a controller stands still"
    leaders = [x for x in world.controllers if x.term is not None and x.term.epoch == world.store.epoch]
    if len(leaders) != 1:
        return "nobody leads"
    if has_unheard_load(world):
        return "no plan has taken in yet what the autoscaler said last"
    if checkpoint.pending:
        return f"pending: {[(g.goal_id, g.kind.value, g.subject) for g in checkpoint.pending.values()]}"
    serving = {tag for host in world.hosts for tag in host.serving}
    for replicas in checkpoint.replicas.values():
        for replica in replicas.values():
            if replica.replica_tag not in serving:
                return f"{replica.replica_tag} does not serve"
            if replica.state is not ReplicaState.RUNNING:
                return f"{replica.replica_tag} is {replica.state.value}: {replica.message}"
    for backend in checkpoint.backends.values():
        there = len(checkpoint.get_replicas(backend.backend_tag))
        if there != wanted_of(backend):
            return f"{there} of {wanted_of(backend)} replicas of {backend.backend_tag} are there"
        if backend.deleting:
            return f"{backend.backend_tag} is being deleted"
        versions = {_version(v) for v in (backend.target, backend.retained) if v is not None}
        for replica in checkpoint.get_replicas(backend.backend_tag).values():
            if (replica.code_version, replica.config_version) not in versions:
                return f"{replica.replica_tag} is of another version than the target"
    for host in world.hosts:
        known = checkpoint.hosts.get(host.host_id)
        if host.is_up and known is not None and host.state.generation != known.generation:
            return f"{host.host_id} obeys another goal"
        for tag in host.state.replicas:
            if tag not in checkpoint.get_replicas(parse_backend_tag(tag)):
                return f"{host.host_id} still has {tag}"
    foreign = sorted(key for key in world.bus.bucket if key not in checkpoint.snapshots)
    if foreign:
        return f"the bucket still has {foreign}"
    newest = max((r.snapshot.snapshot_id for r in checkpoint.snapshots.values()), default=0)
    for key, record in checkpoint.snapshots.items():
        if world.bus.bucket.get(key, (0, None))[1] != record.snapshot:
            return f"the bucket has another {key}"
    for proxy in world.proxies:
        if proxy.applied < newest or not proxy.table.is_filled:
            return f"{proxy.proxy_id} applied {proxy.applied} of {newest}"
        if proxy.proxy_id not in checkpoint.proxies:
            return f"{proxy.proxy_id} is not waited for"
    return ""


def _version(version: BackendVersion) -> tuple[int, int]:
    return version.code_version, version.config_version


def check_converged(world: World) -> None:
    """What was asked for, what is recorded, what runs and what is routed are the same."""
    checkpoint, wishes, check = world.store.checkpoint, world.checks.reference.now, world.check
    world.checks.reference._compare(checkpoint)
    check(not wishes.leaving, f"{wishes.leaving} were dropped and are still there")
    for tag, backend in sorted(checkpoint.backends.items()):
        running = {t for host in world.hosts for t in host.serving if parse_backend_tag(t) == tag}
        rows = checkpoint.get_replicas(tag)
        check(running == set(rows), f"{sorted(running)} of {tag} run, {sorted(rows)} are recorded")
        for replica in rows.values():
            host = next(h for h in world.hosts if h.host_id == replica.host_id)
            version = backend.get_version(replica.config_version)
            wanted = None if version is None else version.backend_config.user_config
            has = host.runs_with[replica.replica_tag]
            check(has == wanted, f"{replica.replica_tag} runs with {has!r}, not with {wanted!r}")
            held = host.state.replicas[replica.replica_tag]
            ranked = (held.requested_rank, held.requested_world_size)
            check(
                ranked == (replica.rank, len(rows)),
                f"{replica.replica_tag} was told {ranked}, not {replica.rank} of {len(rows)}",
            )
        ranks = sorted(-1 if r.rank is None else r.rank.rank for r in rows.values())
        check(ranks == list(range(len(rows))), f"the ranks of {tag} are {ranks}")
        for proxy in world.proxies:
            known = proxy.backends.get(tag)
            check(
                known is not None and set(known.replicas) == running,
                f"{proxy.proxy_id} routes {tag} to {known}, not to {sorted(running)}",
            )
    for proxy in world.proxies:
        _check_proxy(world, proxy)
    for host in world.hosts:
        if not host.is_up:
            continue
        record = checkpoint.hosts.get(host.host_id)
        check(
            record is None or host.state.generation == record.generation, f"{host.host_id} obeys another goal"
        )
    ended = [g for client in world.clients for g in client.acknowledged]
    for goal_id in ended:
        goal = checkpoint.goals.get(goal_id)
        check(
            goal is not None and goal.status is not GoalStatus.PENDING, f"{goal_id} was acknowledged: {goal}"
        )
    tags = sorted(t for h in world.hosts for t in h.processes)
    recorded = sorted(t for rows in checkpoint.replicas.values() for t in rows)
    check(tags == recorded, f"{tags} run, {recorded} are recorded")


def _check_proxy(world: World, proxy: object) -> None:
    checkpoint, check = world.store.checkpoint, world.check
    wishes = world.checks.reference.now
    for tag in sorted({*wishes.endpoints, *proxy.endpoints}):  # type: ignore[attr-defined]
        reach, known = wishes.endpoints.get(tag), proxy.endpoints.get(EndpointTag(tag))  # type: ignore[attr-defined]
        if reach is not None and not any(BackendTag(to) in checkpoint.backends for to in reach.traffic):
            reach = None  # it leads nowhere
        is_so = (
            None
            if known is None
            else (known.route, known.methods, known.traffic, known.shadows, known.options)
        )
        check(
            is_so == (None if reach is None else tuple(reach)),
            f"{proxy.proxy_id} has {tag} as {is_so}, not {reach}",
        )  # type: ignore[attr-defined]
        capture = checkpoint.captures.get(EndpointTag(tag))
        check(
            known is None or known.capture == (None if capture is None else capture.config),
            f"{proxy.proxy_id} captures {tag} other than by {capture}",
        )  # type: ignore[attr-defined]
    check(
        proxy.options == wishes.http or proxy.http_error,  # type: ignore[attr-defined]
        f"{proxy.proxy_id} applies {proxy.options}, not {wishes.http}",  # type: ignore[attr-defined]
    )

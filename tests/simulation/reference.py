"""What users were promised, kept beside the system: a plain model that hears every commit of a command, in order.

A command that was recorded holds until a later one changes the same thing or its goal fails; a failed goal puts back
what last succeeded, all or nothing. After every command and every end of a goal, what is recorded must say the same.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import msgspec

from serve_common.api import commands as c
from serve_common.api.views import GoalStatus
from serve_common.names import BackendTag, EndpointTag, deployment_tag
from serve_common.protocol.subjects import endpoint_key
from serve_controller.core.checkpoint import Checkpoint
from serve_controller.core.goals import application_owned, owned_backends, owned_endpoints
from serve_controller.core.objects import Application, Backend, Goal, GoalKind, ObjectKind
from serve_controller.core.rollouts.record import Rollout
from serve_controller.shell.queries import parse_request
from tests.simulation import rollout_wishes
from tests.simulation.wishes import (
    ENDED,
    LOADED,
    Group,
    Made,
    Reach,
    Wishes,
    apply,
    join,
    modelled,
    move_route,
    put_reach,
)
from tests.simulation.world_store import Check, Commit

if TYPE_CHECKING:
    from tests.simulation.world import World


class Reference(Check):
    """The model, as a check."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.now = Wishes()
        self.good = Wishes()
        """What last succeeded."""
        self.successes: dict[str, list[tuple[Made, Reach | None]]] = {}
        """Of each backend, the oldest first: where a rollback can go."""
        self.requests: set[str] = set()
        """Ids of requests that were committed."""
        self.alone: dict[str, set[str]] = {}
        """What the newest goals about an endpoint alone set of it."""

    def save(self) -> tuple[Any, ...]:
        """For when the store goes back in time."""
        return copy.deepcopy((self.now, self.good, self.successes, self.requests, self.alone))

    def go_back(self, saved: tuple[Any, ...]) -> None:
        """The store holds again what it held then, and so does this."""
        self.now, self.good, self.successes, self.requests, self.alone = copy.deepcopy(saved)

    # -- hearing -------------------------------------------------------------------------------------------------------

    def on_commit(self, commit: Commit) -> None:
        for entry in commit.history:
            command = parse_request(entry.verb, entry.request.encode())
            self._command(command, commit.before, commit.after)
        for rollout in commit.puts(Rollout):
            known_rollout = commit.before.rollouts.get(rollout.backend_tag)
            if rollout_wishes.follow(self.now, self.good, known_rollout, rollout):
                tag = rollout.backend_tag
                self.good.backends[tag] = self.now.backends[tag]
                if rollout.deployed is not None and tag in self.now.endpoints:
                    self.good.endpoints[tag] = self.now.endpoints[tag]
                self._remember(tag, self.now.endpoints.get(tag))
        for value in commit.puts(Backend):
            if value.deleting and value.backend_tag.endswith(rollout_wishes.SUFFIXES):
                self.now.drop(value.backend_tag)
                self.good.drop(value.backend_tag)
        for kind, name in commit.changes.deletes:
            if kind is ObjectKind.ROLLOUT:
                rollout_wishes.forget(self.now, self.good, commit.before.rollouts[BackendTag(name)])
        for value in () if commit.history else commit.puts(Application):
            known = commit.before.applications.get(value.name)
            moved = known is not None and known.target.takes_over is not None
            if moved and value.target.takes_over is None and value.goal_id in commit.after.pending:
                move_route(self.now, value.name)
        ended = [value for value in commit.puts(Goal) if value.status is not GoalStatus.PENDING]
        failed = {goal.subject for goal in ended if goal.status is GoalStatus.FAILED}
        for value in commit.puts(Backend):
            if value.deleting and value.backend_tag in self.now.leaving:
                name = self.now.leaving[value.backend_tag]
                if name not in failed:
                    self._no_way_back(name, commit.after)
        for goal in ended:
            if goal.status is GoalStatus.SUCCEEDED:
                self._succeed(goal, commit.after)
            elif goal.status is GoalStatus.FAILED:
                self._fail(goal, commit.after)
        if ended or commit.history:
            self._compare(commit.after)
        for kind, name in commit.changes.deletes:
            if kind is ObjectKind.BACKEND:
                self._gone(commit.before, commit.after, BackendTag(name))

    def on_executed(self, command: c.Command[Any], reply: c.CommandReply) -> str:
        """A command is about to be acknowledged: it must be recorded, and hold. Returns what is wrong."""
        goals = self.world.store.checkpoint.goals
        goal_ids = reply.goal_ids if isinstance(reply, c.ShutdownReply) else [reply.goal_id]
        for goal_id in goal_ids:
            # A leader that has yet to notice that the store went back answers a retry from what it knows.
            if goal_id is not None and goal_id not in goals and goal_id not in self.world.lost_goals:
                return f"{goal_id} is acknowledged and not recorded"
        request_id = getattr(command, "request_id", None)
        is_retry = request_id is not None and isinstance(reply, c.ChangeReply) and reply.goal_id is not None
        is_rollout = isinstance(command, c.StartRollout | c.ControlRollout)
        if (
            isinstance(command, c.Rollback)
            or is_rollout
            or is_retry
            or (isinstance(command, c.Deploy) and command.backend_config.rollout is not None)
            or isinstance(command, c.UpdateBackendConfig)
            or getattr(command, "version", "") is None
        ):
            return ""
        if self.world.store.late_writes_s is not None or self.world.is_restore_unnoticed:
            return ""
        then = self.now.copy()
        apply(then, self.good.copy(), command)
        return "" if then == self.now else f"{command} is acknowledged and does not hold"

    # -- what a command means ------------------------------------------------------------------------------------------

    def _command(self, command: Any, before: Checkpoint, after: Checkpoint) -> None:
        request_id = getattr(command, "request_id", None)
        if request_id is not None:
            self.requests.add(request_id)
        if isinstance(command, c.Rollback):
            self._roll_back(command, after)
            return
        if isinstance(command, c.StartRollout):
            rollout_wishes.start(self.now, command)
            return
        if isinstance(command, c.ControlRollout):
            return
        rollout = rollout_wishes.is_started_by(command, before, after)
        if rollout is not None:
            known = before.rollouts.get(rollout.backend_tag)
            if rollout.has_backends and (known is None or known.started_at != rollout.started_at):
                rollout_wishes.start_deployed(self.now, rollout)
            return
        self.world.check(
            not rollout_wishes.must_roll_out(command, self.now, self.good, before),
            lambda: f"{command} is not rolled out",
        )
        self._note_alone(command, before)
        apply(self.now, self.good, command)
        for tag, made in list(self.now.backends.items()):
            if made.config.num_replicas == ENDED:
                number = after.backends[BackendTag(tag)].target.backend_config.num_replicas
                config = msgspec.structs.replace(made.config, num_replicas=number)
                self.now.backends[tag] = made._replace(config=config)

    def _note_alone(self, command: Any, before: Checkpoint) -> None:
        match command:
            case c.SetTraffic() | c.ShadowTraffic():
                fields = {"traffic", "shadows"}
            case c.SetEndpointOptions():
                fields = {"options"}
            case c.SetCapture():
                fields = set()
            case _:
                return
        tag = deployment_tag(command.endpoint)
        owners = before.owners.get(endpoint_key(EndpointTag(tag)), {})
        if any(before.goals[owner].kind is GoalKind.ROUTE for owner in owners):
            fields |= self.alone.get(tag, set())
        self.alone[tag] = fields

    def _with_alone(self, tag: str, good: Reach, reach: Reach) -> Reach:
        return good._replace(**{name: getattr(reach, name) for name in self.alone.get(tag, set())})

    def _roll_back(self, command: c.Rollback, after: Checkpoint) -> None:
        tag = deployment_tag(command.name)
        present, had = self.now.backends[tag], self.successes.get(tag, [])
        made = after.backends[tag].target
        new = Made(made.replica_config, modelled(made.backend_config), made.version)
        had_num, num = present.config.num_replicas, new.config.num_replicas
        is_scaled = LOADED in (had_num, num)
        self.world.check(is_scaled or num == had_num, f"a rollback scaled {tag} from {had_num} to {num}")
        if isinstance(command.to, str):
            fitting = [past for past in had if past[0].version == command.to][-1:]
        else:
            reached = self.now.endpoints.get(tag)
            newest = len(had) - 1
            fitting = [
                past
                for number, past in enumerate(had)
                if _but_scale(past[0], had_num) != present
                or not _is_reached_alike(past[1], reached, is_newest=number == newest)
            ][-1:]
        if any(past[0].version is None for past in had) or isinstance(command.to, int):
            fitting = had  # which of several unversioned ones is meant cannot be told from outside
        chosen = [past for past in fitting if _but_scale(past[0], num) == new]
        self.world.check(chosen, lambda: f"a rollback of {tag} came to {new}, not to one of {fitting}")
        reach = chosen[-1][1]
        self.now.backends[tag] = new
        if reach is not None:
            put_reach(self.now, tag, reach.route, reach.methods, reach.options)
            self.now.leaving.pop(tag, None)
            join(self.now, tag)

    def _succeed(self, goal: Goal, after: Checkpoint) -> None:
        if goal.kind is GoalKind.HTTP:
            self.good.http = self.now.http
        if goal.kind is GoalKind.APPLICATION:
            for tag in [t for t, name in self.now.leaving.items() if name == goal.subject]:
                self.now.drop(tag)
                self.good.drop(tag)
            if goal.subject in self.now.groups:
                group = self.now.groups[goal.subject]
                self.good.groups[goal.subject] = group._replace(
                    members=group.members & {*owned_backends(goal)}
                )
        if goal.kind is GoalKind.DEPLOY and goal.subject in self.now.backends:
            join(self.good, goal.subject)
        for endpoint_tag in owned_endpoints(goal):
            reach, good = self.now.endpoints.get(endpoint_tag), self.good.endpoints.get(endpoint_tag)
            if reach is None:
                continue
            if goal.kind is not GoalKind.ROUTE or not after.owners.get(endpoint_key(endpoint_tag)):
                self.good.endpoints[endpoint_tag] = reach
            elif good is not None:
                # Its route is another goal's, which may yet fail.
                self.good.endpoints[endpoint_tag] = self._with_alone(endpoint_tag, good, reach)
        for tag in owned_backends(goal):
            if tag in self.now.backends:
                self.good.backends[tag] = self.now.backends[tag]
                self._remember(tag, self.now.endpoints.get(tag))

    def _no_way_back(self, name: str, after: Checkpoint) -> None:
        """Something of an application was taken away: what it is to be is all that it can be from now on."""
        group = self.now.groups.get(name)
        if group is None:
            return
        for tag in [t for t, of in self.now.leaving.items() if of == name]:
            self.now.drop(tag)
            self.good.drop(tag)
        parts = {
            str(tag)
            for goal in after.pending.values()
            if goal.subject == name
            for tag in owned_backends(goal)
        }
        self.good.groups[name] = group._replace(members=group.members & parts)
        for tag in self.good.groups[name].members:
            self.good.backends[tag] = self.now.backends[tag]
            self.good.endpoints[tag] = self.now.endpoints[tag]
            self._remember(tag, self.now.endpoints[tag])

    def _remember(self, tag: str, reach: Reach | None) -> None:
        past, success = self.successes.setdefault(tag, []), (self.now.backends[tag], reach)
        if not past or past[-1] != success:
            past.append(success)

    def _fail(self, goal: Goal, after: Checkpoint) -> None:
        if goal.kind is GoalKind.HTTP:
            self.now.http = self.good.http
            return
        # The goal of a build that failed has the name of an application and changes nothing of it.
        whole = goal.kind is GoalKind.APPLICATION and application_owned(goal.subject) in goal.owns
        had_worked = whole and goal.subject in self.good.groups
        if had_worked:
            good, now = self.good.groups[goal.subject], self.now.groups[goal.subject]
            joined = now.members - {*owned_backends(goal)}
            self.now.groups[goal.subject] = good._replace(members=good.members | joined)
        elif whole and goal.subject in self.now.groups:
            self.now.groups[goal.subject] = self.now.groups[goal.subject]._replace(takes_over=None)
        for tag in owned_backends(goal):
            self.now.leaving.pop(tag, None)
            if tag in self.now.backends and tag in self.good.backends:
                self.now.backends[tag] = self.good.backends[tag]
            elif tag in self.now.backends and had_worked:
                self.now.drop(tag)
        for endpoint_tag in owned_endpoints(goal):
            reach, good = self.now.endpoints.get(endpoint_tag), self.good.endpoints.get(endpoint_tag)
            if reach is None or good is None:
                continue
            others = after.owners.get(endpoint_key(endpoint_tag), {})
            if any(after.goals[other].kind is GoalKind.ROUTE for other in others):
                # Some of it was set by a goal of its own.
                good = self._with_alone(endpoint_tag, good, reach)
            self.now.endpoints[endpoint_tag] = good

    def _gone(self, before: Checkpoint, after: Checkpoint, tag: BackendTag) -> None:
        self.successes.pop(tag, None)
        self.good.drop(tag)
        deployment = after.deployments.get(tag)
        if deployment is not None:
            backend, ended_as = before.backends[tag], deployment.ended_as
            was = backend.target
            if backend.autoscaling is not None and ended_as is not None:
                # The plan that gave it up may have scaled it first.
                num_replicas = ended_as.backend_config.num_replicas
                config = msgspec.structs.replace(was.backend_config, num_replicas=num_replicas)
                was = msgspec.structs.replace(was, backend_config=config)
            self.world.check(
                deployment.ended_at is not None and ended_as == was,
                f"{tag} is gone, and {deployment} does not say what it was",
            )

    # -- comparing -----------------------------------------------------------------------------------------------------

    def _compare(self, after: Checkpoint) -> None:
        check, leaving = self.world.check, self.now.leaving
        for tag in sorted({*after.backends, *self.now.backends}):
            backend, wish = after.backends.get(BackendTag(tag)), self.now.backends.get(tag)
            if backend is None or backend.deleting:
                check(wish is None or tag in leaving, f"{tag} was asked for and is not to be")
                continue
            target = backend.target
            made = Made(target.replica_config, modelled(target.backend_config), target.version)
            made = rollout_wishes.of_rollout(tag, made)
            check(made == wish, lambda tag=tag, made=made, wish=wish: f"{tag} is to be {made}, not {wish}")
        for tag in sorted({*after.endpoints, *self.now.endpoints}):
            if tag in leaving:
                continue
            endpoint, reach = after.endpoints.get(EndpointTag(tag)), self.now.endpoints.get(tag)
            target = None if endpoint is None else endpoint.target
            is_so = (
                None
                if target is None
                else Reach(target.route, target.methods, target.traffic, target.shadows, target.options)
            )
            check(
                is_so == reach, lambda tag=tag, i=is_so, r=reach: f"the endpoint {tag} is to be {i}, not {r}"
            )
        groups = {
            name: Group(a.target.ingress, frozenset(a.target.deployments), a.target.takes_over)
            for name, a in after.applications.items()
            if not a.deleting
        }
        check(groups == self.now.groups, lambda: f"applications are {groups}, not {self.now.groups}")
        options = None if after.http is None else after.http.target
        check(options == self.now.http, lambda: f"the HTTP options are {options}, not {self.now.http}")
        drained = {host_id for host_id, host in after.hosts.items() if host.draining}
        check(drained == self.now.drained, lambda: f"{drained} are drained, not {self.now.drained}")


def _is_reached_alike(past: Reach | None, now: Reach | None, *, is_newest: bool) -> bool:
    """Options that were set since the last success are no version to go back from."""
    if past is None or now is None:
        return True
    same_options = is_newest or past.options == now.options
    return same_options and (past.route, past.methods) == (now.route, now.methods)


def _but_scale(made: Made, num_replicas: int) -> Made:
    if made.config.autoscaling_config is not None:
        return made
    return made._replace(config=msgspec.structs.replace(made.config, num_replicas=num_replicas))

"""What was decided, as users understand it: each command's meaning in a few lines, apart from how it is done."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import msgspec

from serve_common.api import commands as c
from serve_common.config import backend as merging
from serve_common.config.backend import BackendConfig, EndpointOptions, HttpOptions, ReplicaConfig
from serve_common.names import HostId, deployment_tag
from serve_controller.core.rollouts.record import BASELINE_SUFFIX, CANARY_SUFFIX


class Made(NamedTuple):
    """What a backend is to be. Where the load decides how many run, no number is kept: see `modelled`."""

    code: ReplicaConfig
    config: BackendConfig
    version: str | None


LOADED: Final = -1
"""How many run where the load decides."""
ENDED: Final = -2
"""How many run where autoscaling was ended and nobody said how many: what the load came to last."""


class Reach(NamedTuple):
    """How an endpoint is to be reached."""

    route: str | None
    methods: list[str]
    traffic: dict[str, float]
    shadows: dict[str, float]
    options: EndpointOptions = EndpointOptions()


class Group(NamedTuple):
    """What an application is to be."""

    ingress: str
    members: frozenset[str]
    takes_over: str | None = None
    """The route that the ingress gets once all of it runs; until then another one has it."""


def modelled(config: BackendConfig) -> BackendConfig:
    """``config`` without the number that the load decides."""
    return (
        config if config.autoscaling_config is None else msgspec.structs.replace(config, num_replicas=LOADED)
    )


@dataclass
class Wishes:
    """Everything that was decided."""

    backends: dict[str, Made] = field(default_factory=dict)
    endpoints: dict[str, Reach] = field(default_factory=dict)
    groups: dict[str, Group] = field(default_factory=dict)
    http: HttpOptions | None = None
    drained: set[str] = field(default_factory=set)
    leaving: dict[str, str] = field(default_factory=dict)
    """What an application no longer has, by its name: it may still be there until the goal's end."""

    def copy(self) -> Wishes:
        """One that can be changed."""
        return Wishes(
            dict(self.backends), dict(self.endpoints), dict(self.groups), self.http, set(self.drained),
            dict(self.leaving),
        )  # fmt: skip

    def drop(self, tag: str) -> None:
        """A backend and the endpoint of its name are to go away."""
        self.backends.pop(tag, None)
        self.endpoints.pop(tag, None)
        self.leaving.pop(tag, None)


def apply(now: Wishes, good: Wishes, command: Any) -> None:
    match command:
        case c.Deploy():
            tag = deployment_tag(command.name)
            _put(now, good, tag, Made(command.replica_config, command.backend_config, command.version))
            put_reach(now, tag, command.route_prefix, command.methods, command.endpoint_options)
            join(now, tag)
        case c.DeployApplication():
            _deploy_application(now, good, command)
        case c.CreateBackend():
            tag = deployment_tag(command.backend_tag)
            _put(now, good, tag, Made(command.replica_config, command.backend_config, None))
        case c.UpdateBackendConfig():
            tag = deployment_tag(command.backend_tag)
            made = now.backends[tag]
            config = merging.merged(made.config, command.config, "config")
            if made.config.autoscaling_config is not None and config.autoscaling_config is None:
                given = command.config.get("num_replicas", ENDED)
                config = msgspec.structs.replace(config, num_replicas=given)
            now.backends[tag] = made._replace(config=modelled(config))
        case c.Scale():
            tag = deployment_tag(command.backend_tag)
            made = now.backends[tag]
            config = msgspec.structs.replace(made.config, num_replicas=command.num_replicas)
            now.backends[tag] = made._replace(config=modelled(config))
        case c.PauseAutoscaling() | c.ResumeAutoscaling():
            pass  # see `check_budgets`
        case c.DeleteDeployment():
            tag = deployment_tag(command.name)
            _delete(now, good, tag)
            _part(now, good, tag)
        case c.DeleteBackend():
            tag = deployment_tag(command.backend_tag)
            now.backends.pop(tag, None)
            good.backends.pop(tag, None)
        case c.DeleteApplication():
            group = now.groups.pop(command.name, None)
            good.groups.pop(command.name, None)
            for tag in _parts(now, command.name) if group is not None else []:
                _delete(now, good, tag)
        case c.RecordBuildFailure():
            pass
        case c.StartRollout() | c.ControlRollout():
            pass  # see `rollout_wishes`
        case c.CreateEndpoint():
            traffic = {str(deployment_tag(name)): weight for name, weight in command.traffic.items()}
            tag = deployment_tag(command.endpoint)
            shadows = now.endpoints[tag].shadows if tag in now.endpoints else {}
            methods = sorted(set(command.methods))
            now.endpoints[tag] = Reach(command.route, methods, traffic, shadows, command.options)
        case c.DeleteEndpoint():
            now.endpoints.pop(deployment_tag(command.endpoint), None)
            good.endpoints.pop(deployment_tag(command.endpoint), None)
        case c.SetTraffic():
            tag = deployment_tag(command.endpoint)
            traffic = {str(deployment_tag(name)): weight for name, weight in command.weights.items()}
            now.endpoints[tag] = now.endpoints[tag]._replace(traffic=traffic)
        case c.ShadowTraffic():
            tag, to = deployment_tag(command.endpoint), deployment_tag(command.backend_tag)
            shadows = {t: p for t, p in now.endpoints[tag].shadows.items() if t != to}
            if command.proportion > 0:
                shadows[to] = command.proportion
            now.endpoints[tag] = now.endpoints[tag]._replace(shadows=shadows)
        case c.SetEndpointOptions():
            reach = now.endpoints[deployment_tag(command.endpoint)]
            options = merging.merged(reach.options, command.options, "options")
            now.endpoints[deployment_tag(command.endpoint)] = reach._replace(options=options)
        case c.SetCapture():
            pass  # `calm` compares what proxies capture with what is recorded
        case c.SetHttpOptions():
            now.http = merging.merged(now.http or HttpOptions(), command.options, "options")
        case c.DrainHost():
            now.drained.add(HostId(command.host_id))
        case c.UndrainHost():
            now.drained.discard(HostId(command.host_id))
        case c.Shutdown():
            for some in (now, good):
                some.backends.clear()
                some.endpoints.clear()
                some.groups.clear()
                some.leaving.clear()
        case _:
            raise AssertionError(f"the model does not know {command}")


def _parts(now: Wishes, name: str) -> list[str]:
    """The backends of an application, without those that only a rollout needs, which ends them."""
    return [
        tag
        for tag in now.backends
        if tag.startswith(f"{name}/") and not tag.endswith((CANARY_SUFFIX, BASELINE_SUFFIX))
    ]


def _put(now: Wishes, good: Wishes, tag: str, made: Made) -> None:
    if tag not in now.backends:
        good.drop(tag)  # it is new, or was given up: should it fail, what was before must not come back
    now.backends[tag] = made._replace(config=modelled(made.config))
    now.leaving.pop(tag, None)


def put_reach(now: Wishes, tag: str, route: str | None, methods: list[str], options: EndpointOptions) -> None:
    shadows = now.endpoints[tag].shadows if tag in now.endpoints else {}
    now.endpoints[tag] = Reach(route, sorted(set(methods)), {tag: 1.0}, shadows, options)


def _delete(now: Wishes, good: Wishes, tag: str) -> None:
    now.drop(tag)
    good.drop(tag)


def join(some: Wishes, tag: str) -> None:
    name = tag.partition("/")[0]
    group = some.groups.get(name)
    if group is not None:
        some.groups[name] = group._replace(members=group.members | {tag})


def _part(now: Wishes, good: Wishes, tag: str) -> None:
    name = tag.partition("/")[0]
    for some in (now, good):
        if name in some.groups:
            group = some.groups[name]
            some.groups[name] = group._replace(members=group.members - {tag})
    if name in now.groups and not now.groups[name].members:
        now.groups.pop(name)
        good.groups.pop(name, None)
        # Also what a goal left out that was replaced or failed, and that nobody put back.
        for left in _parts(now, name):
            _delete(now, good, left)


def _deploy_application(now: Wishes, good: Wishes, command: c.DeployApplication) -> None:
    name = command.name
    members = {f"{name}/{spec.name}": spec for spec in command.deployments}
    ingress = f"{name}/{command.ingress}"
    if name in now.groups:
        for tag in _parts(now, name):
            if tag not in members:
                now.leaving[tag] = name
    if name not in now.groups:
        good.groups.pop(name, None)
    ours = {*members, *(tag for tag, of in now.leaving.items() if of == name)}
    holders = {tag for tag, reach in now.endpoints.items() if reach.route == command.route_prefix}
    takes_over = command.route_prefix if (holders & ours) - {ingress} else None
    had = {tag: now.endpoints[tag].route for tag in {ingress, *holders} if tag in now.endpoints}
    for tag, spec in members.items():
        _put(now, good, tag, Made(spec.replica_config, spec.backend_config, spec.version))
        route = command.route_prefix if tag == ingress else None
        if takes_over is not None:
            route = had.get(tag)
        put_reach(now, tag, route, command.methods, spec.endpoint_options)
    now.groups[name] = Group(ingress, frozenset(members), takes_over)


def move_route(now: Wishes, name: str) -> None:
    """All of an application runs: its ingress gets the route that another one had."""
    group = now.groups[name]
    for tag, reach in list(now.endpoints.items()):
        if reach.route == group.takes_over:
            now.endpoints[tag] = reach._replace(route=None)
    now.endpoints[group.ingress] = now.endpoints[group.ingress]._replace(route=group.takes_over)
    now.groups[name] = group._replace(takes_over=None)

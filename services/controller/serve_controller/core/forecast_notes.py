"""What a command would change beside replicas, in words.

Why apart from the replicas: routes, traffic and options change at once and touch no replica, and who plans a change
wants to be told just that.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from serve_common.names import BackendTag
from serve_common.values.http_options import HttpOptions
from serve_controller.core.checkpoint import Checkpoint
from serve_controller.core.differences import (
    changed_fields,
    changed_names,
    endpoint_changes,
    light_changes,
    shown_traffic,
)
from serve_controller.core.goals.ids import number_of
from serve_controller.core.objects import EndpointConfig


def notes_of(before: Checkpoint, after: Checkpoint, with_replicas: Collection[BackendTag]) -> list[str]:
    """Every change that no replica tells of. ``with_replicas``: backends of which replicas are planned for."""
    return [
        *_applications(before, after),
        *_backends(before, after, with_replicas),
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
            words = [f"{tag} is added" for tag in sorted(becomes - was)]
            words += [f"{tag} is dropped" for tag in sorted(was - becomes)]
            if known.target.ingress != application.target.ingress:
                when = "" if application.target.takes_over is None else " once all of it runs"
                words.append(f"its route leads to {application.target.ingress}{when}")
            if words:
                yield f"the application {name} changes: {', '.join(words)}"


def _backends(before: Checkpoint, after: Checkpoint, with_replicas: Collection[BackendTag]) -> Iterator[str]:
    for tag in changed_names(before.backends, after.backends):
        known, backend = before.backends.get(tag), after.backends.get(tag)
        if known is None or backend is None or backend.deleting or known.deleting:
            if tag not in with_replicas:
                yield f"{tag} {'is made' if known is None else 'goes away'}; it has no replicas"
            continue
        words = light_changes(known.target.backend_config, backend.target.backend_config)
        if words:
            untouched = "" if tag in with_replicas else "; no replica is touched"
            yield f"{tag}: {', '.join(words)}{untouched}"


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
            sends = shown_traffic(endpoint.target.traffic.items())
            yield f"the endpoint {tag} is made{_at_route(endpoint.target)}: it sends to {sends}"
        elif words := endpoint_changes(known.target, endpoint.target):
            yield f"the endpoint {tag} changes: {'; '.join(words)}"


def _at_route(config: EndpointConfig) -> str:
    return ", headless" if config.route is None else f" at {config.route}"


def _http(before: Checkpoint, after: Checkpoint) -> Iterator[str]:
    was = HttpOptions() if before.http is None else before.http.target
    becomes = HttpOptions() if after.http is None else after.http.target
    if words := changed_fields(was, becomes):
        yield f"all proxies: {', '.join(words)}"


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
    for goal in sorted(replaced, key=lambda g: number_of(g.goal_id)):
        yield f"the pending goal {goal.goal_id} ({goal.kind.value} {goal.subject}) is replaced"

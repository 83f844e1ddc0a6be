"""What is found without a search: who runs on which host, which goals are pending, who has which route.

Why apart from the objects: all of it follows from them, so none of it is ever stored. What a decision must find at once
is kept here as objects come and go; the same rows give the same indices.
"""

from __future__ import annotations

from immutables import Map

from serve_common.names import BackendTag, EndpointTag, GoalId, HostId, ReplicaTag
from serve_common.wires.views import GoalStatus
from serve_controller.core.loads import HostLoad, changed_load
from serve_controller.core.nested_maps import delete_in, put_in
from serve_controller.core.objects import Endpoint, Goal, Replica, ReplicaState

NO_LOAD = HostLoad()


class Indices:
    """Maps that are derived from a checkpoint's objects; kept by the functions below."""

    __slots__ = (
        "by_host",
        "loads",
        "owners",
        "pending",
        "requests",
        "routes",
        "unplaced",
        "used_by",
    )

    def __init__(self) -> None:
        """Of no objects."""
        self.by_host: Map[HostId, Map[ReplicaTag, Replica]] = Map()
        self.loads: Map[HostId, HostLoad] = Map()
        self.pending: Map[GoalId, Goal] = Map()
        self.owners: Map[str, Map[GoalId, None]] = Map()
        """Pending goals by what they own."""
        self.requests: Map[str, GoalId] = Map()
        """Goals by the clients' request ids."""
        self.routes: Map[str, Map[EndpointTag, None]] = Map()
        """Who has a route, or may take it back when a goal fails."""
        self.used_by: Map[BackendTag, Map[EndpointTag, None]] = Map()
        """Endpoints that send or copy requests to a backend, or may do so again when a goal fails."""
        self.unplaced: Map[BackendTag, int] = Map()
        """How many replicas wait for a host."""

    def load_of(self, host_id: HostId) -> HostLoad:
        """What is taken on a host."""
        return self.loads.get(host_id, NO_LOAD)


def index_replica(indices: Indices, before: Replica | None, after: Replica | None) -> None:
    """A replica came (``before`` is None), changed, or went (``after`` is None)."""
    if before is not None and before.host_id is not None:
        indices.by_host = delete_in(indices.by_host, before.host_id, before.replica_tag)
        _set_load(indices, before.host_id, changed_load(indices.load_of(before.host_id), before, -1))
    if after is not None and after.host_id is not None:
        indices.by_host = put_in(indices.by_host, after.host_id, after.replica_tag, after)
        _set_load(indices, after.host_id, changed_load(indices.load_of(after.host_id), after, 1))
    waited = before is not None and before.state is ReplicaState.SHOULD_START
    waits = after is not None and after.state is ReplicaState.SHOULD_START
    if waits != waited:
        one = after if after is not None else before
        assert one is not None
        count = indices.unplaced.get(one.backend_tag, 0) + (1 if waits else -1)
        indices.unplaced = (
            indices.unplaced.set(one.backend_tag, count)
            if count
            else indices.unplaced.delete(one.backend_tag)
        )


def _set_load(indices: Indices, host_id: HostId, load: HostLoad) -> None:
    if load == NO_LOAD:
        indices.loads = indices.loads.delete(host_id) if host_id in indices.loads else indices.loads
    else:
        indices.loads = indices.loads.set(host_id, load)


def index_goal(indices: Indices, before: Goal | None, after: Goal | None) -> None:
    """The same of a goal."""
    if before is not None and before.status is GoalStatus.PENDING:
        indices.pending = indices.pending.delete(before.goal_id)
        for key in set(before.owns):
            indices.owners = delete_in(indices.owners, key, before.goal_id)
    if after is not None and after.status is GoalStatus.PENDING:
        indices.pending = indices.pending.set(after.goal_id, after)
        for key in after.owns:
            indices.owners = put_in(indices.owners, key, after.goal_id, None)
    if before is not None and before.request_id is not None and before.request_id in indices.requests:
        indices.requests = indices.requests.delete(before.request_id)
    if after is not None and after.request_id is not None:
        indices.requests = indices.requests.set(after.request_id, after.goal_id)


def index_endpoint(indices: Indices, before: Endpoint | None, after: Endpoint | None) -> None:
    """The same of an endpoint."""
    if before is not None:
        for route in {config.route for config in before.configs()}:
            if route is not None:
                indices.routes = delete_in(indices.routes, route, before.endpoint_tag)
        for tag in {tag for config in before.configs() for tag in config.backend_tags()}:
            indices.used_by = delete_in(indices.used_by, tag, before.endpoint_tag)
    if after is not None:
        for route in {config.route for config in after.configs()}:
            if route is not None:
                indices.routes = put_in(indices.routes, route, after.endpoint_tag, None)
        for tag in {tag for config in after.configs() for tag in config.backend_tags()}:
            indices.used_by = put_in(indices.used_by, tag, after.endpoint_tag, None)

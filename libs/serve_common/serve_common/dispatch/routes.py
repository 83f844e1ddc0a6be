"""What this proxy routes by now, kept up with the bucket.

Why apart from dispatching: the table says where requests go; the requests themselves are another matter.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import Final, final

import structlog

from serve_common.dispatch.admission import Endpoint
from serve_common.dispatch.tallies import EndpointTally, NoTally
from serve_common.names import BackendTag, EndpointTag
from serve_common.routing.queued_seconds import Clock
from serve_common.routing.replica_choice import Draw
from serve_common.routing.route_table import RouteTable
from serve_common.routing.router import Router
from serve_common.routing.snapshot_table import SnapshotChanges, SnapshotTable
from serve_common.subjects import backend_key
from serve_common.wires.snapshots import EndpointSnapshot, Snapshot

_log = structlog.get_logger(__name__)


@final
class Routes:
    """The routing state: route table, endpoints, and a router for each backend."""

    def __init__(
        self, draw: Draw, now: Clock = time.monotonic, uncounted: Collection[str] = frozenset()
    ) -> None:
        """``draw`` gives random numbers in [0, 1); ``now`` is the clock for `Router.queued_seconds`.

        That clock is the process' own and not the loop's, which stands still while the loop works or sleeps: whoever
        reads may be in another thread. Of the endpoints in ``uncounted`` no requests are counted.
        """
        self.table = RouteTable()
        self.endpoints: dict[EndpointTag, Endpoint] = {}
        self.routers: dict[BackendTag, Router] = {}
        self.unmatched = EndpointTally()
        """Requests that no endpoint was found for."""
        self._snapshots = SnapshotTable()
        self._draw = draw
        self.now: Final = now
        self._uncounted = uncounted

    @property
    def applied_snapshot_id(self) -> int:
        """Every snapshot up to this id is applied; 0 before the bucket was read."""
        return self._snapshots.applied_snapshot_id

    @property
    def is_filled(self) -> bool:
        """True once the whole bucket was read."""
        return self._snapshots.is_filled

    def confirm(self, key: str, snapshot_id: int | None = None) -> None:
        """What changed under ``key`` is in force; see `SnapshotTable.confirm`."""
        self._snapshots.confirm(key, snapshot_id)

    def update(self, snapshots: Mapping[str, Snapshot | None], *, whole: bool) -> SnapshotChanges:
        """Take over what the bucket holds, endpoints included.

        The caller brings backends to their routers, and calls `confirm` for each key that it has done so for.
        """
        changes = self._snapshots.update(snapshots, whole=whole)
        for key, reason in changes.ignored:
            _log.warning("snapshot_ignored", key=key, reason=reason)
        if changes.endpoints:
            self._update_endpoints(changes.endpoints)
        return changes

    def choose_router(
        self, endpoint: Endpoint, named: BackendTag | None = None, shard_hash: int | None = None
    ) -> Router | None:
        """The router of the backend that takes a request; None when there is no such backend.

        That is the ``named`` one, or the one that the endpoint's traffic policy picks: for ``shard_hash`` (of a key)
        always the same. A backend that was not heard of yet gets a router without replicas: its snapshot is on its
        way. One that is gone leaves its share to the others.
        """
        split = endpoint.split
        if named is not None:
            is_there = named in endpoint.backend_tags and not self._is_gone(named)
            return self.router(named) if is_there else None
        if shard_hash is not None:
            backend_tag = split.choose_for(shard_hash)
        else:
            backend_tag = split.sole or split.choose(self._draw())
        if backend_tag is None:
            return None
        router = self.routers.get(backend_tag)
        if router is not None:
            return router
        if self._is_gone(backend_tag):
            split = split.without([tag for tag in split.backend_tags if self._is_gone(tag)])
            backend_tag = split.choose(self._draw()) if shard_hash is None else split.choose_for(shard_hash)
        return None if backend_tag is None else self.router(backend_tag)

    def _is_gone(self, backend_tag: BackendTag) -> bool:
        return backend_tag not in self.routers and self._snapshots.is_gone(backend_key(backend_tag))

    def orphans(self) -> list[BackendTag]:
        """Backends that have a router, but neither a snapshot nor an endpoint that may send them anything."""
        named = {tag for endpoint in self.endpoints.values() for tag in endpoint.backend_tags}
        return [
            tag for tag in self.routers if tag not in named and not self._snapshots.is_there(backend_key(tag))
        ]

    def router(self, backend_tag: BackendTag) -> Router:
        """The router of a backend, made when there is none."""
        router = self.routers.get(backend_tag)
        if router is None:
            router = self.routers[backend_tag] = Router(backend_tag, self._draw, self.now)
        return router

    def _update_endpoints(self, changed: Mapping[EndpointTag, EndpointSnapshot | None]) -> None:
        for tag, snapshot in changed.items():
            held = self.endpoints.pop(tag, None)
            if snapshot is not None:
                tally = self._new_tally(tag) if held is None else held.tally
                self.endpoints[tag] = Endpoint(snapshot, tally)
        self.table = RouteTable(self._snapshots.endpoints().values())

    def _new_tally(self, tag: EndpointTag) -> EndpointTally:
        return NoTally() if tag in self._uncounted else EndpointTally()

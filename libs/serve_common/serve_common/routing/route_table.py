"""Maps a path to an endpoint and an endpoint to a backend, from the newest snapshots."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Final, final

import msgspec

from serve_common.config.backend import ErrorFormat, HttpOptions
from serve_common.errors import BadField
from serve_common.names import BackendTag, EndpointTag
from serve_common.protocol.snapshots import (
    BackendSnapshot,
    EndpointSnapshot,
    HttpSnapshot,
    Snapshot,
    SnapshotContent,
)
from serve_common.protocol.subjects import BACKENDS, ENDPOINTS, HTTP, HTTP_KEY, parse_key
from serve_common.routing.replica_choice import stable_hash, weighted_score


@final
class RouteTable:
    """Endpoints by route. Immutable; a change of an endpoint creates a new table.

    Why a dict and not a list of prefixes: a lookup then costs by the depth of the path, not by the number of routes.
    """

    __slots__ = ("_by_route", "_route_length_max", "error_format")

    def __init__(self, endpoints: Iterable[EndpointSnapshot] = ()) -> None:
        """Headless endpoints are ignored. Of two with the same route the later one in ``endpoints`` wins."""
        self._by_route = {endpoint.route: endpoint for endpoint in endpoints if endpoint.route is not None}
        self._route_length_max = max(map(len, self._by_route), default=0)
        formats = {endpoint.options.error_format for endpoint in self._by_route.values()}
        self.error_format = formats.pop() if len(formats) == 1 else ErrorFormat.PROBLEM
        """Format of the error for a path without a route: that of all routes, or problem details if they differ."""

    def match(self, path: str) -> EndpointSnapshot | None:
        """The endpoint whose route is the longest prefix of ``path`` that ends where a segment ends."""
        by_route = self._by_route
        found = by_route.get(path)
        if found is not None:
            return found
        # A prefix is followed by a slash, so nothing beyond the longest route plus one is relevant; without
        # this limit a path of thousands of slashes would be cut thousands of times.
        end = path.rfind("/", 0, self._route_length_max + 1)
        while end > 0:
            found = by_route.get(path[:end])
            if found is not None:
                return found
            end = path.rfind("/", 0, end)
        return by_route.get("/") if path.startswith("/") else None

    def routes(self) -> dict[str, str]:
        """Every route with its endpoint's tag, that of an application's ingress with the application's name.

        In alphabetical order.
        """
        return {route: _name(self._by_route[route]) for route in sorted(self._by_route)}


def _name(endpoint: EndpointSnapshot) -> str:
    return endpoint.endpoint_tag.partition("/")[0] if endpoint.is_ingress else endpoint.endpoint_tag


class HttpChange(msgspec.Struct, frozen=True, kw_only=True):
    """Changed options for all requests."""

    options: HttpOptions | None
    """None: the options were removed."""
    snapshot_id: int
    """Id of the snapshot; 0 when its key is gone."""
    is_shut_down: bool = False
    """As in `HttpSnapshot`."""


class SnapshotChanges(msgspec.Struct, frozen=True, kw_only=True):
    """The changes of an update; None as a value means removed."""

    endpoints: Mapping[EndpointTag, EndpointSnapshot | None]
    backends: Mapping[BackendTag, BackendSnapshot | None]
    http: HttpChange | None = None
    """None: unchanged."""
    ignored: Sequence[tuple[str, str]] = ()
    """Keys that were ignored, with the reason."""


@final
class SnapshotTable:
    """The accepted content of the bucket.

    Why older snapshots are refused: the bucket is a cache that can be lost and refilled, and a watch can report the
    same value again; a late value must never bring back what was removed.
    """

    def __init__(self) -> None:
        self._snapshots: dict[str, Snapshot] = {}
        self.is_filled = False
        """True once the whole bucket was read."""
        self._seen_id: int = 0
        self._void_below: int = 0
        self._unapplied: dict[str, int] = {}
        """Keys that were returned as changed and not confirmed, with the id of the first such change."""

    @property
    def applied_snapshot_id(self) -> int:
        """Every snapshot up to this id was confirmed; 0 before the bucket was read."""
        if not self.is_filled:
            return 0
        return min((self._seen_id, *(snapshot_id - 1 for snapshot_id in self._unapplied.values())))

    def confirm(self, key: str, snapshot_id: int | None = None) -> None:
        """Record that the change of ``key`` is applied: its newest one, or that of ``snapshot_id``.

        An unconfirmed change, because applying it failed, is returned again by the next whole view.
        """
        current = self._snapshots.get(key)
        if (
            key not in self._unapplied
            or current is None
            or snapshot_id is None
            or current.snapshot_id <= snapshot_id
        ):
            self._unapplied.pop(key, None)
        else:
            self._unapplied[key] = current.snapshot_id

    def endpoints(self) -> dict[EndpointTag, EndpointSnapshot]:
        """Every endpoint, those that changed last at the end."""
        current = sorted(self._snapshots.values(), key=lambda snapshot: snapshot.snapshot_id)
        contents = [snapshot.content for snapshot in current]
        return {
            content.endpoint_tag: content for content in contents if isinstance(content, EndpointSnapshot)
        }

    def is_gone(self, key: str) -> bool:
        """True when a tombstone marks ``key`` as removed."""
        current = self._snapshots.get(key)
        return current is not None and current.content is None

    def is_there(self, key: str) -> bool:
        """True when there is a snapshot with content for ``key``."""
        current = self._snapshots.get(key)
        return current is not None and current.content is not None

    def update(self, snapshots: Mapping[str, Snapshot | None], *, whole: bool) -> SnapshotChanges:
        """Accept new snapshots, as `SnapshotListener` gets them. Values that do not match their key are ignored.

        The caller applies the returned changes and then calls `confirm`.

        A key that a whole view lacks stays as it is: the bucket was lost and is being refilled, and a real removal is
        marked by a tombstone or a deletion.
        """
        endpoints: dict[EndpointTag, EndpointSnapshot | None] = {}
        backends: dict[BackendTag, BackendSnapshot | None] = {}
        http: HttpChange | None = None
        ignored: list[tuple[str, str]] = []
        for key, snapshot in (*snapshots.items(), *self._voided_keys(snapshots)):
            try:
                kind, tag = parse_key(key)
                _check_content(kind, tag, snapshot)
            except BadField as error:
                ignored.append((key[:200], error.reason))
                continue
            if not self._accept(key, snapshot):
                continue
            content = None if snapshot is None else snapshot.content
            if kind == ENDPOINTS:
                assert content is None or isinstance(content, EndpointSnapshot)
                endpoints[EndpointTag(tag)] = content
            elif kind == HTTP:
                assert content is None or isinstance(content, HttpSnapshot)
                http = HttpChange(
                    options=None if content is None else content.options,
                    snapshot_id=0 if snapshot is None else snapshot.snapshot_id,
                    is_shut_down=content is not None and content.is_shut_down,
                )
            else:
                assert content is None or isinstance(content, BackendSnapshot)
                backends[BackendTag(tag)] = content
        self.is_filled = self.is_filled or whole
        return SnapshotChanges(endpoints=endpoints, backends=backends, http=http, ignored=ignored)

    def _voided_keys(self, snapshots: Mapping[str, Snapshot | None]) -> list[tuple[str, None]]:
        """Keys that are voided by `Snapshot.voids_below` of one of these."""
        below = max((s.voids_below for s in snapshots.values() if s is not None), default=0)
        if below <= self._void_below:
            return []
        self._void_below = below
        newest = {**self._snapshots, **{key: s for key, s in snapshots.items() if s is not None}}
        return [(key, None) for key in self._snapshots if newest[key].snapshot_id < below]

    def _accept(self, key: str, snapshot: Snapshot | None) -> bool:
        """Store ``snapshot`` if it is new; True when it must be reported as a change."""
        current = self._snapshots.get(key)
        if snapshot is None:
            self._snapshots.pop(key, None)
            self._unapplied.pop(key, None)
            return current is not None
        self._seen_id = max(self._seen_id, snapshot.snapshot_id)
        if snapshot.snapshot_id < self._void_below:
            return False
        if current is not None and not self._is_newer(key, current, snapshot):
            return False
        self._snapshots[key] = snapshot
        if current is None and snapshot.content is None:
            self._unapplied.pop(key, None)
            return False
        self._unapplied.setdefault(key, snapshot.snapshot_id)
        return True

    def _is_newer(self, key: str, current: Snapshot, snapshot: Snapshot) -> bool:
        if key in self._unapplied:
            return snapshot.snapshot_id >= current.snapshot_id
        return snapshot.snapshot_id > current.snapshot_id


_HTTP_TAG: Final = parse_key(HTTP_KEY)[1]

_CONTENT_TYPES: Final[Mapping[str, type[SnapshotContent]]] = {
    ENDPOINTS: EndpointSnapshot,
    BACKENDS: BackendSnapshot,
    HTTP: HttpSnapshot,
}


def _check_content(kind: str, tag: str, snapshot: Snapshot | None) -> None:
    if kind == HTTP and tag != _HTTP_TAG:
        raise BadField("key", f"{HTTP}.{tag[:100]} is not a snapshot key")
    content = None if snapshot is None else snapshot.content
    if content is None:
        return
    if not isinstance(content, _CONTENT_TYPES[kind]):
        raise BadField("content", f"is of another kind than {kind}")
    match content:
        case EndpointSnapshot():
            named: str = content.endpoint_tag
        case BackendSnapshot():
            named = content.backend_tag
        case HttpSnapshot():
            named = tag
    if named != tag:
        raise BadField("content", f"is about {named[:100]!r}")


@final
class TrafficSplit:
    """The weights of one endpoint, summed once per change and not once per request."""

    __slots__ = ("_bounds", "_hashes", "_weighted", "backend_tags", "sole")

    def __init__(self, traffic: Mapping[BackendTag, float]) -> None:
        """Weights need not sum to exactly 1; a backend with weight 0 is never chosen."""
        weighted = {tag: weight for tag, weight in traffic.items() if weight > 0}
        self._weighted = weighted
        self.backend_tags = tuple(weighted)
        self.sole = self.backend_tags[0] if len(weighted) == 1 else None
        """The only backend with weight; None when there are more, or none."""
        self._bounds = list(accumulate(weighted.values()))
        self._hashes = {tag: stable_hash(tag) for tag in weighted}

    def choose(self, rand: float) -> BackendTag | None:
        """The backend for the random number ``rand`` in [0, 1), or None when no backend has weight."""
        tags = self.backend_tags
        if len(tags) < 2:
            return tags[0] if tags else None
        # The product can round up to the last bound itself.
        at = bisect_right(self._bounds, rand * self._bounds[-1])
        return tags[min(at, len(tags) - 1)]

    def choose_for(self, key_hash: int) -> BackendTag | None:
        """The backend that requests with a key are pinned to, or None when no backend has weight.

        Keys are spread by the weights. When those change, a key moves only to a backend whose weight grew in proportion
        to that of the backend it leaves.
        """
        tags = self.backend_tags
        if len(tags) < 2:
            return tags[0] if tags else None
        weighted, hashes = self._weighted, self._hashes
        return max(tags, key=lambda tag: weighted_score(key_hash, hashes[tag], weighted[tag]))

    def without(self, left_out: Container[BackendTag]) -> TrafficSplit:
        """The same weights for the other backends."""
        return TrafficSplit({tag: weight for tag, weight in self._weighted.items() if tag not in left_out})

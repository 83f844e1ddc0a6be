"""Which endpoint a request is for, and whether it takes such requests.

Why an `Endpoint` beside the snapshot: what every request needs of it is worked out once per change.
"""

from __future__ import annotations

from typing import Final, final

from serve_common.dispatch.errors import MethodNotAllowed, NoRoute
from serve_common.dispatch.tallies import EndpointTally
from serve_common.errors import BadField, NotFound
from serve_common.names import DEFAULT_APPLICATION, BackendTag, EndpointTag
from serve_common.routing.route_table import RouteTable
from serve_common.routing.traffic import TrafficSplit
from serve_common.wires.snapshots import EndpointSnapshot


@final
class Endpoint:
    """One endpoint, ready to be asked for every request."""

    __slots__ = (
        "allow",
        "backend_tags",
        "methods",
        "options",
        "route",
        "shadows",
        "split",
        "tag",
        "tally",
    )

    def __init__(self, snapshot: EndpointSnapshot, tally: EndpointTally) -> None:
        self.tag = snapshot.endpoint_tag
        self.route = snapshot.route or ""
        self.methods = frozenset(snapshot.methods)
        self.allow = ", ".join(snapshot.methods)
        self.split = TrafficSplit(snapshot.traffic)
        self.backend_tags: Final = frozenset(snapshot.traffic)
        """Its backends, those without weight included."""
        self.shadows: Final[tuple[tuple[BackendTag, float], ...]] = tuple(
            (tag, proportion) for tag, proportion in snapshot.shadows.items() if proportion > 0
        )
        self.options = snapshot.options
        self.tally = tally

    def backend_named(self, value: bytes) -> BackendTag | None:
        """The backend that a request selects by the value of its `backend_header`; None without one.

        ``value`` is a tag, or a bare name of the default application. The backend may have weight 0. Raises `BadField`
        when this endpoint has no such backend: weights must not decide where somebody chose.
        """
        if not value:
            return None
        name = value.decode("latin-1")
        for tag in (BackendTag(name), BackendTag(f"{DEFAULT_APPLICATION}/{name}")):
            if tag in self.backend_tags:
                return tag
        raise BadField(self.options.backend_header, f"{name[:130]!r} is no backend of endpoint {self.tag!r}")

    def takes(self, backend_tag: BackendTag, named: BackendTag | None) -> bool:
        """True when a request that is at ``backend_tag`` may be there: by weight, or because it is ``named``."""
        if named is not None:
            return named == backend_tag and named in self.backend_tags
        return backend_tag in self.split.backend_tags


def admit(table: RouteTable, endpoints: dict[EndpointTag, Endpoint], method: str, path: str) -> Endpoint:
    """The endpoint for a request. Raises `NoRoute` or `MethodNotAllowed`."""
    snapshot = table.match(path)
    if snapshot is None:
        raise NoRoute(f"no route matches {path[:200]!r}")
    endpoint = endpoints[snapshot.endpoint_tag]
    if method not in endpoint.methods:
        raise MethodNotAllowed(method, endpoint.allow)
    return endpoint


def admit_call(endpoints: dict[EndpointTag, Endpoint], tag: EndpointTag) -> Endpoint:
    """The endpoint for a plain call by name; methods and routes are HTTP's and do not matter. Raises `NotFound`."""
    endpoint = endpoints.get(tag)
    if endpoint is None:
        raise NotFound(f"there is no endpoint {tag[:130]!r}")
    return endpoint

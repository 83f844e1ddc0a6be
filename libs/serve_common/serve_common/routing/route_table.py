"""From a path to its endpoint by the longest prefix.

Why a dict and not a list of prefixes: the cost of a lookup then depends on the depth of the path, not on how many
routes exist.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import final

from serve_common.wires.snapshots import EndpointSnapshot


@final
class RouteTable:
    """Immutable once made; a change of an endpoint makes a new one."""

    __slots__ = ("_by_route", "_route_length_max")

    def __init__(self, endpoints: Iterable[EndpointSnapshot] = ()) -> None:
        """Headless endpoints have no place here. Of two with the same route the later one in ``endpoints`` wins."""
        self._by_route = {endpoint.route: endpoint for endpoint in endpoints if endpoint.route is not None}
        self._route_length_max = max(map(len, self._by_route), default=0)

    def match(self, path: str) -> EndpointSnapshot | None:
        """The endpoint whose route is the longest prefix of ``path`` that ends where a segment ends."""
        by_route = self._by_route
        found = by_route.get(path)
        if found is not None:
            return found
        # A prefix is followed by a slash, so nothing beyond the longest route plus one can be of interest; without
        # this limit a path of thousands of slashes would be cut thousands of times.
        end = path.rfind("/", 0, self._route_length_max + 1)
        while end > 0:
            found = by_route.get(path[:end])
            if found is not None:
                return found
            end = path.rfind("/", 0, end)
        return by_route.get("/") if path.startswith("/") else None

    def routes(self) -> dict[str, str]:
        """Every route with its endpoint's tag, in alphabetical order."""
        return {route: self._by_route[route].endpoint_tag for route in sorted(self._by_route)}

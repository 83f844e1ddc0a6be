"""What snapshots do to requests under way: replicas that came take what waits, those that went lose what they had.

Why apart from dispatching: a change of the routing state meets every call at once, a request only its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from typing import final

from serve_common.dispatch.keeper import Keeper
from serve_common.dispatch.losses import Losses
from serve_common.dispatch.routes import Routes
from serve_common.errors import NotFound
from serve_common.names import BackendTag, EndpointTag
from serve_common.routing.router import Router
from serve_common.routing.snapshot_table import HttpChange
from serve_common.subjects import backend_key, endpoint_key
from serve_common.wires.snapshots import BackendSnapshot, Snapshot


@final
class Changes:
    """Brings snapshots to the routers and to the calls."""

    def __init__(self, keeper: Keeper, routes: Routes, losses: Losses) -> None:
        self._keeper = keeper
        self._routes = routes
        self._losses = losses
        self._loop = asyncio.get_running_loop()

    def update(self, snapshots: Mapping[str, Snapshot | None], *, whole: bool) -> HttpChange | None:
        """See `Dispatcher.update`."""
        changes = self._routes.update(snapshots, whole=whole)
        failures: list[Exception] = []
        for tag, backend in changes.backends.items():
            try:
                self._apply_backend(tag, backend)
                self._routes.confirm(backend_key(tag))
            except Exception as error:  # noqa: BLE001 - raised below
                failures.append(error)
        if changes.endpoints:
            for tag in self._routes.orphans():
                self._drop_router(self._routes.routers.pop(tag))
            self._choose_anew(changes.endpoints)
            for endpoint_tag in changes.endpoints:
                self._routes.confirm(endpoint_key(endpoint_tag))
        if failures:
            raise ExceptionGroup("snapshots were not applied", failures)
        return changes.http

    def _apply_backend(self, tag: BackendTag, backend: BackendSnapshot | None) -> None:
        if backend is None:
            self._drop_router(self._routes.routers.pop(tag, None))
            return
        router = self._routes.router(tag)
        applied = router.apply(backend, self._loop.time())
        self._keeper.perform(router, applied.dispatches)
        self._losses.lose(
            applied.lost,
            router,
            "left the backend",
            died=applied.died,
            are_others_left=applied.are_others_left,
        )

    def _drop_router(self, router: Router | None) -> None:
        """The backend is gone: what waits for it chooses anew or fails now, not at its deadline."""
        if router is None:
            return
        dropped = router.drop()
        waiting = [self._keeper.calls[request] for request in dropped.waiting]
        for call in waiting:
            call.router = None
        self._losses.lose(dropped.lost, router, "left with its backend")
        for call in waiting:
            if call.key in self._keeper.calls:
                self._keeper.submit(call)

    def _choose_anew(self, changed: Collection[EndpointTag]) -> None:
        """What waits goes by the traffic policy of now; what a replica has is still answered.

        Otherwise a request could wait for a backend that gets no replica any more because all traffic left it.
        """
        for call in list(self._keeper.calls.values()):
            ask, router = call.ask, call.router
            if (
                ask.endpoint.tag not in changed
                or call.attempt is not None
                or call.key not in self._keeper.calls
            ):
                continue
            endpoint = self._routes.endpoints.get(ask.endpoint.tag)
            if endpoint is None:
                self._keeper.end_with(call, NotFound(f"endpoint {ask.endpoint.tag!r} is gone"))
            elif (
                router is not None
                and ask.shadow_backend is None
                and not endpoint.takes(router.backend_tag, ask.backend_tag)
                and self._keeper.leave_router(call)
            ):
                self._keeper.submit(call)

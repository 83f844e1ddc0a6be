"""When a proxy closes its HTTP port after a shutdown, and what becomes of comparisons when their request ends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from serve_common.config.backend import HttpOptions
from serve_common.errors import BusUnavailable
from serve_common.routing.route_table import HttpChange
from serve_proxy.shell.ingress import Ingress


def test_a_proxy_that_starts_after_a_shutdown_listens_and_closes_at_the_next() -> None:
    taken: list[HttpChange] = []
    told: list[HttpChange] = []
    dispatcher: Any = SimpleNamespace(update=lambda _snapshots, *, whole: told.pop())
    routes: Any = SimpleNamespace(is_filled=True, confirm=lambda *_: None)
    options: Any = SimpleNamespace(take=taken.append, pending_reason=None)
    ingress = Ingress(
        routes, dispatcher, Any, Any, options, captures=Any, on_applied=lambda: None, bus_wait_s=1.0
    )  # type: ignore[arg-type]
    told.append(HttpChange(options=HttpOptions(), snapshot_id=3, is_shut_down=True))
    ingress.on_snapshots({}, whole=True)
    assert ingress.is_open
    told.append(HttpChange(options=HttpOptions(), snapshot_id=4, is_shut_down=True))
    ingress.on_snapshots({}, whole=False)
    assert [(change.snapshot_id, change.is_shut_down) for change in taken] == [(3, False), (4, True)]


class PendingLog:
    """Stands for a pending comparison."""

    def __init__(self) -> None:
        self.ended: list[object] = []

    def add_response(self, _call: object, response: object) -> None:
        self.ended.append(response)

    def drop(self) -> None:
        self.ended.append("dropped")


def comparing_ingress(dispatcher: Any, pending: PendingLog) -> Ingress:
    shadows: Any = SimpleNamespace(copy=lambda _spec: pending)
    captures: Any = SimpleNamespace(sample=lambda _spec: None)
    return Ingress(
        Any, dispatcher, Any, shadows, Any, captures=captures, on_applied=lambda: None, bus_wait_s=1.0
    )  # type: ignore[arg-type]


SPEC: Any = SimpleNamespace(endpoint=SimpleNamespace(is_copied=True, shadows=True))


def test_callbacks_end_a_comparison_after_the_caller_has_its_response() -> None:
    pending, seen = PendingLog(), list[object]()
    ingress = comparing_ingress(SimpleNamespace(start=lambda *arguments: arguments), pending)
    arguments: Any = ingress.start(
        SPEC, lambda *_: seen.append(len(pending.ended)), lambda *_: seen.append("failed")
    )
    _, on_response, on_error = arguments
    on_response("call", "response")
    assert (seen, pending.ended) == ([0], ["response"])
    on_error("call", "error")
    assert (seen, pending.ended) == ([0, "failed"], ["response", "dropped"])


async def test_a_request_that_fails_ends_its_comparison_too() -> None:
    async def send(spec: object) -> tuple[str, str]:
        if spec is SPEC:
            return "call", "response"
        raise BusUnavailable("away")

    pending = PendingLog()
    ingress = comparing_ingress(SimpleNamespace(send=send), pending)
    assert await ingress.send(SPEC) == ("call", "response")
    with pytest.raises(BusUnavailable):
        await ingress.send(SimpleNamespace(endpoint=SPEC.endpoint))  # type: ignore[arg-type]
    assert pending.ended == ["response", "dropped"]

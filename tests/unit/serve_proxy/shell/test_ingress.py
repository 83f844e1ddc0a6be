"""When a proxy closes its HTTP port after a shutdown, and when it does not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from serve_common.config.backend import HttpOptions
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

"""Metrics of consoles."""

from __future__ import annotations

from typing import Final

from serve_common.telemetry.catalogue.specs import Exporter, MetricKind, MetricSpec

_HERE: Final = (Exporter.CONSOLE,)

CONSOLE_TABS: Final = MetricSpec(
    name="serve_console_open_tabs",
    kind=MetricKind.GAUGE,
    text="Open tabs whose pages are updated as things change, 500 at most.",
    unit="tabs",
    exporters=_HERE,
)
CONSOLE_SESSIONS: Final = MetricSpec(
    name="serve_console_sessions",
    kind=MetricKind.GAUGE,
    text="Sessions of people who are signed in; one for each browser, 500 at most.",
    unit="sessions",
    exporters=_HERE,
)
CONSOLE_SIGN_INS: Final = MetricSpec(
    name="serve_console_sign_ins_total",
    kind=MetricKind.COUNTER,
    text="Attempts to sign in, by what became of them. Many that are wrong or limited are somebody who guesses.",
    unit="attempts",
    labels=("outcome",),
    exporters=_HERE,
)

CONSOLE_METRICS: Final = (CONSOLE_TABS, CONSOLE_SESSIONS, CONSOLE_SIGN_INS)

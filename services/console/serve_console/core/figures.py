"""Figures as people read them; what is unknown is a dash."""

from __future__ import annotations

UNKNOWN = "\N{EN DASH}"


def format_rate(value: float | None) -> str:
    """A rate: one digit after the point below 100; a dash for what is unknown."""
    if value is None:
        return UNKNOWN
    return f"{value:,.0f}" if value >= 99.95 or value == 0 else f"{value:.1f}"


def format_count(value: float | None) -> str:
    """A whole number; a dash for what is unknown."""
    return UNKNOWN if value is None else f"{value:,.0f}"


def format_milliseconds(seconds: float | None) -> str:
    """A duration, in milliseconds below one second; a dash for what is unknown."""
    if seconds is None:
        return UNKNOWN
    return f"{seconds * 1000:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"


def format_percent(share: float | None) -> str:
    """A share of 1 in percent; a dash for what is unknown."""
    if share is None:
        return UNKNOWN
    percent = share * 100
    return f"{percent:.0f} %" if percent == round(percent) or percent >= 10 else f"{percent:.2g} %"

"""The few forms that most of our queries have."""

from __future__ import annotations

from typing import Final

WINDOW: Final = "[$__rate_interval]"
"""Grafana's: at least four scrapes, and never shorter than a step."""
OF_ENDPOINT: Final = 'endpoint_tag=~"$endpoint"'
OF_BACKEND: Final = 'backend_tag=~"$backend"'
OF_INSTANCE: Final = 'instance=~"$instance"'


def series(metric: str, *filters: str) -> str:
    """A metric, where all the filters hold."""
    return f"{metric}{{{', '.join(filters)}}}" if filters else metric


def rate(metric: str, *filters: str, by: str = "") -> str:
    """How much a counter grows in a second, added up."""
    return _sum(f"rate({series(metric, *filters)}{WINDOW})", by)


def increase(metric: str, *filters: str, by: str = "") -> str:
    """How much a counter grew from point to point, which are a minute apart at least: for what happens seldom."""
    return _sum(f"increase({series(metric, *filters)}{WINDOW})", by)


def total(metric: str, *filters: str, by: str = "") -> str:
    """A gauge, added up."""
    return _sum(series(metric, *filters), by)


def quantile(share: float, histogram: str, *filters: str, by: str = "") -> str:
    """What ``share`` of the observations did not exceed."""
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({share}, {rate(f'{histogram}_bucket', *filters, by=labels)})"


def mean(histogram: str, *filters: str, by: str = "") -> str:
    """The average of the observations; nothing where there were none."""
    return (
        f"{rate(f'{histogram}_sum', *filters, by=by)} / ({rate(f'{histogram}_count', *filters, by=by)} > 0)"
    )


def share(part: str, whole: str) -> str:
    """Of ``whole``; 0 where there was nothing."""
    return f"{part} / clamp_min({whole}, 1e-9)"


def _sum(expr: str, by: str) -> str:
    return f"sum by ({by}) ({expr})" if by else f"sum({expr})"

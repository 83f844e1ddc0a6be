"""Chooses where each load is read: Prometheus where it knows enough, otherwise straight from the services.

Why each backend by itself: a proxy that Prometheus does not scrape concerns all, a host only the backends on it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, Protocol, final

import msgspec
import structlog

from serve_common.names import BackendTag
from serve_controller.core.autoscaling.values import Reading
from serve_controller.ports import LoadAsk, LoadSource, Targets

_log = structlog.get_logger(__name__)

TRUSTED_AFTER: Final = 3
"""So many good readings in a row it takes to go back to Prometheus, so that a backend does not alternate."""
_SECONDS: Final = re.compile(r"\b\d+(\.\d+)?(?= s\b)")
_REASONS_TOLD: Final = 5
_REMEMBERED_INTERVALS: Final = 3
"""A backend that nobody has asked about for so many of its intervals is forgotten."""


class OpenSource(LoadSource, Protocol):
    """A source that holds connections."""

    async def close(self) -> None:
        """Close them."""
        ...


class _Known(NamedTuple):
    """What Prometheus lacked of one backend."""

    until: float
    why: str
    good: int = 0
    """How many good readings it gave in a row since."""


@final
class LoadSources:
    """A `LoadSource`: Prometheus, with the scrape behind it."""

    def __init__(self, prometheus: OpenSource | None, scrape: OpenSource) -> None:
        """Without a Prometheus everything is scraped, and users' queries give nothing."""
        self._prometheus = prometheus
        self._scrape = scrape
        self._known: dict[BackendTag, _Known] = {}
        """Backends whose load Prometheus lacks, or lacked until lately."""
        self._told: frozenset[str] = frozenset()
        """The reasons that were logged last."""

    async def read(
        self, asks: Sequence[LoadAsk], targets: Targets, now: float
    ) -> Mapping[BackendTag, Reading]:
        """As `LoadSource`."""
        if self._prometheus is None:
            return await self._scrape.read(asks, targets, now)
        first = await self._prometheus.read(asks, targets, now)
        behind = [ask for ask in asks if self._is_behind(ask, first[ask.backend_tag], now)]
        self._tell(now)
        if not behind:
            return first
        second = await self._scrape.read(behind, targets, now)
        return {**first, **{tag: _better(first[tag], reading) for tag, reading in second.items()}}

    async def close(self) -> None:
        """Close both."""
        if self._prometheus is not None:
            await self._prometheus.close()
        await self._scrape.close()

    def _is_behind(self, ask: LoadAsk, reading: Reading, now: float) -> bool:
        """Whether the load of this backend is scraped, by how Prometheus did lately."""
        until = now + _REMEMBERED_INTERVALS * ask.config.metrics_interval_s
        known = self._known.get(ask.backend_tag)
        if reading.seen is None:
            self._known[ask.backend_tag] = _Known(until, reading.missing)
        elif known is None:
            return False
        elif known.good + 1 >= TRUSTED_AFTER or ask.config.query is not None:
            del self._known[ask.backend_tag]
            return False
        else:
            self._known[ask.backend_tag] = _Known(until, known.why, known.good + 1)
        return ask.config.query is None

    def _tell(self, now: float) -> None:
        """Log what Prometheus does not know, when that has changed: each reason once, whatever times are in it."""
        self._known = {tag: known for tag, known in self._known.items() if known.until >= now}
        reasons = Counter(_SECONDS.sub("#", known.why) for known in self._known.values())
        if reasons.keys() == self._told:
            return
        self._told = frozenset(reasons)
        if reasons:
            few = dict(reasons.most_common(_REASONS_TOLD))
            _log.warning("prometheus_lacks_loads", backends=reasons.total(), reasons=few)
        else:
            _log.info("prometheus_has_all_loads")


def _better(first: Reading, second: Reading) -> Reading:
    """The scrape's, when it has one."""
    if second.seen is not None:
        return second
    if first.seen is not None:
        return first
    return msgspec.structs.replace(second, missing=f"{first.missing}; scraping: {second.missing}")

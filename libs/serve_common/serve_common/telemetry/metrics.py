"""Metrics of code inside a replica, as plain numbers, until the process exports them.

Why not a metrics library's own objects: each of their updates writes into a shared file and takes microseconds; they
decide at import where they write to, before a replica can know; and instrumented code must also run without a
replica, as in its author's tests.

An export drains: pending counts are handed over once, so nothing here grows beyond its limits.
"""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterator
from enum import Enum
from typing import Final, TypeVar, final

import structlog

from serve_common.telemetry.catalogue.specs import MetricKind, MetricSpec

_log = structlog.get_logger(__name__)

SERIES_MAX: Final = 1_000
"""Limit of sets of label values of one metric."""
_OWN_LABEL: Final = "backend_tag"
"""Added at export."""
OTHER: Final = "other"
"""Replaces each label value beyond that limit."""

LabelValues = tuple[str, ...]
"""Values in the order of the metric's labels."""


class Aggregate(Enum):
    """How the values of one gauge in several replicas are combined."""

    SUM = "sum"
    MAX = "max"
    MIN = "min"
    LATEST = "latest"
    """The value that was set last."""


class MetricConflict(ValueError):
    """The name belongs to another metric."""


class Observations:
    """Observed values by bucket. Not locked."""

    __slots__ = ("buckets", "counts", "total")

    def __init__(self, buckets: tuple[float, ...]) -> None:
        """``buckets`` are upper bounds in ascending order."""
        self.buckets = buckets
        self.counts = [0] * (len(buckets) + 1)
        """Counts per bucket, not cumulative; the last is of values above all bounds."""
        self.total = 0.0
        """Sum of the values."""

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.buckets, value)] += 1
        self.total += value


class Measure(ABC):
    """One metric of this process. Methods of its kinds may be called from any thread."""

    def __init__(self, spec: MetricSpec, series_max: int) -> None:
        self.spec: Final = spec
        self.labels: Final = tuple(label for label in spec.labels if label != _OWN_LABEL)
        """Labels that callers give values for."""
        self.aggregate = Aggregate.SUM
        self.lock = threading.Lock()
        """Guards this metric's values."""
        self._series_max = series_max
        self._seen: set[LabelValues] = set()
        self._others: Final = (OTHER,) * len(self.labels)

    @abstractmethod
    def _has_pending(self) -> bool: ...

    def _admit(self, key: LabelValues) -> LabelValues:
        """With the lock held: ``key``, which is new, or the key for all others where there are too many already."""
        if len(self._seen) < self._series_max:
            self._seen.add(key)
            return key
        if self._others not in self._seen:
            self._seen.add(self._others)
            _log.warning(
                "metric_has_too_many_label_values", metric=self.spec.name, series_max=self._series_max
            )
        return self._others


@final
class LocalCounter(Measure):
    """A counter."""

    def __init__(self, spec: MetricSpec, series_max: int) -> None:
        super().__init__(spec, series_max)
        self._pending: dict[LabelValues, float] = {}

    def add(self, value: float, key: LabelValues = ()) -> None:
        """Add ``value``, at least 0; adding 0 creates the series."""
        with self.lock:
            pending = self._pending
            if key not in self._seen:
                key = self._admit(key)
            pending[key] = pending.get(key, 0.0) + value

    def drain(self) -> dict[LabelValues, float]:
        """Sums added since the last drain."""
        with self.lock:
            pending, self._pending = self._pending, {}
        return pending

    def _has_pending(self) -> bool:
        return bool(self._pending)


@final
class LocalGauge(Measure):
    """A gauge."""

    def __init__(self, spec: MetricSpec, series_max: int) -> None:
        super().__init__(spec, series_max)
        self._values: dict[LabelValues, float] = {}
        self._changed: set[LabelValues] = set()

    def set(self, value: float, key: LabelValues = ()) -> None:
        """Set the value of the series ``key``."""
        with self.lock:
            if key not in self._seen:
                key = self._admit(key)
            self._values[key] = value
            self._changed.add(key)

    def drain(self) -> dict[LabelValues, float]:
        """The values that were set since the last drain."""
        with self.lock:
            changed, self._changed = self._changed, set()
            return {key: self._values[key] for key in changed}

    def _has_pending(self) -> bool:
        return bool(self._changed)


@final
class LocalHistogram(Measure):
    """A histogram."""

    def __init__(self, spec: MetricSpec, series_max: int) -> None:
        super().__init__(spec, series_max)
        self._pending: dict[LabelValues, Observations] = {}

    def observe(self, value: float, key: LabelValues = ()) -> None:
        """Count one value of the series ``key``."""
        with self.lock:
            if key not in self._seen:
                key = self._admit(key)
            observations = self._pending.get(key)
            if observations is None:
                observations = self._pending[key] = Observations(self.spec.buckets)
            observations.observe(value)

    def drain(self) -> dict[LabelValues, Observations]:
        """Observations since the last drain."""
        with self.lock:
            pending, self._pending = self._pending, {}
        return pending

    def _has_pending(self) -> bool:
        return bool(self._pending)


AnyMeasure = LocalCounter | LocalGauge | LocalHistogram
_M = TypeVar("_M", LocalCounter, LocalGauge, LocalHistogram)


class ProcessMetrics:
    """The registry of a process' metrics, by name."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._metrics: dict[str, AnyMeasure] = {}
        self._names: dict[str, str] = {}
        """The metric that owns each name of a sample or family."""

    def __len__(self) -> int:
        return len(self._metrics)

    def total(self, spec: MetricSpec, series_max: int = SERIES_MAX) -> LocalCounter:
        """The counter of that specification, created when it does not exist.

        The label ``backend_tag`` is not set by callers: it is added at export. Raises `MetricConflict` when the name
        belongs to another metric.
        """
        return self._declare(LocalCounter, spec, series_max)

    def level(
        self, spec: MetricSpec, series_max: int = SERIES_MAX, aggregate: Aggregate = Aggregate.SUM
    ) -> LocalGauge:
        """The gauge; as `total`."""
        level = self._declare(LocalGauge, spec, series_max, aggregate)
        if level.aggregate is not aggregate:
            raise MetricConflict(
                f"the metric {spec.name!r} exists already, with aggregate={level.aggregate.value!r}"
            )
        return level

    def distribution(self, spec: MetricSpec, series_max: int = SERIES_MAX) -> LocalHistogram:
        """The histogram; as `total`."""
        return self._declare(LocalHistogram, spec, series_max)

    def pending(self) -> Iterator[AnyMeasure]:
        """Metrics that have something to drain."""
        for measure in list(self._metrics.values()):
            if measure._has_pending():  # noqa: SLF001 - it is this module's
                yield measure

    def renew_locks(self) -> None:
        """Replace the locks in a forked child, where another thread's lock would stay locked for ever."""
        self._lock = threading.Lock()
        for measure in self._metrics.values():
            measure.lock = threading.Lock()

    def _declare(
        self,
        kind: type[_M],
        spec: MetricSpec,
        series_max: int,
        aggregate: Aggregate = Aggregate.SUM,
    ) -> _M:
        with self._lock:
            known = self._metrics.get(spec.name)
            if known is not None:
                return self._same(kind, known, spec)
            for name in {spec.family, *spec.series}:
                if name in self._names:
                    raise MetricConflict(
                        f"the metric {spec.name!r} would have the name {name!r}, as {self._names[name]!r} has it"
                    )
            measure = kind(spec, series_max)
            measure.aggregate = aggregate
            self._metrics[spec.name] = measure
            self._names.update(dict.fromkeys({spec.family, *spec.series}, spec.name))
            return measure

    @staticmethod
    def _same(kind: type[_M], known: AnyMeasure, spec: MetricSpec) -> _M:
        if not isinstance(known, kind):
            raise MetricConflict(f"the metric {spec.name!r} exists already, as a {known.spec.kind.value}")
        if known.spec.labels != spec.labels:
            raise MetricConflict(
                f"the metric {spec.name!r} exists already, with the labels {list(known.spec.labels)}"
            )
        if known.spec.kind is MetricKind.HISTOGRAM and known.spec.buckets != spec.buckets:
            raise MetricConflict(
                f"the metric {spec.name!r} exists already, with the bounds {list(known.spec.buckets)}"
            )
        return known


process_metrics: Final = ProcessMetrics()
"""The metrics of this process."""

os.register_at_fork(after_in_child=process_metrics.renew_locks)

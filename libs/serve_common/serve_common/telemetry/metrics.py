"""What code inside a replica counts, as plain numbers, until the process writes them out.

Why not a metrics library's own objects: each of their updates writes into a shared file and takes microseconds; they
decide at import where they write to, which is before a replica knows; and code that counts must also run where there is
no replica at all, as in its author's tests.

What is written out is drained: pending counts are handed over once, so nothing here grows but by its limits.
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

from serve_common.telemetry.catalogue import MetricKind, MetricSpec

_log = structlog.get_logger(__name__)

SERIES_MAX: Final = 1_000
"""Sets of label values of one measure."""
OTHER: Final = "other"
"""In place of each label value beyond that."""

LabelValues = tuple[str, ...]
"""In the order of the measure's labels."""


class Aggregate(Enum):
    """What becomes of the same gauge of several replicas."""

    SUM = "sum"
    MAX = "max"
    MIN = "min"
    LATEST = "latest"
    """The one that was set last."""


class MeasureConflict(ValueError):
    """A name is taken by something else."""


class Observations:
    """Observed values by bucket. Not locked."""

    __slots__ = ("buckets", "counts", "total")

    def __init__(self, buckets: tuple[float, ...]) -> None:
        """``buckets`` are upper bounds, rising."""
        self.buckets = buckets
        self.counts = [0] * (len(buckets) + 1)
        """Not cumulative; the last one is beyond all bounds."""
        self.total = 0.0
        """Of the values."""

    def observe(self, value: float) -> None:
        """One more."""
        self.counts[bisect_left(self.buckets, value)] += 1
        self.total += value


class Measure(ABC):
    """One metric of this process. Methods of its kinds may be called from any thread."""

    def __init__(self, spec: MetricSpec, labels: LabelValues, series_max: int, lock: threading.Lock) -> None:
        """``labels`` are the names of those that callers give values for; ``lock`` is of the registry."""
        self.spec: Final = spec
        self.labels: Final = labels
        self.aggregate = Aggregate.SUM
        self.lock = lock
        self._series_max = series_max
        self._seen: set[LabelValues] = set()
        self._others: Final = (OTHER,) * len(labels)

    @abstractmethod
    def _has_pending(self) -> bool: ...

    def _known(self, key: LabelValues) -> LabelValues:
        """Under the lock: ``key``, or where there are too many already what stands for all others."""
        if key in self._seen:
            return key
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

    def __init__(self, spec: MetricSpec, labels: LabelValues, series_max: int, lock: threading.Lock) -> None:
        super().__init__(spec, labels, series_max, lock)
        self._pending: dict[LabelValues, float] = {}

    def add(self, value: float, key: LabelValues = ()) -> None:
        """``value`` is at least 0; with 0 the series begins to exist."""
        with self.lock:
            pending = self._pending
            if key not in self._seen:
                key = self._known(key)
            pending[key] = pending.get(key, 0.0) + value

    def drain(self) -> dict[LabelValues, float]:
        """What was added since the last time."""
        with self.lock:
            pending, self._pending = self._pending, {}
        return pending

    def _has_pending(self) -> bool:
        return bool(self._pending)


@final
class LocalGauge(Measure):
    """A gauge."""

    def __init__(self, spec: MetricSpec, labels: LabelValues, series_max: int, lock: threading.Lock) -> None:
        super().__init__(spec, labels, series_max, lock)
        self._values: dict[LabelValues, float] = {}
        self._changed: set[LabelValues] = set()

    def set(self, value: float, key: LabelValues = ()) -> None:
        """It is so from now on."""
        with self.lock:
            if key not in self._seen:
                key = self._known(key)
            self._values[key] = value
            self._changed.add(key)

    def drain(self) -> dict[LabelValues, float]:
        """The values that were set since the last time."""
        with self.lock:
            changed, self._changed = self._changed, set()
            return {key: self._values[key] for key in changed}

    def _has_pending(self) -> bool:
        return bool(self._changed)


@final
class LocalHistogram(Measure):
    """A histogram."""

    def __init__(self, spec: MetricSpec, labels: LabelValues, series_max: int, lock: threading.Lock) -> None:
        super().__init__(spec, labels, series_max, lock)
        self._pending: dict[LabelValues, Observations] = {}

    def observe(self, value: float, key: LabelValues = ()) -> None:
        """One more value."""
        with self.lock:
            if key not in self._seen:
                key = self._known(key)
            observations = self._pending.get(key)
            if observations is None:
                observations = self._pending[key] = Observations(self.spec.buckets)
            observations.observe(value)

    def drain(self) -> dict[LabelValues, Observations]:
        """What was observed since the last time."""
        with self.lock:
            pending, self._pending = self._pending, {}
        return pending

    def _has_pending(self) -> bool:
        return bool(self._pending)


AnyMeasure = LocalCounter | LocalGauge | LocalHistogram
_M = TypeVar("_M", LocalCounter, LocalGauge, LocalHistogram)
_OWN_LABEL: Final = "backend_tag"


class Measures:
    """The measures of a process, by name."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._measures: dict[str, AnyMeasure] = {}
        self._names: dict[str, str] = {}
        """Whose each name of a sample or of a family is."""

    def __len__(self) -> int:
        return len(self._measures)

    def total(self, spec: MetricSpec, series_max: int = SERIES_MAX) -> LocalCounter:
        """The counter of that specification, made when there is none.

        The label ``backend_tag`` is not the callers': it is added when the measure is written out. Raises
        `MeasureConflict` when the name is taken by another one.
        """
        return self._declare(LocalCounter, spec, series_max)

    def level(
        self, spec: MetricSpec, series_max: int = SERIES_MAX, aggregate: Aggregate = Aggregate.SUM
    ) -> LocalGauge:
        """The gauge; as `total`."""
        level = self._declare(LocalGauge, spec, series_max, aggregate)
        if level.aggregate is not aggregate:
            raise MeasureConflict(
                f"the metric {spec.name!r} exists already, with aggregate={level.aggregate.value!r}"
            )
        return level

    def distribution(self, spec: MetricSpec, series_max: int = SERIES_MAX) -> LocalHistogram:
        """The histogram; as `total`."""
        return self._declare(LocalHistogram, spec, series_max)

    def pending(self) -> Iterator[AnyMeasure]:
        """Those that have something to drain."""
        for measure in list(self._measures.values()):
            if measure._has_pending():  # noqa: SLF001 - it is this module's
                yield measure

    def renew_locks(self) -> None:
        """In a forked child, where another thread's lock would stay locked for ever."""
        self._lock = threading.Lock()
        for measure in self._measures.values():
            measure.lock = threading.Lock()

    def _declare(
        self,
        kind: type[_M],
        spec: MetricSpec,
        series_max: int,
        aggregate: Aggregate = Aggregate.SUM,
    ) -> _M:
        with self._lock:
            known = self._measures.get(spec.name)
            if known is not None:
                return self._same(kind, known, spec)
            for name in {spec.family, *spec.series}:
                if name in self._names:
                    raise MeasureConflict(
                        f"the metric {spec.name!r} would have the name {name!r}, as {self._names[name]!r} has it"
                    )
            labels = tuple(label for label in spec.labels if label != _OWN_LABEL)
            measure = kind(spec, labels, series_max, threading.Lock())
            measure.aggregate = aggregate
            self._measures[spec.name] = measure
            self._names.update(dict.fromkeys({spec.family, *spec.series}, spec.name))
            return measure

    @staticmethod
    def _same(kind: type[_M], known: AnyMeasure, spec: MetricSpec) -> _M:
        if not isinstance(known, kind):
            raise MeasureConflict(f"the metric {spec.name!r} exists already, as a {known.spec.kind.value}")
        if known.spec.labels != spec.labels:
            raise MeasureConflict(
                f"the metric {spec.name!r} exists already, with the labels {list(known.spec.labels)}"
            )
        if known.spec.kind is MetricKind.HISTOGRAM and known.spec.buckets != spec.buckets:
            raise MeasureConflict(
                f"the metric {spec.name!r} exists already, with the bounds {list(known.spec.buckets)}"
            )
        return known


measures: Final = Measures()
"""Of this process."""

os.register_at_fork(after_in_child=measures.renew_locks)

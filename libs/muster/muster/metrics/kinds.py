"""`Counter`, `Gauge` and `Histogram` for users' code.

Why made again is the same: a class that makes its metrics in its constructor is constructed in each replica, and in
tests many times in one process.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Self

from muster.metrics.definitions import METRICS_MAX, MetricRefused, define
from serve_common.measures import Aggregate, measures
from serve_common.metrics_catalogue import MetricKind, MetricSpec

Tags = Mapping[str, str]

_NO_TAGS: Final = ()
_making: Final = threading.Lock()
_made: Final[set[str]] = set()


class Metric:
    """What the three kinds have in common."""

    def __init__(self, spec: MetricSpec) -> None:
        self._spec: Final = spec
        self._keys: Final = spec.labels
        self._default_tags: dict[str, str] = {}

    @property
    def info(self) -> dict[str, Any]:
        """Name, description, tag keys and default tags, as in Ray."""
        return {
            "name": self._spec.name,
            "description": self._spec.text,
            "tag_keys": self._keys,
            "default_tags": dict(self._default_tags),
        }

    def set_default_tags(self, default_tags: Tags) -> Self:
        """Values for tags that a call does not give; returns the metric itself. Raises ValueError or TypeError."""
        self._check_tags(default_tags)
        self._default_tags = dict(default_tags)
        return self

    def _values(self, tags: Tags | None) -> tuple[str, ...]:
        """The tags' values in the order of the keys."""
        keys = self._keys
        if not keys and not tags:
            return _NO_TAGS
        given: Tags = self._default_tags
        if tags:
            given = {**given, **tags} if given else tags
        try:
            values = tuple([given[key] for key in keys])
        except KeyError as missing:
            raise ValueError(
                f"metric {self._spec.name!r}: no value for the tag {missing.args[0]!r}"
            ) from None
        if len(given) > len(keys):
            self._check_tags(given)
        for value in values:
            if type(value) is not str:
                self._check_tags(given)
        return values

    def _check_tags(self, tags: Tags) -> None:
        for key, value in tags.items():
            if key not in self._keys:
                raise ValueError(f"metric {self._spec.name!r} has no tag {key!r}; it has {list(self._keys)}")
            if not isinstance(value, str):
                raise TypeError(f"metric {self._spec.name!r}: the tag {key!r} must be a text, not {value!r}")


class Counter(Metric):
    """Counts what only ever rises: ``Counter("cache_hits", "…", tag_keys=("model",)).inc(tags={"model": "a"})``.

    It is scraped as ``<name>_total``, with the further label ``backend_tag``, and added up over the replicas.
    """

    def __init__(self, name: str, description: str = "", tag_keys: Iterable[str] | None = None) -> None:
        """Raises `MetricRefused` (a ValueError) for a name, tags or a number of metrics that cannot be."""
        super().__init__(_admitted(define(MetricKind.COUNTER, name, description, tag_keys)))
        self._measure = measures.total(self._spec)
        if not self._keys:
            self._measure.add(0.0)

    def inc(self, value: float = 1.0, tags: Tags | None = None) -> None:
        """Count ``value`` more. Raises ValueError below 0 and for tags that are missing or unknown."""
        if not 0 <= value < math.inf:
            raise ValueError(f"metric {self._spec.name!r}: a counter cannot be changed by {value!r}")
        self._measure.add(float(value), self._values(tags))

    def record(self, value: float, tags: Tags | None = None) -> None:
        """As `inc`."""
        self.inc(value, tags)

    def __reduce__(self) -> Any:
        return _again, (Counter, (self._spec.name, self._spec.text, self._keys), self._default_tags)


class Gauge(Metric):
    """Shows a value that may rise and fall, such as a cache's size; each replica sets its own.

    ``aggregate`` says what becomes of the replicas' values: ``"sum"`` of those that live (the default), ``"max"``,
    ``"min"``, or ``"latest"`` for the one that was set last.
    """

    def __init__(
        self,
        name: str,
        description: str = "",
        tag_keys: Iterable[str] | None = None,
        *,
        aggregate: str = "sum",
    ) -> None:
        """As `Counter`."""
        try:
            how = Aggregate(aggregate)
        except ValueError:
            known = ", ".join(repr(each.value) for each in Aggregate)
            raise MetricRefused(
                f"metric {name!r}: aggregate must be one of {known}, not {aggregate!r}"
            ) from None
        super().__init__(_admitted(define(MetricKind.GAUGE, name, description, tag_keys)))
        self._measure = measures.level(self._spec, aggregate=how)

    def set(self, value: float, tags: Tags | None = None) -> None:
        """It is ``value`` from now on."""
        self._measure.set(float(value), self._values(tags))

    def record(self, value: float, tags: Tags | None = None) -> None:
        """As `set`."""
        self.set(value, tags)

    def __reduce__(self) -> Any:
        arguments = (self._spec.name, self._spec.text, self._keys)
        make = functools.partial(Gauge, aggregate=self._measure.aggregate.value)
        return _again, (make, arguments, self._default_tags)


class Histogram(Metric):
    """Counts values by size, such as the tokens of an answer; ``boundaries`` are the upper bounds of its buckets.

    Without boundaries they are those of Muster's own latencies, from 1 ms to 60 s.
    """

    def __init__(
        self,
        name: str,
        description: str = "",
        boundaries: Iterable[float] | None = None,
        tag_keys: Iterable[str] | None = None,
    ) -> None:
        """As `Counter`."""
        super().__init__(_admitted(define(MetricKind.HISTOGRAM, name, description, tag_keys, boundaries)))
        self._measure = measures.distribution(self._spec)

    def observe(self, value: float, tags: Tags | None = None) -> None:
        """One more value. Raises ValueError for one that is no number."""
        if not math.isfinite(value):
            raise ValueError(f"metric {self._spec.name!r}: {value!r} cannot be observed")
        self._measure.observe(float(value), self._values(tags))

    def record(self, value: float, tags: Tags | None = None) -> None:
        """As `observe`."""
        self.observe(value, tags)

    def __reduce__(self) -> Any:
        arguments = (self._spec.name, self._spec.text, self._spec.buckets, self._keys)
        return _again, (Histogram, arguments, self._default_tags)


def _again(make: Callable[..., Metric], arguments: tuple[Any, ...], default_tags: dict[str, str]) -> Metric:
    """What was pickled, in another process perhaps."""
    return make(*arguments).set_default_tags(default_tags)


def _admitted(spec: MetricSpec) -> MetricSpec:
    """``spec``, unless there are too many already."""
    with _making:
        if spec.name not in _made and len(_made) >= METRICS_MAX:
            raise MetricRefused(f"metric {spec.name!r}: a process may define at most {METRICS_MAX} metrics")
        _made.add(spec.name)
    return spec

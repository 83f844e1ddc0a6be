"""Metrics of users' own code, with the names and arguments of Ray Serve's: `Counter`, `Gauge`, `Histogram`.

They are exported on the metrics page of the replica's host; outside of replicas they are counted in memory only.

Why definitions are checked so strictly: a name that Prometheus does not accept, or that means two things, makes the
whole page of a host useless, and with it every metric that the autoscaler depends on.

A metric that is defined again is the same one: a class that creates its metrics in its constructor is constructed in
each replica, and in tests many times in one process.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Self

from serve_common.runtime.request_context import current_replica, is_program_replica, request_context
from serve_common.telemetry.catalogue import OWN_PREFIX
from serve_common.telemetry.catalogue.specs import SECONDS_BUCKETS, Exporter, MetricKind, MetricSpec
from serve_common.telemetry.metrics import Aggregate, process_metrics

METRICS_MAX: Final = 200
"""Most metrics that one process may define."""
TAGS_MAX: Final = 16
BOUNDARIES_MAX: Final = 100
NAME_LENGTH_MAX: Final = 128
DESCRIPTION_LENGTH_MAX: Final = 500

_NAME: Final = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_TAKEN_TAGS: Final = frozenset({"backend_tag", "le", "quantile", "pid", "process"})
_TAKEN_PREFIXES: Final = ("__", "process_", "python_")


class MetricRefused(ValueError):
    """A metric's definition is invalid; the message gives the reason."""


def define(
    kind: MetricKind,
    name: str,
    description: str,
    tag_keys: tuple[str, ...] | None,
    boundaries: Iterable[float] | None = None,
) -> MetricSpec:
    """Build a metric's specification. Raises `MetricRefused`, or TypeError for a value of a wrong type."""
    _check_name(name)
    if not isinstance(description, str):
        raise TypeError(f"the description of metric {name!r} must be a text, not {description!r}")
    return MetricSpec(
        name=f"{name.removesuffix('_total')}_total" if kind is MetricKind.COUNTER else name,
        kind=kind,
        text=description[:DESCRIPTION_LENGTH_MAX] or name,
        unit="",
        labels=_checked_tags(name, tag_keys),
        buckets=_checked_bounds(name, boundaries) if kind is MetricKind.HISTOGRAM else (),
        exporters=(Exporter.REPLICA,),
    )


def _check_name(name: str) -> None:
    if not isinstance(name, str):
        raise TypeError(f"the name of a metric must be a text, not {name!r}")
    if not _NAME.fullmatch(name) or len(name) > NAME_LENGTH_MAX:
        raise MetricRefused(
            f"{name!r} cannot be the name of a metric: it must have letters, digits and _ only, not begin with a "
            f"digit, and have at most {NAME_LENGTH_MAX} characters"
        )
    if name.startswith(OWN_PREFIX):
        raise MetricRefused(f"{name!r} cannot be the name of a metric: {OWN_PREFIX}… are Muster's own")
    if name.startswith(_TAKEN_PREFIXES):
        raise MetricRefused(
            f"{name!r} cannot be the name of a metric: those that begin with {', '.join(_TAKEN_PREFIXES)} are "
            "Prometheus' own and its client library's"
        )


def _checked_tags(name: str, tag_keys: tuple[str, ...] | None) -> tuple[str, ...]:
    keys = tag_keys or ()
    if not isinstance(keys, tuple):
        raise TypeError(f"tag_keys should be a tuple type, got: {type(keys)}, in metric {name!r}")
    for key in keys:
        if not isinstance(key, str):
            raise TypeError(f"a tag key of metric {name!r} must be a text, not {key!r}")
        if not _NAME.fullmatch(key) or key.startswith("__") or len(key) > NAME_LENGTH_MAX:
            raise MetricRefused(f"metric {name!r}: {key!r} cannot be a tag key")
        _check_not_reserved(key)
        if key in _TAKEN_TAGS:
            raise MetricRefused(f"metric {name!r}: the tag {key!r} is set by Muster or Prometheus")
    if len(set(keys)) < len(keys) or len(keys) > TAGS_MAX:
        raise MetricRefused(f"metric {name!r}: tag keys must differ, and be at most {TAGS_MAX}")
    return keys


def _check_not_reserved(key: str) -> None:
    """Refuse, in a program's replica, the tags that are added there, as Ray Serve does."""
    if key in _NAME_TAGS and is_program_replica():
        raise MetricRefused(f"'{key}' tag is reserved for Ray Serve metrics")


def _checked_bounds(name: str, boundaries: Iterable[float] | None) -> tuple[float, ...]:
    if boundaries is None:
        return SECONDS_BUCKETS
    bounds = tuple(boundaries)
    for bound in bounds:
        if isinstance(bound, bool) or not isinstance(bound, int | float):
            raise TypeError(f"a boundary of metric {name!r} must be a number, not {bound!r}")
    if bounds and bounds[-1] == math.inf:
        bounds = bounds[:-1]
    is_rising = all(low < high for low, high in itertools.pairwise(bounds))
    if not bounds or len(bounds) > BOUNDARIES_MAX or not is_rising or not all(map(math.isfinite, bounds)):
        raise MetricRefused(
            f"metric {name!r}: boundaries must be rising finite numbers, at least 1 and at most {BOUNDARIES_MAX}"
        )
    return tuple(float(bound) for bound in bounds)


_logger: Final = logging.getLogger("ray.serve")
Tags = Mapping[str, str]
_NAME_TAGS: Final = frozenset({"application", "deployment", "replica"})
_CONTEXT_TAGS: Final = _NAME_TAGS | {"route"}
"""Tag keys that have the replica's own names, and the route of its request, as values where a call gives none, as in
Ray Serve."""

_NO_TAGS: Final = ()
_lock: Final = threading.Lock()
_made: Final[set[str]] = set()


class Metric:
    """Base of the three kinds of metrics."""

    def __init__(self, name: str, spec: MetricSpec) -> None:
        self._name: Final = name
        self._spec: Final = spec
        self._keys: Final = spec.labels
        self._default_tags: dict[str, str] = {}
        self._warned = False
        self._context_keys: Final = _CONTEXT_TAGS.intersection(spec.labels)

    @property
    def info(self) -> dict[str, Any]:
        """Name, description, tag keys and default tags, as in Ray; in a program's replica with those added there."""
        added = _context_tags(_NAME_TAGS.difference(self._keys)) if is_program_replica() else {}
        return {
            "name": self._name,
            "description": self._spec.text,
            "tag_keys": (*added, *self._keys),
            "default_tags": {**self._default_tags, **added},
        }

    def set_default_tags(self, default_tags: Tags) -> Self:
        """Set values for tags that a call omits; returns the metric itself. Raises ValueError or TypeError."""
        for key in default_tags:
            _check_not_reserved(key)
        self._check_tags(default_tags)
        self._default_tags = dict(default_tags)
        return self

    def _values(self, tags: Tags | None) -> tuple[str, ...]:
        """Values of the tags in the order of the keys."""
        keys = self._keys
        if not keys and not tags:
            return _NO_TAGS
        combined: Tags = self._default_tags
        if tags:
            combined = {**combined, **tags} if combined else tags
        try:
            if not combined.keys() >= self._context_keys:
                combined = {**_context_tags(self._context_keys), **combined}
            values = tuple([combined[key] for key in keys])
        except KeyError as missing:
            raise ValueError(
                f"metric {self._spec.name!r}: Missing value for tag key(s): {missing.args[0]}."
            ) from None
        if len(combined) > len(keys):
            if is_program_replica():  # Ray Serve takes them
                self._warn_of_unknown(combined)
                combined = {key: combined[key] for key in keys}
            self._check_tags(combined)
        for value in values:
            if type(value) is not str:
                self._check_tags(combined)
        return values

    def _warn_of_unknown(self, tags: Tags) -> None:
        unknown = [key for key in tags if key not in self._keys]
        if not self._warned:
            self._warned = True
            _logger.warning(
                "metric %r: not counted by tags that it does not have: %s", self._spec.name, unknown
            )

    def _check_tags(self, tags: Tags) -> None:
        for key, value in tags.items():
            if key not in self._keys:
                raise ValueError(
                    f"metric {self._spec.name!r}: Unrecognized tag key {key}. It has {list(self._keys)}"
                )
            if not isinstance(value, str):
                raise TypeError(
                    f"metric {self._spec.name!r}, tag {key!r}: Tag values must be str, got {type(value)}."
                )


class Counter(Metric):
    """A count that only rises: ``Counter("cache_hits", "…", tag_keys=("model",)).inc(tags={"model": "a"})``.

    It is scraped as ``<name>_total``, with the additional label ``backend_tag``, summed over the replicas.
    """

    def __init__(self, name: str, description: str = "", tag_keys: tuple[str, ...] | None = None) -> None:
        """Raises `MetricRefused` (a ValueError) for an invalid name or tags, or for too many metrics."""
        super().__init__(name, _register(define(MetricKind.COUNTER, name, description, tag_keys)))
        self._measure = process_metrics.total(self._spec)
        if not self._keys:
            self._measure.add(0.0)

    def inc(self, value: float = 1.0, tags: Tags | None = None) -> None:
        """Add ``value``. Raises ValueError below 0 (in a program of Ray Serve's form also for 0), and for bad tags."""
        if not 0 <= _number(value) < math.inf or (not value and is_program_replica()):
            raise ValueError(f"metric {self._spec.name!r}: value must be >0, got {value!r}")
        self._measure.add(float(value), self._values(tags))

    def record(self, value: float, tags: Tags | None = None) -> None:
        """Same as `inc`."""
        self.inc(value, tags)

    def __reduce__(self) -> Any:
        return _again, (Counter, (self._name, self._spec.text, self._keys), self._default_tags)


class Gauge(Metric):
    """A value that may rise and fall, such as a cache's size; each replica sets its own.

    ``aggregate`` combines the values of the replicas: ``"sum"`` of the live ones (the default), ``"max"``, ``"min"``,
    or ``"latest"`` for the one that was set last.
    """

    def __init__(
        self,
        name: str,
        description: str = "",
        tag_keys: tuple[str, ...] | None = None,
        *,
        aggregate: str = "sum",
    ) -> None:
        """Raises `MetricRefused` as `Counter` does, and for an unknown ``aggregate``."""
        try:
            how = Aggregate(aggregate)
        except ValueError:
            known = ", ".join(repr(each.value) for each in Aggregate)
            raise MetricRefused(
                f"metric {name!r}: aggregate must be one of {known}, not {aggregate!r}"
            ) from None
        super().__init__(name, _register(define(MetricKind.GAUGE, name, description, tag_keys)))
        self._measure = process_metrics.level(self._spec, aggregate=how)

    def set(self, value: float, tags: Tags | None = None) -> None:
        """Set the value. Raises TypeError for what is no number, such as text."""
        self._measure.set(float(_number(value)), self._values(tags))

    def record(self, value: float, tags: Tags | None = None) -> None:
        """Same as `set`."""
        self.set(value, tags)

    def __reduce__(self) -> Any:
        arguments = (self._name, self._spec.text, self._keys)
        make = functools.partial(Gauge, aggregate=self._measure.aggregate.value)
        return _again, (make, arguments, self._default_tags)


class Histogram(Metric):
    """A distribution of values, such as the tokens of a response; ``boundaries`` are the upper bounds of its buckets.

    The default boundaries are those of Muster's own latencies, from 1 ms to 60 s.
    """

    def __init__(
        self,
        name: str,
        description: str = "",
        boundaries: Iterable[float] | None = None,
        tag_keys: tuple[str, ...] | None = None,
    ) -> None:
        """Raises `MetricRefused` as `Counter` does, and for invalid ``boundaries``."""
        spec = _register(define(MetricKind.HISTOGRAM, name, description, tag_keys, boundaries))
        super().__init__(name, spec)
        self.boundaries: Final = list(spec.buckets)
        """Upper bounds of the buckets, without infinity."""
        self._measure = process_metrics.distribution(self._spec)

    @property
    def info(self) -> dict[str, Any]:
        """As of `Metric`, with the boundaries."""
        return super().info | {"boundaries": self.boundaries}

    def observe(self, value: float, tags: Tags | None = None) -> None:
        """Record a value. Raises ValueError unless it is a finite number."""
        if not math.isfinite(_number(value)):
            raise ValueError(f"metric {self._spec.name!r}: {value!r} cannot be observed")
        self._measure.observe(float(value), self._values(tags))

    def record(self, value: float, tags: Tags | None = None) -> None:
        """Same as `observe`."""
        self.observe(value, tags)

    def __reduce__(self) -> Any:
        arguments = (self._name, self._spec.text, self._spec.buckets, self._keys)
        return _again, (Histogram, arguments, self._default_tags)


def _number(value: Any) -> float:
    if not hasattr(value, "__float__"):
        raise TypeError(f"value must be int or float, got {type(value)}.")
    number: float = value
    return number


def _context_tags(keys: frozenset[str]) -> Tags:
    """The values of ``keys``, which are of `_CONTEXT_TAGS`, in this replica; empty outside of replicas."""
    replica = current_replica()
    if replica is None:
        return {}
    application, _, deployment = str(replica.backend_tag).rpartition("/")
    request = request_context.get()
    known = {
        "deployment": deployment,
        "replica": str(replica.replica_tag),
        "application": application,
        "route": "" if request is None else request.route,
    }
    return {key: value for key, value in known.items() if key in keys}


def _again(make: Callable[..., Metric], arguments: tuple[Any, ...], default_tags: dict[str, str]) -> Metric:
    """Recreate an unpickled metric, perhaps in another process."""
    return make(*arguments).set_default_tags(default_tags)


def _register(spec: MetricSpec) -> MetricSpec:
    """Return ``spec`` and count it. Raises `MetricRefused` when the process has too many metrics."""
    with _lock:
        if spec.name not in _made and len(_made) >= METRICS_MAX:
            raise MetricRefused(f"metric {spec.name!r}: a process may define at most {METRICS_MAX} metrics")
        _made.add(spec.name)
    return spec


__all__ = ["METRICS_MAX", "Counter", "Gauge", "Histogram", "MetricRefused"]

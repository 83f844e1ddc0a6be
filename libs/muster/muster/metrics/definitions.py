"""Which metrics users may define: names, tags and bounds, checked when a metric is made.

Why so strict: a name that Prometheus does not take, or that means two things, makes the whole page of a host useless,
and with it every metric that the autoscaler goes by.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable
from typing import Final

from serve_common.metrics_catalogue import OWN_PREFIX, SECONDS_BUCKETS, Exporter, MetricKind, MetricSpec

METRICS_MAX: Final = 200
"""Of one process."""
TAGS_MAX: Final = 16
BOUNDARIES_MAX: Final = 100
NAME_LENGTH_MAX: Final = 128
DESCRIPTION_LENGTH_MAX: Final = 500

_NAME: Final = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_TAKEN_TAGS: Final = frozenset({"backend_tag", "le", "quantile", "pid", "process"})
_TAKEN_PREFIXES: Final = ("__", "process_", "python_")


class MetricRefused(ValueError):
    """A metric that cannot be; the message says why."""


def define(
    kind: MetricKind,
    name: str,
    description: str,
    tag_keys: Iterable[str] | None,
    boundaries: Iterable[float] | None = None,
) -> MetricSpec:
    """The metric's specification. Raises `MetricRefused`, or TypeError for what is of a wrong type."""
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


def _checked_tags(name: str, tag_keys: Iterable[str] | None) -> tuple[str, ...]:
    if isinstance(tag_keys, str):
        raise TypeError(f"tag_keys of metric {name!r} must be a tuple of names, not the text {tag_keys!r}")
    keys = tuple(tag_keys or ())
    for key in keys:
        if not isinstance(key, str):
            raise TypeError(f"a tag key of metric {name!r} must be a text, not {key!r}")
        if not _NAME.fullmatch(key) or key.startswith("__") or len(key) > NAME_LENGTH_MAX:
            raise MetricRefused(f"metric {name!r}: {key!r} cannot be a tag key")
        if key in _TAKEN_TAGS:
            raise MetricRefused(f"metric {name!r}: the tag {key!r} is set by Muster or Prometheus")
    if len(set(keys)) < len(keys) or len(keys) > TAGS_MAX:
        raise MetricRefused(f"metric {name!r}: tag keys must differ, and be at most {TAGS_MAX}")
    return keys


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

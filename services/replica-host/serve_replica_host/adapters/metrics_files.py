"""The host's view of prometheus_client's multiprocess files: served as one, and kept few.

Why: each replica process leaves files behind that are read at every scrape, for ever, and deleting them would make
counters fall. So the files of an ended process are folded into one file per kind, ``…_retired.db``.

Why no counter may fall by anything: to Prometheus a lower value is a counter that began anew, and the whole of it
counts as an increase. Sums of the same fractions in another order differ in their last digit, and folding changes the
order; so what was shown is never undercut.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final, final

from prometheus_client import Metric, mmap_dict, multiprocess
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

# The library's own types are missing here.
_MmapedDict: Final[Any] = mmap_dict.MmapedDict
_MultiProcessCollector: Final[Any] = multiprocess.MultiProcessCollector

RETIRED: Final = "retired"
BACKENDS_MAX: Final = 500
"""Backends without a process whose totals are kept; beyond it those go whose replicas ended first."""
_SUMMED: Final = ("counter", "histogram", "summary")
_BACKEND: Final = "backend_tag"

_Shown = dict[tuple[str, frozenset[tuple[str, str]]], float]


@final
class MetricsFiles(Collector):
    """One multiprocess directory. Methods may be called from any thread; they block on files."""

    def __init__(self, directory: Path, backends_max: int = BACKENDS_MAX) -> None:
        self._directory = directory
        self._backends_max = backends_max
        self._lock = threading.Lock()
        """A scrape in the middle of folding would count an ended process twice, or not at all."""
        self._shown: _Shown = {}
        """By counters and histograms at the last scrape."""

    def clean(self) -> None:
        """Make the directory empty of what an earlier life left, and make it if it is missing."""
        self._directory.mkdir(parents=True, exist_ok=True)
        for file in self._directory.glob("*.db"):
            file.unlink()

    def describe(self) -> list[Metric]:
        """Nothing: what there is depends on the files."""
        return []

    def collect(self) -> Iterator[Metric]:
        """The metrics of all processes, ended ones included."""
        with self._lock:
            collected = list(_MultiProcessCollector(None, str(self._directory)).collect())
            self._shown = _never_fall(collected, self._shown)
        return iter(collected)

    def retire(self, pid: int) -> None:
        """Fold the files of the ended process ``pid``; its live gauges vanish. Doing it twice is harmless."""
        with self._lock:
            for kind in _SUMMED:
                self._fold(kind, self._directory / f"{kind}_{pid}.db")
            for file in self._directory.glob(f"gauge_*_{pid}.db"):
                file.unlink()
            self._forget_old_backends()

    def _retired(self, kind: str) -> Path:
        return self._directory / f"{kind}_{RETIRED}.db"

    def _fold(self, kind: str, file: Path) -> None:
        if not file.exists():
            return
        retired = _MmapedDict(str(self._retired(kind)))
        try:
            for key, value, _timestamp, _at in _MmapedDict.read_all_values_from_file(str(file)):
                total, _ = retired.read_value(key)
                retired.write_value(key, total + value, 0.0)
        finally:
            retired.close()
        file.unlink()

    def _forget_old_backends(self) -> None:
        kept = self._retired("counter")
        if not kept.exists():
            return
        # In the order in which they were folded in for the first time.
        ended = dict.fromkeys(_backends_in(kept))
        if len(ended) <= self._backends_max:
            return
        own_files = [self._retired(kind) for kind in _SUMMED]
        for file in self._directory.glob("*.db"):
            if file not in own_files:
                for backend_tag in _backends_in(file):
                    ended.pop(backend_tag, None)
        # Some more than must go, for each time all is written anew.
        forgotten = set(list(ended)[: max(0, len(ended) - self._backends_max * 9 // 10)])
        for file in own_files:
            if file.exists() and forgotten:
                _rewrite(file, forgotten)


def _never_fall(collected: Iterable[Metric], shown: _Shown) -> _Shown:
    """Lift what is lower than at the last scrape, while it is there; what is shown now."""
    now: _Shown = {}
    for metric in collected:
        if metric.type not in _SUMMED:
            continue
        for at, sample in enumerate(metric.samples):
            key = (sample.name, frozenset(sample.labels.items()))
            before = shown.get(key, 0.0)
            if sample.value < before:
                metric.samples[at] = Sample(sample.name, sample.labels, before)
            now[key] = max(sample.value, before)
    return now


def _backends_in(file: Path) -> Iterator[str]:
    for key, _value, _timestamp, _at in _MmapedDict.read_all_values_from_file(str(file)):
        backend_tag = json.loads(key)[2].get(_BACKEND)
        if backend_tag is not None:
            yield backend_tag


def _rewrite(file: Path, forgotten: set[str]) -> None:
    """``file`` without those backends."""
    fresh = file.with_suffix(".new")
    fresh.unlink(missing_ok=True)
    kept = _MmapedDict(str(fresh))
    try:
        for key, value, _timestamp, _at in _MmapedDict.read_all_values_from_file(str(file)):
            if json.loads(key)[2].get(_BACKEND) not in forgotten:
                kept.write_value(key, value, 0.0)
    finally:
        kept.close()
    fresh.replace(file)

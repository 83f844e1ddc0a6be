"""The host's view of prometheus_client's multiprocess files: served as one, and kept few.

Why: each replica process leaves files behind that are read at every scrape, for ever, and deleting them would make
counters fall. So the files of an ended process are folded into one file per kind, ``…_retired.db``.

Why no counter may fall by anything: to Prometheus a lower value is a counter that began anew, and the whole of it
counts as an increase. Sums of the same fractions in another order differ in their last digit, and folding changes the
order; so what was shown is never undercut.

A process is known by its name in the names of its files: by its pid, and if it is on another machine by that machine
and its pid. Any text without an underscore would do.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, final

import structlog
from prometheus_client import Metric, mmap_dict, multiprocess
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from serve_common.bus.quiet_log import QuietLog
from serve_replica_host.adapters.allocated_files import AllocatedDict

_log = structlog.get_logger(__name__)

# The library's own types are missing here.
_MmapedDict: Final[Any] = mmap_dict.MmapedDict
_MultiProcessCollector: Final[Any] = multiprocess.MultiProcessCollector

RETIRED: Final = "retired"
BACKENDS_MAX: Final = 500
"""Backends without a process whose totals are kept; beyond it those go whose replicas ended first."""
_SUMMED: Final = ("counter", "histogram", "summary")
_BACKEND: Final = "backend_tag"
_FILE: Final = re.compile(r"(counter|histogram|summary|gauge_[a-z]+)_(\d+)\.db", re.ASCII)
"""As prometheus_client names them."""
_SAID_EVERY_S: Final = 60.0
_HEAD_BYTES: Final = 8
"""Of such a file: how many bytes are used, and as many for nothing."""

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
        self._unfolded: dict[str, None] = {}
        """Ended processes whose files are still there: for a moment, or because the disk is full."""
        self._no_room = QuietLog(_log.warning, _SAID_EVERY_S)

    def clean(self) -> None:
        """Make the directory empty of what an earlier life left, and make it if it is missing."""
        self._directory.mkdir(parents=True, exist_ok=True)
        for pattern in ("*.db", "*.new"):
            for file in self._directory.glob(pattern):
                file.unlink()

    def describe(self) -> list[Metric]:
        """Nothing: what there is depends on the files."""
        return []

    def collect(self) -> Iterator[Metric]:
        """The metrics of all processes, ended ones included."""
        with self._lock:
            self._fold_all()
            collected = list(_MultiProcessCollector(None, str(self._directory)).collect())
            self._shown = _never_fall(collected, self._shown)
        return iter(collected)

    def put(self, process: str, files: Mapping[str, bytes]) -> None:
        """The files of a process on another machine, each whole, by the names and with the pids that they have there.

        ``process`` ends in ``-`` and its pid. Raises OSError.
        """
        own_pid = process.rpartition("-")[2]
        for name, data in files.items():
            found = _FILE.fullmatch(name)
            used = int.from_bytes(data[: _HEAD_BYTES // 2], "little")
            if found is None or len(data) < _HEAD_BYTES or used != len(data):
                continue  # user code may put there what it likes, and one bad file would spoil the page
            kind, pid = found.groups()
            owner = process if pid == own_pid else f"{process}-{pid}"
            fresh = self._directory / f"{kind}_{owner}.new"
            fresh.write_bytes(data)
            fresh.replace(fresh.with_suffix(".db"))

    def hide(self, process: str) -> None:
        """Take its live gauges off the page; its totals stay."""
        with self._lock:
            self._hide(process)

    def retire(self, process: str) -> None:
        """Fold the files of an ended process; its live gauges vanish. Doing it twice is harmless.

        On a full disk its totals stay in its own files, and are folded at a later scrape.
        """
        with self._lock:
            self._hide(process)
            self._unfolded[process] = None
            self._fold_all()

    def _fold_all(self) -> None:
        while self._unfolded:
            process = next(iter(self._unfolded))
            try:
                for kind in _SUMMED:
                    for file in self._of(process, kind):
                        self._fold(kind, file)
                self._forget_old_backends()
            except OSError as error:
                waiting = len(self._unfolded)
                self._no_room.log(time.monotonic(), "metrics_not_folded", reason=str(error), waiting=waiting)
                return
            del self._unfolded[process]

    def _hide(self, process: str) -> None:
        for file in self._of(process, "gauge_*"):
            file.unlink()

    def _of(self, process: str, kind: str) -> list[Path]:
        """Its files, and those of what it has forked."""
        return [
            file
            for pattern in (f"{kind}_{process}.db", f"{kind}_{process}-*.db")
            for file in self._directory.glob(pattern)
        ]

    def _retired(self, kind: str) -> Path:
        return self._directory / f"{kind}_{RETIRED}.db"

    def _fold(self, kind: str, file: Path) -> None:
        values = list(_MmapedDict.read_all_values_from_file(str(file)))
        retired = AllocatedDict(str(self._retired(kind)), is_strict=True)
        try:
            for key, _value, _timestamp, _at in values:
                retired.read_value(key)  # makes room for it, so that adding below cannot end half-way
            for key, value, _timestamp, _at in values:
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
    kept = AllocatedDict(str(fresh), is_strict=True)
    try:
        for key, value, _timestamp, _at in _MmapedDict.read_all_values_from_file(str(file)):
            if json.loads(key)[2].get(_BACKEND) not in forgotten:
                kept.write_value(key, value, 0.0)
    finally:
        kept.close()
    fresh.replace(file)

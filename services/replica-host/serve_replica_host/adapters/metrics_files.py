"""The host's view of prometheus_client's multiprocess files: served as one, and kept few.

Why: each replica process leaves files behind that are read at every scrape, for ever, and deleting them would make
counters fall. So the files of an ended process are folded into one file per kind, ``…_retired.db``.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, final

from prometheus_client import CollectorRegistry, Metric, mmap_dict, multiprocess
from prometheus_client.registry import Collector

# The library's own types are missing here.
_MmapedDict: Final[Any] = mmap_dict.MmapedDict
_MultiProcessCollector: Final[Any] = multiprocess.MultiProcessCollector

RETIRED: Final = "retired"
_SUMMED: Final = ("counter", "histogram", "summary")


@final
class MetricsFiles(Collector):
    """One multiprocess directory. Methods may be called from any thread; they block on files."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        """A scrape in the middle of folding would count an ended process twice, or not at all."""

    def clean(self) -> None:
        """Make the directory empty of what an earlier life left, and make it if it is missing."""
        self._directory.mkdir(parents=True, exist_ok=True)
        for file in self._directory.glob("*.db"):
            file.unlink()

    def registry(self) -> CollectorRegistry:
        """A registry that collects all processes' metrics."""
        registry = CollectorRegistry()
        registry.register(self)
        return registry

    def describe(self) -> list[Metric]:
        """Nothing: what there is depends on the files."""
        return []

    def collect(self) -> Iterator[Metric]:
        """The metrics of all processes, ended ones included."""
        with self._lock:
            collected = list(_MultiProcessCollector(None, str(self._directory)).collect())
        return iter(collected)

    def retire(self, pid: int) -> None:
        """Fold the files of the ended process ``pid``; its live gauges vanish. Doing it twice is harmless."""
        with self._lock:
            for kind in _SUMMED:
                self._fold(kind, self._directory / f"{kind}_{pid}.db")
            for file in self._directory.glob(f"gauge_*_{pid}.db"):
                file.unlink()

    def _fold(self, kind: str, file: Path) -> None:
        if not file.exists():
            return
        retired = _MmapedDict(str(self._directory / f"{kind}_{RETIRED}.db"))
        try:
            for key, value, _timestamp, _at in _MmapedDict.read_all_values_from_file(str(file)):
                total, _ = retired.read_value(key)
                retired.write_value(key, total + value, 0.0)
        finally:
            retired.close()
        file.unlink()

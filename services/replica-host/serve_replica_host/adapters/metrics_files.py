"""The host's collector of prometheus_client's multiprocess files: merged into one page, and folded when processes end.

Why each file is validated: replicas write them, so user code may put anything there, and one bad file would break the
page, or exhaust the host's memory. A file that is not regular, is too large or has metrics that replicas may not export
is left out and counted. It is read completely before it is validated; never mapped, because its owner may truncate it.

Why the totals of ended processes are kept here: their files would be read at every scrape, forever, and deleting them
would make counters decrease.

Why no counter may decrease at all: to Prometheus a lower value is a counter reset, and the whole of it counts as an
increase. Sums of the same fractions in another order differ in their last digit, and folding changes the order; so a
counter never goes below the value exported before.

A process is identified by its name in the names of its files: its pid, prefixed with its machine if that is another
one. Any text without an underscore would do.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import stat
import struct
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Final, NamedTuple, final

import structlog
from prometheus_client import Metric, multiprocess
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from serve_common.telemetry.catalogue import CATALOGUE
from serve_common.telemetry.catalogue.specs import Exporter
from serve_common.telemetry.log_lines import RateLimitedLogger

_log = structlog.get_logger(__name__)

# The library's own types are missing here.
_accumulate: Final[Any] = multiprocess.MultiProcessCollector._accumulate_metrics  # noqa: SLF001 - no public API

BACKENDS_MAX: Final = 500
"""Backends without a process whose totals are kept; beyond it those whose replicas ended first are dropped."""
RETIRED_MAX: Final = 100_000
"""Maximum totals of ended processes, for each kind of file."""
FILES_MAX: Final = 20_000
FILE_BYTES_MAX: Final = 4 * 1024 * 1024
"""Maximum size of one file; a replica without user metrics has some 10 kB."""
PAGE_BYTES_MAX: Final = 64 * 1024 * 1024
"""Maximum size of all files together; the largest are left out first."""
_KEYS_MAX: Final = 50_000
_NAME_LENGTH_MAX: Final = 200
_TEXT_LENGTH_MAX: Final = 2_000
_LABELS_MAX: Final = 32
_SUMMED: Final = ("counter", "histogram", "summary")
_BACKEND: Final = "backend_tag"
_FILE: Final = re.compile(
    r"(counter|histogram|summary|gauge_[a-z]{1,20})_([A-Za-z0-9-]{1,120})\.db", re.ASCII
)
"""File names of prometheus_client."""
_NAME: Final = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*", re.ASCII)
_LABEL: Final = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*", re.ASCII)
_HEAD_BYTES: Final = 8
"""Size of a file's header: the number of used bytes, and padding."""
_WARN_INTERVAL_S: Final = 60.0

_OWN_NAMES: Final = frozenset(
    name
    for spec in CATALOGUE
    if Exporter.HOST in spec.exporters and Exporter.REPLICA not in spec.exporters
    for name in (spec.name, spec.family, *spec.series)
)
"""Metrics of the host itself, which no replica may export."""

_ExportedValues = dict[tuple[str, frozenset[tuple[str, str]]], float]


class _MalformedFile(ValueError):
    """The file is malformed."""


class _InvalidKey(ValueError):
    """One entry of a file cannot be exported."""


class _Key(NamedTuple):
    metric: str
    name: str
    labels: tuple[tuple[str, str], ...]
    text: str


class _Value(NamedTuple):
    key: _Key
    value: float
    timestamp: float


class _File(NamedTuple):
    path: Path
    kind: str
    """Such as ``counter`` or ``gauge_livesum``."""
    process: str
    size: int


@final
class RemoteFiles:
    """Stores the files of processes on other machines beside those written locally.

    Methods may be called from any thread; they block on files.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def put(self, process: str, files: Mapping[str, bytes]) -> None:
        """Store the complete files of a process, by the names that they have there.

        ``process`` ends in ``-`` and its pid. Raises OSError.
        """
        own_pid = process.rpartition("-")[2]
        for name, data in files.items():
            found = _FILE.fullmatch(name)
            used = int.from_bytes(data[: _HEAD_BYTES // 2], "little")
            if found is None or len(data) < _HEAD_BYTES or used != len(data):
                continue
            kind, pid = found.groups()
            owner = process if pid == own_pid else f"{process}-{pid}"
            fresh = self._directory / f"{kind}_{owner}.new"
            fresh.write_bytes(data)
            fresh.replace(fresh.with_suffix(".db"))

    def hide(self, process: str) -> None:
        """Remove the live gauges of a process from the page; its totals stay."""
        for file in _files(self._directory):
            if _belongs_to(file, process) and file.kind not in _SUMMED:
                file.path.unlink(missing_ok=True)


@final
class MetricsFiles(Collector):
    """One multiprocess directory. Methods may be called from any thread; they block on files."""

    def __init__(self, directory: Path, backends_max: int = BACKENDS_MAX) -> None:
        self._directory = directory
        self._backends_max = backends_max
        self.left_out = 0
        """Files left out of the last scrape, completely or in part."""
        self._lock = threading.Lock()
        """A scrape while files are folded would count an ended process twice, or not at all."""
        self._exported: _ExportedValues = {}
        """Values of counters and histograms at the last scrape."""
        self._retired: dict[str, dict[_Key, float]] = {}
        """Totals of ended processes, by kind of file, in the order of their first folding."""
        self._keys: dict[bytes, _Key | _InvalidKey] = {}
        """Cache of parsed keys, because they are the same at each scrape."""
        self._left_out_logger = RateLimitedLogger(_log.warning, _WARN_INTERVAL_S)

    def clean(self) -> None:
        """Create the directory, and remove files that an earlier process of the host left."""
        self._directory.mkdir(parents=True, exist_ok=True)
        for pattern in ("*.db", "*.new"):
            for file in self._directory.glob(pattern):
                # Something else than a file was not left by a replica, and must not keep the host from starting.
                with contextlib.suppress(OSError):
                    file.unlink()

    def describe(self) -> list[Metric]:
        """Nothing: the metrics depend on the files."""
        return []

    def collect(self) -> Iterator[Metric]:
        """The metrics of all processes, ended ones included."""
        with self._lock:
            collected, self.left_out = self._read_all()
            self._exported = _keep_monotonic(collected, self._exported)
        return iter(collected)

    def retire(self, process: str) -> None:
        """Fold the files of an ended process into totals; its live gauges are removed. Idempotent."""
        with self._lock:
            for file in _files(self._directory):
                if _belongs_to(file, process):
                    if file.kind in _SUMMED:
                        self._fold(file)
                    file.path.unlink(missing_ok=True)
            self._forget_old_backends()

    def _read_all(self) -> tuple[list[Metric], int]:
        metrics: dict[str, Metric] = {}
        for kind, totals in self._retired.items():
            for key, total in totals.items():
                _add(metrics, kind, "", _Value(key, total, 0.0))
        left_out, budget_bytes = 0, PAGE_BYTES_MAX
        for file in sorted(_files(self._directory), key=lambda file: file.size):
            values, why = (
                self._read(file) if file.size <= budget_bytes else ([], "too large beside all others")
            )
            if why:
                left_out += 1
                self._left_out_logger.log(
                    time.monotonic(), "metrics_left_out", file=file.path.name, reason=why[:500]
                )
            budget_bytes -= file.size if values else 0
            for value in values:
                _add(metrics, file.kind, file.process, value)
        return list(_accumulate(metrics, True)), left_out  # noqa: FBT003 - the library's call

    def _read(self, file: _File) -> tuple[list[_Value], str]:
        """The values that can be exported, and why others cannot; empty when all can."""
        values: list[_Value] = []
        why = ""
        try:
            for encoded, value, timestamp in _entries(_used_bytes(file.path)):
                key = self._key(encoded)
                if isinstance(key, _InvalidKey):
                    why = str(key)
                elif file.kind in _SUMMED and not math.isfinite(value):
                    why = f"{key.name} is {value}"
                else:
                    values.append(_Value(key, value, timestamp))
        except FileNotFoundError:
            return [], ""  # its gauges were just hidden
        except (OSError, _MalformedFile) as error:
            return [], str(error)
        return values, why

    def _key(self, encoded: bytes) -> _Key | _InvalidKey:
        known = self._keys.get(encoded)
        if known is None:
            try:
                known = _parse_key(encoded)
            except _InvalidKey as error:
                known = error.with_traceback(None)
            if len(self._keys) >= _KEYS_MAX:
                self._keys.clear()
            self._keys[encoded] = known
        return known

    def _fold(self, file: _File) -> None:
        values, _ = self._read(file)
        totals = self._retired.setdefault(file.kind, {})
        for key, value, _timestamp in values:
            if key in totals or len(totals) < RETIRED_MAX:
                totals[key] = totals.get(key, 0.0) + value

    def _forget_old_backends(self) -> None:
        # In the order in which they were folded in for the first time.
        ended = dict.fromkeys(_backends_in(self._retired.get("counter", {})))
        if len(ended) <= self._backends_max:
            return
        for file in _files(self._directory):
            values, _ = self._read(file)
            for backend_tag in _backends_in(value.key for value in values):
                ended.pop(backend_tag, None)
        # Drops some more than necessary, because each time all files are read.
        forgotten = set(list(ended)[: max(0, len(ended) - self._backends_max * 9 // 10)])
        for totals in self._retired.values():
            for key in [key for key in totals if dict(key.labels).get(_BACKEND) in forgotten]:
                del totals[key]


def _files(directory: Path) -> list[_File]:
    """Files with a valid name; none if the directory does not exist."""
    found = []
    try:
        with os.scandir(directory) as entries:
            for entry in islice(entries, FILES_MAX):
                name = _FILE.fullmatch(entry.name)
                if name is not None:
                    size = entry.stat(follow_symlinks=False).st_size
                    found.append(_File(Path(entry.path), name[1], name[2], size))
    except FileNotFoundError:
        pass  # or a file in it was just removed
    return found


def _belongs_to(file: _File, process: str) -> bool:
    """True when ``file`` is of ``process``, or of a fork of it."""
    return file.process == process or file.process.startswith(f"{process}-")


def _used_bytes(path: Path) -> bytes:
    """The used part of a file. Raises OSError or `_MalformedFile`."""
    # A pipe would block, and a symlink could lead to files that replicas may not read.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:  # noqa: PTH123 - a descriptor
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise _MalformedFile("no plain file")
        head = file.read(_HEAD_BYTES)
        if not any(head):
            return b""  # it is being created
        (used,) = struct.unpack_from("i", head) if len(head) == _HEAD_BYTES else (-1,)
        if not _HEAD_BYTES <= used <= FILE_BYTES_MAX:
            raise _MalformedFile(f"{used} bytes are in use")
        data = head + file.read(used - _HEAD_BYTES)
    if len(data) != used:
        raise _MalformedFile("cut off")
    return data


def _entries(data: bytes) -> Iterator[tuple[bytes, float, float]]:
    """Key, value and timestamp of each entry, in prometheus_client's ``mmap_dict`` format. Raises `_MalformedFile`."""
    at = _HEAD_BYTES
    while at < len(data):
        if at + 4 > len(data):
            raise _MalformedFile("cut off")
        (length,) = struct.unpack_from("i", data, at)
        padded = length + 8 - (length + 4) % 8
        if not 0 < length <= _TEXT_LENGTH_MAX * 8 or at + 4 + padded + 16 > len(data):
            raise _MalformedFile("a key is too long")
        value, timestamp = struct.unpack_from("dd", data, at + 4 + padded)
        yield data[at + 4 : at + 4 + length], value, timestamp
        at += 4 + padded + 16


def _parse_key(encoded: bytes) -> _Key:
    """Decode and validate a key. Raises `_InvalidKey`."""
    try:
        metric, name, labels, text = json.loads(encoded)
        json.dumps([labels, text], ensure_ascii=False).encode()
    except (ValueError, TypeError, RecursionError) as error:
        raise _InvalidKey(f"a key is unreadable: {error}") from None
    for part in (metric, name):
        if not _is_name(_NAME, part):
            raise _InvalidKey(f"{part!r:.100} is no name of a metric")
        if part in _OWN_NAMES:
            raise _InvalidKey(f"{part} is the host's own")
    if not (isinstance(text, str) and len(text) <= _TEXT_LENGTH_MAX):
        raise _InvalidKey(f"{name} has an unfit help text")
    if not (isinstance(labels, dict) and len(labels) <= _LABELS_MAX):
        raise _InvalidKey(f"{name} has unfit labels")
    for label, value in labels.items():
        if not (_is_name(_LABEL, label) and isinstance(value, str) and len(value) <= _TEXT_LENGTH_MAX):
            raise _InvalidKey(f"{name} has an unfit label {label!r:.100}")
    if "le" in labels:
        try:
            float(labels["le"])
        except ValueError:
            raise _InvalidKey(f"a bucket of {name} has no number") from None
    return _Key(metric, name, tuple(sorted(labels.items())), text)


def _is_name(pattern: re.Pattern[str], text: object) -> bool:
    return isinstance(text, str) and len(text) <= _NAME_LENGTH_MAX and pattern.fullmatch(text) is not None


def _add(metrics: dict[str, Metric], kind: str, process: str, value: _Value) -> None:
    """Add a sample, as prometheus_client's collector does before it accumulates."""
    key = value.key
    type_, _, mode = kind.partition("_")
    metric = metrics.get(key.metric)
    if metric is None:
        metric = metrics[key.metric] = Metric(key.metric, key.text, type_)
    labels: Any = key.labels  # pairs, until all are summed
    if type_ == "gauge":
        untyped: Any = metric
        untyped._multiprocess_mode = mode  # noqa: SLF001 - where the collector looks
        labels = (*key.labels, ("pid", process))
        metric.add_sample(key.name, labels, value.value, value.timestamp)
    else:
        metric.add_sample(key.name, labels, value.value)


def _keep_monotonic(collected: Iterable[Metric], shown: _ExportedValues) -> _ExportedValues:
    """Raise values that are lower than at the last scrape to those; returns the values exported now."""
    now: _ExportedValues = {}
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


def _backends_in(keys: Iterable[_Key]) -> Iterator[str]:
    for key in keys:
        backend_tag = dict(key.labels).get(_BACKEND)
        if backend_tag is not None:
            yield backend_tag

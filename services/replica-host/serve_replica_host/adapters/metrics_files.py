"""The host's view of prometheus_client's multiprocess files: served as one, and kept few.

Why each file is checked: replicas write them, so user code may put there what it likes, and one bad file would spoil
the page, or take the host's memory. A file that is no plain file, is too large or holds what no replica may say is left
out and counted. It is read as a whole before it is judged; never mapped, for whoever owns a file may cut it off.

Why the totals of ended processes are kept here: their files would be read at every scrape, for ever, and deleting them
would make counters fall.

Why no counter may fall by anything: to Prometheus a lower value is a counter that began anew, and the whole of it
counts as an increase. Sums of the same fractions in another order differ in their last digit, and folding changes the
order; so what was shown is never undercut.

A process is known by its name in the names of its files: by its pid, and if it is on another machine by that machine
and its pid. Any text without an underscore would do.
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

from serve_common.telemetry.catalogue import CATALOGUE, Exporter
from serve_common.telemetry.log_lines import RateLimitedLogger

_log = structlog.get_logger(__name__)

# The library's own types are missing here.
_accumulate: Final[Any] = multiprocess.MultiProcessCollector._accumulate_metrics  # noqa: SLF001 - there is no public way

BACKENDS_MAX: Final = 500
"""Backends without a process whose totals are kept; beyond it those go whose replicas ended first."""
RETIRED_MAX: Final = 100_000
"""Totals of ended processes."""
FILES_MAX: Final = 20_000
FILE_BYTES_MAX: Final = 4 * 1024 * 1024
"""A replica of ours alone has some 10 kB."""
PAGE_BYTES_MAX: Final = 64 * 1024 * 1024
"""Of all files together; the largest are left out first."""
_KEYS_MAX: Final = 50_000
_NAME_LENGTH_MAX: Final = 200
_TEXT_LENGTH_MAX: Final = 2_000
_LABELS_MAX: Final = 32
_SUMMED: Final = ("counter", "histogram", "summary")
_BACKEND: Final = "backend_tag"
_FILE: Final = re.compile(
    r"(counter|histogram|summary|gauge_[a-z]{1,20})_([A-Za-z0-9-]{1,120})\.db", re.ASCII
)
"""As prometheus_client names them."""
_NAME: Final = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*", re.ASCII)
_LABEL: Final = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*", re.ASCII)
_HEAD_BYTES: Final = 8
"""Of such a file: how many bytes are used, and as many for nothing."""
_SAID_EVERY_S: Final = 60.0

_OWN_NAMES: Final = frozenset(
    name
    for spec in CATALOGUE
    if Exporter.HOST in spec.exporters and Exporter.REPLICA not in spec.exporters
    for name in (spec.name, spec.family, *spec.series)
)
"""What the host says of itself, and no replica may say."""

_Shown = dict[tuple[str, frozenset[tuple[str, str]]], float]


class _Unfit(ValueError):
    """A file that a replica of ours did not write so."""


class _UnfitKey(ValueError):
    """One entry that does not fit on the page."""


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
    """``counter``, ``gauge_livesum``, …"""
    process: str
    size: int


@final
class RemoteFiles:
    """Where the runtime puts the files of processes on other machines, beside those that are written here.

    Methods may be called from any thread; they block on files.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def put(self, process: str, files: Mapping[str, bytes]) -> None:
        """The files of a process, each whole, by the names and with the pids that they have there.

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
        """Take its live gauges off the page; its totals stay."""
        for file in _files(self._directory):
            if _is_of(file, process) and file.kind not in _SUMMED:
                file.path.unlink(missing_ok=True)


@final
class MetricsFiles(Collector):
    """One multiprocess directory. Methods may be called from any thread; they block on files."""

    def __init__(self, directory: Path, backends_max: int = BACKENDS_MAX) -> None:
        self._directory = directory
        self._backends_max = backends_max
        self.left_out = 0
        """Files of which something was not shown at the last scrape."""
        self._lock = threading.Lock()
        """A scrape in the middle of folding would count an ended process twice, or not at all."""
        self._shown: _Shown = {}
        """By counters and histograms at the last scrape."""
        self._retired: dict[str, dict[_Key, float]] = {}
        """Totals of ended processes, by kind of file; those that came first are first."""
        self._keys: dict[bytes, _Key | _UnfitKey] = {}
        """What was found of each, for they are the same at each scrape."""
        self._said_left_out = RateLimitedLogger(_log.warning, _SAID_EVERY_S)

    def clean(self) -> None:
        """Make the directory empty of what an earlier life left, and make it if it is missing."""
        self._directory.mkdir(parents=True, exist_ok=True)
        for pattern in ("*.db", "*.new"):
            for file in self._directory.glob(pattern):
                # What is no file was not left by a replica of ours, and must not keep the host from starting.
                with contextlib.suppress(OSError):
                    file.unlink()

    def describe(self) -> list[Metric]:
        """Nothing: what there is depends on the files."""
        return []

    def collect(self) -> Iterator[Metric]:
        """The metrics of all processes, ended ones included."""
        with self._lock:
            collected, self.left_out = self._read_all()
            self._shown = _never_fall(collected, self._shown)
        return iter(collected)

    def retire(self, process: str) -> None:
        """Fold the files of an ended process; its live gauges vanish. Doing it twice is harmless."""
        with self._lock:
            for file in _files(self._directory):
                if _is_of(file, process):
                    if file.kind in _SUMMED:
                        self._fold(file)
                    file.path.unlink(missing_ok=True)
            self._forget_old_backends()

    def _read_all(self) -> tuple[list[Metric], int]:
        metrics: dict[str, Metric] = {}
        for kind, totals in self._retired.items():
            for key, total in totals.items():
                _add(metrics, kind, "", _Value(key, total, 0.0))
        left_out, room = 0, PAGE_BYTES_MAX
        for file in sorted(_files(self._directory), key=lambda file: file.size):
            values, why = self._read(file) if file.size <= room else ([], "too large beside all others")
            if why:
                left_out += 1
                self._said_left_out.log(
                    time.monotonic(), "metrics_left_out", file=file.path.name, reason=why[:500]
                )
            room -= file.size if values else 0
            for value in values:
                _add(metrics, file.kind, file.process, value)
        return list(_accumulate(metrics, True)), left_out  # noqa: FBT003 - the library's call

    def _read(self, file: _File) -> tuple[list[_Value], str]:
        """What may be shown of it, and why something may not be; empty when all may."""
        values: list[_Value] = []
        why = ""
        try:
            for encoded, value, timestamp in _entries(_used_bytes(file.path)):
                key = self._key(encoded)
                if isinstance(key, _UnfitKey):
                    why = str(key)
                elif file.kind in _SUMMED and not math.isfinite(value):
                    why = f"{key.name} is {value}"
                else:
                    values.append(_Value(key, value, timestamp))
        except FileNotFoundError:
            return [], ""  # its gauges were hidden at this moment
        except (OSError, _Unfit) as error:
            return [], str(error)
        return values, why

    def _key(self, encoded: bytes) -> _Key | _UnfitKey:
        known = self._keys.get(encoded)
        if known is None:
            try:
                known = _parse_key(encoded)
            except _UnfitKey as error:
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
        # Some more than must go, for each time all is looked at.
        forgotten = set(list(ended)[: max(0, len(ended) - self._backends_max * 9 // 10)])
        for totals in self._retired.values():
            for key in [key for key in totals if dict(key.labels).get(_BACKEND) in forgotten]:
                del totals[key]


def _files(directory: Path) -> list[_File]:
    """Plain files with a name that one of ours could have; a directory that is not there has none."""
    found = []
    try:
        with os.scandir(directory) as entries:
            for entry in islice(entries, FILES_MAX):
                name = _FILE.fullmatch(entry.name)
                if name is not None:
                    size = entry.stat(follow_symlinks=False).st_size
                    found.append(_File(Path(entry.path), name[1], name[2], size))
    except FileNotFoundError:
        pass  # or a file of it, which is gone
    return found


def _is_of(file: _File, process: str) -> bool:
    """Of the process, or of what it has forked."""
    return file.process == process or file.process.startswith(f"{process}-")


def _used_bytes(path: Path) -> bytes:
    """What is used of the file, as a whole. Raises OSError or `_Unfit`."""
    # A pipe would keep us waiting, and a link would lead to what replicas may not read.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:  # noqa: PTH123 - a descriptor
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise _Unfit("no plain file")
        head = file.read(_HEAD_BYTES)
        if not any(head):
            return b""  # it is being made at this moment
        (used,) = struct.unpack_from("i", head) if len(head) == _HEAD_BYTES else (-1,)
        if not _HEAD_BYTES <= used <= FILE_BYTES_MAX:
            raise _Unfit(f"{used} bytes are in use")
        data = head + file.read(used - _HEAD_BYTES)
    if len(data) != used:
        raise _Unfit("cut off")
    return data


def _entries(data: bytes) -> Iterator[tuple[bytes, float, float]]:
    """Key, value and time of each; the format is in prometheus_client's ``mmap_dict``. Raises `_Unfit`."""
    at = _HEAD_BYTES
    while at < len(data):
        if at + 4 > len(data):
            raise _Unfit("cut off")
        (length,) = struct.unpack_from("i", data, at)
        padded = length + 8 - (length + 4) % 8
        if not 0 < length <= _TEXT_LENGTH_MAX * 8 or at + 4 + padded + 16 > len(data):
            raise _Unfit("a key is too long")
        value, timestamp = struct.unpack_from("dd", data, at + 4 + padded)
        yield data[at + 4 : at + 4 + length], value, timestamp
        at += 4 + padded + 16


def _parse_key(encoded: bytes) -> _Key:
    """Raises `_UnfitKey`."""
    try:
        metric, name, labels, text = json.loads(encoded)
        json.dumps([labels, text], ensure_ascii=False).encode()
    except (ValueError, TypeError, RecursionError) as error:
        raise _UnfitKey(f"a key is unreadable: {error}") from None
    for part in (metric, name):
        if not _is_name(_NAME, part):
            raise _UnfitKey(f"{part!r:.100} is no name of a metric")
        if part in _OWN_NAMES:
            raise _UnfitKey(f"{part} is the host's own")
    if not (isinstance(text, str) and len(text) <= _TEXT_LENGTH_MAX):
        raise _UnfitKey(f"{name} has an unfit help text")
    if not (isinstance(labels, dict) and len(labels) <= _LABELS_MAX):
        raise _UnfitKey(f"{name} has unfit labels")
    for label, value in labels.items():
        if not (_is_name(_LABEL, label) and isinstance(value, str) and len(value) <= _TEXT_LENGTH_MAX):
            raise _UnfitKey(f"{name} has an unfit label {label!r:.100}")
    if "le" in labels:
        try:
            float(labels["le"])
        except ValueError:
            raise _UnfitKey(f"a bucket of {name} has no number") from None
    return _Key(metric, name, tuple(sorted(labels.items())), text)


def _is_name(pattern: re.Pattern[str], text: object) -> bool:
    return isinstance(text, str) and len(text) <= _NAME_LENGTH_MAX and pattern.fullmatch(text) is not None


def _add(metrics: dict[str, Metric], kind: str, process: str, value: _Value) -> None:
    """As prometheus_client's collector gathers what it then accumulates."""
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


def _backends_in(keys: Iterable[_Key]) -> Iterator[str]:
    for key in keys:
        backend_tag = dict(key.labels).get(_BACKEND)
        if backend_tag is not None:
            yield backend_tag

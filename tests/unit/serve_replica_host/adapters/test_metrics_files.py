"""Metrics of ended replica processes: totals stay, files and live gauges do not."""

from __future__ import annotations

import json
import os
import random
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.mmap_dict import MmapedDict, mmap_key

from serve_replica_host.adapters import metrics_files
from serve_replica_host.adapters.metrics_files import MetricsFiles
from tests.support.servers.small_disk import SmallDisk


def _write(
    file: Path, name: str, values: dict[str, float], metric: str | None = None, label: str = "code"
) -> None:
    stored = MmapedDict(str(file))
    for label_value, value in values.items():
        stored.write_value(mmap_key(metric or name, name, [label], [label_value], "Help"), value, 0.0)
    stored.close()


def _run(source: str, directory: Path, *arguments: str) -> str:
    """What a Python process with these files of metrics prints."""
    return subprocess.run(
        [sys.executable, "-c", source, *arguments],
        env={"PROMETHEUS_MULTIPROC_DIR": str(directory)},
        check=True,
        capture_output=True,
        text=True,
    ).stdout


def _process(directory: Path, pid: int, requests: float) -> None:
    _write(directory / f"counter_{pid}.db", "requests_total", {"200": requests, "500": 1.0})
    _write(directory / f"histogram_{pid}.db", "seconds_sum", {"200": requests / 2}, metric="seconds")
    _write(directory / f"gauge_livesum_{pid}.db", "in_flight", {"a": 3.0})


def _values(files: MetricsFiles) -> dict[tuple[str, str], float]:
    return {
        (sample.name, sample.labels.get("code", "")): sample.value
        for metric in files.collect()
        for sample in metric.samples
    }


def test_folding_keeps_totals_and_drops_live_gauges(tmp_path: Path) -> None:
    files = MetricsFiles(tmp_path)
    _process(tmp_path, 11, 5.0)
    _process(tmp_path, 12, 7.0)
    before = _values(files)

    files.retire("11")
    files.retire("11")
    after = _values(files)

    assert before[("requests_total", "200")] == after[("requests_total", "200")] == 12.0
    assert before[("seconds_sum", "200")] == after[("seconds_sum", "200")] == 6.0
    assert (before[("in_flight", "a")], after[("in_flight", "a")]) == (6.0, 3.0)


def test_however_many_processes_end_no_file_stays(tmp_path: Path) -> None:
    files = MetricsFiles(tmp_path)
    for pid in range(1, 51):
        _process(tmp_path, pid, 1.0)
        files.retire(str(pid))

    assert list(tmp_path.iterdir()) == []
    assert _values(files)[("requests_total", "200")] == 50.0


def test_a_pid_that_comes_again_goes_on_counting(tmp_path: Path) -> None:
    files = MetricsFiles(tmp_path)
    for _ in range(2):
        _process(tmp_path, 11, 5.0)
        files.retire("11")
    _process(tmp_path, 11, 1.0)

    assert _values(files)[("requests_total", "200")] == 11.0


def test_cleaning_removes_what_an_earlier_life_left_and_makes_the_directory(tmp_path: Path) -> None:
    directory = tmp_path / "a" / "metrics"
    files = MetricsFiles(directory)
    files.clean()
    _process(directory, 11, 5.0)

    files.clean()

    assert list(directory.iterdir()) == []
    assert _values(files) == {}


_REPLICA = """
from serve_replica_host.adapters.replica_metrics import make_replica_metrics
from serve_replica_host.ports import Occupancy
metrics = make_replica_metrics("default/app")
for seconds in (0.0005, 0.02, 90.0):
    metrics.count_response(200, seconds)
metrics.count_response(500, 0.02)
metrics.count_refused("busy")
metrics.turn()
metrics.write(Occupancy(in_flight=4, ongoing_s=10.0))
metrics.count_response(200, 0.001)
metrics.turn()
metrics.write(Occupancy(in_flight=2, limit=8, waiting=1, streams=1, sockets=1, is_connected=True, ongoing_s=12.5))
"""
_HOST = """
import sys
from pathlib import Path
from prometheus_client import generate_latest
from serve_common.runtime.health import LoopLag
from serve_common.protocol.reports import ReplicaStatus
from serve_replica_host.adapters.host_metrics import PrometheusHostMetrics
from serve_replica_host.adapters import metrics_files
from serve_replica_host.adapters.metrics_files import MetricsFiles
metrics = PrometheusHostMetrics(
    MetricsFiles(Path(sys.argv[1])), "host-1", LoopLag(), {"control": lambda: True}
)
metrics.show_replicas({ReplicaStatus.RUNNING: 2})
metrics.count_reconnect()
metrics.count_start("default/app", 0.2, was_spare=True)
metrics.count_failure("default/app", ReplicaStatus.DEAD)
sys.stdout.write(generate_latest(metrics.registry).decode())
"""


def test_the_host_serves_what_replicas_and_itself_counted(tmp_path: Path) -> None:
    _run(_REPLICA, tmp_path)
    page = _run(_HOST, tmp_path, str(tmp_path))

    lines = page.splitlines()
    for expected in (
        'serve_replica_requests_total{backend_tag="default/app",code="200"} 4.0',
        'serve_replica_requests_total{backend_tag="default/app",code="500"} 1.0',
        'serve_replica_refused_total{backend_tag="default/app",reason="busy"} 1.0',
        'serve_replica_in_flight_requests{backend_tag="default/app"} 2.0',
        'serve_replica_request_seconds_bucket{backend_tag="default/app",le="0.001"} 2.0',
        'serve_replica_request_seconds_bucket{backend_tag="default/app",le="0.025"} 4.0',
        'serve_replica_request_seconds_bucket{backend_tag="default/app",le="+Inf"} 5.0',
        'serve_replica_request_seconds_count{backend_tag="default/app"} 5.0',
        'serve_host_replicas{status="running"} 2.0',
        'serve_host_replicas{status="dead"} 0.0',
        "serve_host_nats_reconnects_total 1.0",
        'serve_replica_ongoing_seconds_total{backend_tag="default/app"} 12.5',
        'serve_replica_in_flight_limit{backend_tag="default/app"} 8.0',
        'serve_replica_waiting_requests{backend_tag="default/app"} 1.0',
        'serve_replica_streams{backend_tag="default/app"} 1.0',
        'serve_replica_websockets{backend_tag="default/app"} 1.0',
        'serve_replica_bus_connected{backend_tag="default/app"} 1.0',
        'serve_replica_nats_reconnects_total{backend_tag="default/app"} 0.0',
        'serve_host_info{host_id="host-1"} 1.0',
        'serve_bus_connected{connection="control"} 1.0',
        'serve_replica_start_seconds_bucket{backend_tag="default/app",kind="spare",le="0.25"} 1.0',
        'serve_replica_failures_total{backend_tag="default/app",reason="death"} 1.0',
    ):
        assert expected in lines, page


def test_counters_never_fall_by_the_rounding_of_sums_in_another_order(tmp_path: Path) -> None:
    files = MetricsFiles(tmp_path)
    shown = 0.0
    for pid in range(1, 30):
        _write(tmp_path / f"counter_{pid}.db", "requests_total", {"200": pid * 0.1})
        before = _values(files)[("requests_total", "200")]
        assert before >= shown
        files.retire(str(pid))
        shown = _values(files)[("requests_total", "200")]
        assert shown >= before


def test_backends_that_ended_long_ago_are_forgotten_and_those_that_run_are_not(tmp_path: Path) -> None:
    files = MetricsFiles(tmp_path, backends_max=10)

    def count(pid: int, backend_tag: str) -> None:
        _write(tmp_path / f"counter_{pid}.db", "a_total", {backend_tag: 1.0}, "a", "backend_tag")

    count(1000, "app/0")  # an old one that runs again
    for number in range(25):
        count(number + 1, f"app/{number}")
        files.retire(str(number + 1))

    left = {
        sample.labels["backend_tag"]: sample.value for metric in files.collect() for sample in metric.samples
    }
    assert left.pop("app/0") == 2.0
    assert len(left) <= 10
    assert {f"app/{number}" for number in range(20, 25)} <= set(left)


_USERS_CODE = """
from muster import metrics
hits = metrics.Counter("hits", "Hits.", tag_keys=("model",))  # as a module does when it is imported
sizes = metrics.Histogram("sizes", boundaries=[1, 10])
depth, newest = metrics.Gauge("depth"), metrics.Gauge("newest", aggregate="latest")
hits.inc(2, {"model": "a"})
sizes.observe(5)
depth.set(3)
newest.set(1)
from serve_replica_host.adapters.replica_metrics import make_replica_metrics
from serve_replica_host.ports import Occupancy
replica = make_replica_metrics("default/app")
replica.write(Occupancy(ongoing_s=0.0))
hits.inc(1, {"model": "a"})
newest.set(7)
replica.write(Occupancy(ongoing_s=1.5))
import os
print(os.getpid())
"""


def _samples(files: MetricsFiles) -> dict[str, float]:
    return {
        f"{sample.name}{sorted(sample.labels.items())}": sample.value
        for metric in files.collect()
        for sample in metric.samples
    }


def test_users_metrics_bear_the_backend_and_outlive_their_replica(tmp_path: Path) -> None:
    files = MetricsFiles(tmp_path)
    pids = [int(_run(_USERS_CODE, tmp_path)) for _ in range(2)]
    backend = ("backend_tag", "default/app")
    shown = _samples(files)
    assert shown[f"hits_total{[backend, ('model', 'a')]}"] == 6.0
    assert shown[f"sizes_bucket{[backend, ('le', '10.0')]}"] == 2.0
    assert shown[f"sizes_sum{[backend]}"] == 10.0
    assert shown[f"depth{[backend]}"] == 6.0
    assert shown[f"newest{[backend]}"] == 7.0
    assert shown[f"serve_replica_ongoing_seconds_total{[backend]}"] == 3.0

    files.retire(str(pids[0]))
    after = _samples(files)
    assert after[f"depth{[backend]}"] == 3.0
    for name in ("hits_total", "sizes_", "serve_replica_ongoing_seconds_total"):
        kept = {key: value for key, value in shown.items() if key.startswith(name)}
        assert kept
        assert kept == {key: value for key, value in after.items() if key.startswith(name)}


def test_two_deployments_that_use_one_name_for_two_things_do_not_break_the_page(tmp_path: Path) -> None:
    for pid, kind in enumerate(("counter", "histogram", "gauge_livesum"), start=1):
        _write(tmp_path / f"{kind}_{pid}.db", "mine", {"200": 1.0})
    registry = CollectorRegistry()
    registry.register(MetricsFiles(tmp_path))
    assert b"mine" in generate_latest(registry)


def _raw(*entries: tuple[bytes, float], used: int | None = None) -> bytes:
    """A file of metrics as anybody may write it."""
    body = b""
    for key, value in entries:
        padded = key + b" " * (8 - (len(key) + 4) % 8)
        body += struct.pack(f"i{len(padded)}sdd", len(key), padded, value, 0.0)
    return struct.pack("ii", len(body) + 8 if used is None else used, 0) + body


def _key(name: str = "mine", metric: object = None, labels: object = None, text: object = "Help") -> bytes:
    return json.dumps([metric or name, name, {} if labels is None else labels, text]).encode()


BAD_FILES = {
    "used_beyond_the_end": _raw((_key(), 1.0), used=2**30),
    "used_negative": _raw((_key(), 1.0), used=-8),
    "used_small": _raw((_key(), 1.0), used=3),
    "length_that_goes_back": struct.pack("iiiddd", 8 + 4 + 24, 0, -24, 0.0, 0.0, 0.0),
    "length_beyond_the_end": struct.pack("iii", 8 + 4, 0, 2**31 - 1),
    "no_json": _raw((b"{", 1.0)),
    "no_utf8": _raw((b"\xff\xfe", 1.0)),
    "deep_json": _raw((b"[" * 10_000, 1.0)),
    "three_parts": _raw((b'["a", "a", {}]', 1.0)),
    "a_number_for_a_name": _raw((b'[1, 2, {}, "h"]', 1.0)),
    "a_name_with_a_line_end": _raw((_key("a\nserve_host_info 5"), 1.0)),
    "labels_in_a_list": _raw((_key(labels=["a"]), 1.0)),
    "a_label_of_numbers": _raw((_key(labels={"a": 1}), 1.0)),
    "a_label_with_a_bad_name": _raw((_key(labels={'a="': "1"}), 1.0)),
    "a_half_of_a_character": _raw((_key(labels={"a": "\ud800"}), 1.0)),
    "too_many_labels": _raw((_key(labels={f"l{n}": "v" for n in range(100)}), 1.0)),
    "a_bucket_without_a_number": _raw((_key("mine_bucket", "mine", {"le": "x"}), 1.0)),
    "a_total_that_is_no_number": _raw((_key(), float("nan"))),
    "an_endless_total": _raw((_key(), float("inf"))),
    "what_the_host_says_of_itself": _raw((_key("serve_host_info", labels={"host_id": "host-2"}), 1.0)),
    "how_replicas_failed": _raw((_key("serve_replica_failures_total"), 1.0)),
}


@pytest.mark.parametrize("kind", ["counter", "histogram", "gauge_livesum"])
@pytest.mark.parametrize("bad", BAD_FILES.values(), ids=BAD_FILES.keys())
def test_a_file_that_no_replica_of_ours_writes_is_left_out_and_spoils_nothing(
    tmp_path: Path, bad: bytes, kind: str
) -> None:
    _process(tmp_path, 11, 5.0)
    (tmp_path / f"{kind}_12.db").write_bytes(bad)
    files = MetricsFiles(tmp_path)
    if kind.startswith("gauge") and bad in (
        BAD_FILES["a_total_that_is_no_number"],
        BAD_FILES["an_endless_total"],
    ):
        return  # gauges may be anything
    registry = CollectorRegistry()
    registry.register(files)

    page = generate_latest(registry).decode()

    assert 'requests_total{code="200"} 5.0' in page
    assert files.left_out == 1
    assert "host-2" not in page
    files.retire("12")
    assert _values(files)[("requests_total", "200")] == 5.0
    assert files.left_out == 0


def test_links_and_pipes_are_not_opened(tmp_path: Path) -> None:
    directory = tmp_path / "metrics"
    files = MetricsFiles(directory)
    files.clean()
    _write(tmp_path / "outside.db", "stolen", {"200": 1.0})
    (directory / "counter_1.db").symlink_to(tmp_path / "outside.db")
    os.mkfifo(directory / "counter_2.db")
    (directory / "counter_3.db").mkdir()

    assert _values(files) == {}
    assert files.left_out == 3


def test_files_take_no_more_memory_than_is_allowed_and_the_largest_go_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_files, "PAGE_BYTES_MAX", 200_000)
    _process(tmp_path, 11, 5.0)
    entries = [(_key(labels={"a": str(number)}), 1.0) for number in range(5_000)]
    (tmp_path / "counter_12.db").write_bytes(_raw(*entries))
    sparse = tmp_path / "counter_13.db"
    sparse.write_bytes(_raw(used=2**31 - 1))
    os.truncate(sparse, 2**31)
    files = MetricsFiles(tmp_path)

    assert _values(files)[("requests_total", "200")] == 5.0
    assert files.left_out == 2


def test_no_garbage_breaks_the_page(tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    _process(tmp_path, 11, 5.0)
    files = MetricsFiles(tmp_path)
    registry = CollectorRegistry()
    registry.register(files)
    good = bytearray((tmp_path / "counter_11.db").read_bytes()[:400])
    for _ in range(500):
        bad = bytearray(good)
        for _ in range(rng.randrange(1, 8)):
            bad[rng.randrange(len(bad))] = rng.choice((0, 255, 34, rng.randrange(256)))
        (tmp_path / "counter_12.db").write_bytes(bad[: rng.choice((len(bad), rng.randrange(len(bad))))])
        page = generate_latest(registry)
        assert b"in_flight" in page


# Numbers that a replica's process writes to mapped files, on a disk that is full: it lives, and none is lost.


_WRITER = """
import os, sys
from serve_common.names import BackendTag
from serve_replica_host.adapters.replica_metrics import make_replica_metrics
from serve_replica_host.ports import Occupancy

metrics = make_replica_metrics(BackendTag("default/a"))
for number, line in enumerate(sys.stdin):
    for status in range(200, 200 + int(line)):
        metrics.count_response(status, 0.1)
    metrics.turn()
    metrics.write(Occupancy(ongoing_s=float(number)))
    print(number, flush=True)
"""


@pytest.fixture
def disk() -> Iterator[SmallDisk]:
    with SmallDisk.mounted(2) as disk:
        yield disk


class Replica:
    """Counts answers when it is told to, and writes what it counted."""

    def __init__(self, directory: Path) -> None:
        environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(directory)}
        self.process = subprocess.Popen(
            [sys.executable, "-c", _WRITER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )

    def count(self, statuses: int) -> None:
        """One answer of each of so many statuses."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{statuses}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline(), f"ended with {self.process.wait()}"

    def end(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(60)
        self.process.stdout.close()


def counted(files: MetricsFiles) -> dict[str, float]:
    """Answers by status."""
    return {
        sample.labels["code"]: sample.value
        for metric in files.collect()
        for sample in metric.samples
        if sample.name == "serve_replica_requests_total"
    }


@pytest.mark.parametrize("is_full_at_start", [True, False])
def test_a_full_disk_ends_no_process_and_no_count_is_lost(disk: SmallDisk, is_full_at_start: bool) -> None:
    if is_full_at_start:
        disk.fill()
    replica, files = Replica(disk.root), MetricsFiles(disk.root)
    try:
        replica.count(1)
        disk.fill()
        for _ in range(3):
            replica.count(500)  # more than the first blocks hold
            counted(files)  # a scrape in between is whole
        disk.free()
        codes: dict[str, float] = {}
        while len(codes) < 500:  # moved within about a second
            replica.count(1)
            codes = counted(files)
        assert codes["201"] == 3
        assert codes["200"] >= 4
    finally:
        replica.end()


def test_totals_of_an_ended_process_need_no_room_and_are_counted_once(disk: SmallDisk) -> None:
    replica, files = Replica(disk.root), MetricsFiles(disk.root)
    try:
        replica.count(300)
    finally:
        replica.end()
    before = counted(files)
    disk.fill()

    for _ in range(3):
        files.retire(str(replica.process.pid))
        assert counted(files) == before
    assert not list(disk.root.glob("*.db"))
    assert len(before) == 300

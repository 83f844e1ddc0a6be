"""Metrics of ended replica processes: totals stay, files and live gauges do not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from prometheus_client.mmap_dict import MmapedDict, mmap_key

from serve_replica_host.adapters.metrics_files import MetricsFiles


def _write(file: Path, name: str, values: dict[str, float], metric: str | None = None) -> None:
    stored = MmapedDict(str(file))
    for label, value in values.items():
        stored.write_value(mmap_key(metric or name, name, ["code"], [label], "Help"), value, 0.0)
    stored.close()


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

    files.retire(11)
    files.retire(11)
    after = _values(files)

    assert before[("requests_total", "200")] == after[("requests_total", "200")] == 12.0
    assert before[("seconds_sum", "200")] == after[("seconds_sum", "200")] == 6.0
    assert (before[("in_flight", "a")], after[("in_flight", "a")]) == (6.0, 3.0)


def test_however_many_processes_end_the_number_of_files_stays_the_same(tmp_path: Path) -> None:
    files = MetricsFiles(tmp_path)
    for pid in range(1, 51):
        _process(tmp_path, pid, 1.0)
        files.retire(pid)

    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "counter_retired.db",
        "histogram_retired.db",
    ]
    assert _values(files)[("requests_total", "200")] == 50.0


def test_a_pid_that_comes_again_goes_on_counting(tmp_path: Path) -> None:
    files = MetricsFiles(tmp_path)
    for _ in range(2):
        _process(tmp_path, 11, 5.0)
        files.retire(11)
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
metrics = make_replica_metrics("default/app")
for seconds in (0.0005, 0.02, 90.0):
    metrics.count_answered(200, seconds)
metrics.count_answered(500, 0.02)
metrics.count_refused("busy")
metrics.write(4)
metrics.count_answered(200, 0.001)
metrics.write(2)
"""
_HOST = """
import sys
from pathlib import Path
from prometheus_client import generate_latest
from serve_common.wires.host import ReplicaStatus
from serve_replica_host.adapters.host_metrics import PrometheusHostMetrics
from serve_replica_host.adapters.metrics_files import MetricsFiles
metrics = PrometheusHostMetrics(MetricsFiles(Path(sys.argv[1])))
metrics.show_replicas({ReplicaStatus.RUNNING: 2})
metrics.count_reconnect()
sys.stdout.write(generate_latest(metrics.registry).decode())
"""


def test_the_host_serves_what_replicas_and_itself_counted(tmp_path: Path) -> None:
    environment = {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", _REPLICA], env=environment, check=True)
    host = subprocess.run(
        [sys.executable, "-c", _HOST, str(tmp_path)],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )

    lines = host.stdout.splitlines()
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
    ):
        assert expected in lines, host.stdout

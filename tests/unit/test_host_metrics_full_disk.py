"""Numbers that a replica's process writes to mapped files, on a disk that is full: it lives, and none is lost."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from serve_replica_host.adapters.metrics_files import MetricsFiles
from tests.small_disk import SmallDisk

_REPLICA = """
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
            [sys.executable, "-c", _REPLICA],
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

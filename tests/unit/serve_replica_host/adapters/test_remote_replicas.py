"""What a host fetches of replicas on other machines: one at a time, taken once, and never old as if it were new."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client.mmap_dict import MmapedDict, mmap_key
from ray.exceptions import ActorUnavailableError

from serve_common.clock import SystemClock
from serve_replica_host.adapters.metrics_files import MetricsFiles, RemoteFiles
from serve_replica_host.adapters.remote_replicas import FETCH_INTERVAL_S, RemoteReplica
from serve_replica_host.replica.telemetry import remote as fetched_module
from serve_replica_host.replica.telemetry.logs import HOST_ID, LOG_SOCKET
from serve_replica_host.replica.telemetry.remote import (
    PREFIX,
    Hello,
    HostLocation,
    RemoteTelemetry,
    RetainedLines,
    make_locked_directory,
    read_files,
)

HELLO = Hello(7, "abc", "10.0.0.2")


def written(directory: Path, pid: int, requests: float) -> dict[str, bytes]:
    """The files of a process, as it gives them away."""
    directory.mkdir(exist_ok=True)
    for kind, name in (("counter", "requests_total"), ("gauge_livesum", "in_flight")):
        file = MmapedDict(str(directory / f"{kind}_{pid}.db"))
        file.write_value(mmap_key(name, name, ["backend_tag"], ["default/app"], "Help"), requests, 0.0)
        file.close()
    files, left_out = read_files(directory)
    assert left_out == 0
    return files


class FarWorld:
    """A replica elsewhere, whose answers the test gives."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory / "host"
        self.far_directory = directory / "far"
        self.files = MetricsFiles(self.directory)
        self.files.clean()
        self.far_files = RemoteFiles(self.directory)
        self.asked: list[tuple[bool, Future[bytes]]] = []
        self.timers: list[tuple[float, Callable[[], None]]] = []
        self.written: list[bytes] = []
        self.written_later: list[Callable[[], None]] = []
        self.far = RemoteReplica(
            self,
            HELLO,
            self.far_files,
            self,  # type: ignore[arg-type]
            post=lambda call, *arguments: call(*arguments),
            call_later=lambda delay_s, call, *arguments: self.timers.append(
                (delay_s, lambda: call(*arguments))
            ),
        )

    # What is used of an actor.

    @property
    def fetch(self) -> FarWorld:
        return self

    def remote(self, with_lines: bool) -> FarWorld:
        self.asked.append((with_lines, Future()))
        return self

    def future(self) -> Future[bytes]:
        return self.asked[-1][1]

    # What is used of FarLines.

    def write(self, lines: bytes, on_written: Callable[[], None]) -> None:
        self.written.append(lines)
        self.written_later.append(on_written)

    # What happens.

    def answer(self, fetched: RemoteTelemetry) -> None:
        self.asked[-1][1].set_result(msgspec.msgpack.encode(fetched))

    def answer_files(self, requests: float, pid: int = 7) -> None:
        """Answer with all files that are there, after that process has written its own."""
        self.answer(RemoteTelemetry(written(self.far_directory, pid, requests)))

    def pass_time(self) -> None:
        """Everything that was to happen later."""
        timers, self.timers = self.timers, []
        for _, call in sorted(timers, key=lambda timer: timer[0]):
            call()

    def shown(self) -> dict[str, float]:
        return {sample.name: sample.value for metric in self.files.collect() for sample in metric.samples}


@pytest.fixture
def world(tmp_path: Path) -> FarWorld:
    return FarWorld(tmp_path)


def test_what_was_fetched_is_on_the_page_and_the_next_is_asked_for_a_second_later(world: FarWorld) -> None:
    world.far.fetch()
    assert len(world.asked) == 1
    world.answer_files(5.0)

    assert world.shown() == {"requests_total": 5.0, "in_flight": 5.0}
    assert [path.name for path in world.directory.glob("counter*")] == ["counter_abc-7.db"]
    assert FETCH_INTERVAL_S in [delay_s for delay_s, _ in world.timers]
    world.pass_time()
    world.answer_files(6.0)
    assert len(world.asked) == 2
    assert world.shown() == {"requests_total": 6.0, "in_flight": 6.0}


def test_while_one_that_is_asked_hangs_it_is_not_asked_again_and_its_gauges_leave_the_page(
    world: FarWorld,
) -> None:
    world.far.fetch()
    world.answer_files(5.0)
    world.pass_time()
    assert len(world.asked) == 2

    for _ in range(5):
        world.pass_time()

    assert len(world.asked) == 2
    assert world.shown() == {"requests_total": 5.0}
    world.answer_files(5.0)
    assert world.shown() == {"requests_total": 5.0, "in_flight": 5.0}


def test_one_that_cannot_be_reached_is_asked_again_and_unknown_meanwhile(world: FarWorld) -> None:
    world.far.fetch()
    world.answer_files(5.0)
    world.pass_time()
    world.asked[-1][1].set_exception(ActorUnavailableError("no way to it", None))

    assert world.shown() == {"requests_total": 5.0}
    world.pass_time()
    assert len(world.asked) == 3


def test_the_last_words_of_a_process_are_not_replaced_by_what_was_said_before(world: FarWorld) -> None:
    earlier = written(world.far_directory, 7, 5.0)
    world.far.fetch()
    world.far.store_final(RemoteTelemetry(written(world.far_directory, 7, 9.0), b"last\n"))
    world.answer(RemoteTelemetry(earlier, b"said before\n"))
    world.far.end()
    world.files.retire(world.far.process)
    world.pass_time()

    assert world.shown() == {"requests_total": 9.0}
    assert world.written == [b"last\n", b"said before\n"]
    assert len(world.asked) == 1
    assert list(world.directory.iterdir()) == []


def test_an_answer_after_the_end_brings_no_file_back(world: FarWorld) -> None:
    world.far.fetch()
    world.far.end()
    world.files.retire(world.far.process)
    world.answer_files(5.0)
    world.pass_time()

    assert list(world.directory.iterdir()) == []
    assert len(world.asked) == 1


def test_no_more_lines_are_asked_for_while_the_last_ones_are_not_written(world: FarWorld) -> None:
    world.far.fetch()
    world.answer(RemoteTelemetry(lines=b"one\n"))
    world.pass_time()
    world.answer(RemoteTelemetry())
    world.written_later[0]()
    world.pass_time()

    assert [with_lines for with_lines, _ in world.asked] == [True, False, True]


def test_metrics_that_are_too_large_are_unknown_and_not_old(world: FarWorld) -> None:
    world.far.fetch()
    world.answer_files(5.0)
    world.pass_time()
    world.answer(RemoteTelemetry(left_out_bytes=10**7))

    assert world.shown() == {"requests_total": 5.0}


def test_files_of_processes_that_a_replica_has_forked_are_kept_apart_and_folded_with_it(
    world: FarWorld,
) -> None:
    written(world.far_directory, 7, 5.0)
    world.far.fetch()
    world.answer_files(2.0, pid=8)

    assert world.shown() == {"requests_total": 7.0, "in_flight": 7.0}
    world.far.end()
    world.files.retire(world.far.process)
    assert world.shown() == {"requests_total": 7.0}


@pytest.mark.parametrize("name", ["counter_../../x_7.db", "other_7.db", "counter_7.db.db", "gauge_a_b_7.db"])
def test_what_is_no_file_of_metrics_is_not_written(world: FarWorld, name: str) -> None:
    good = written(world.far_directory, 7, 5.0)["counter_7.db"]

    world.far_files.put(world.far.process, {name: good, "counter_7.db": good[:-1], "counter_8.db": b""})

    assert list(world.directory.iterdir()) == []


def test_equal_pids_on_two_machines_are_two_processes(world: FarWorld) -> None:
    written(world.directory, 7, 1.0)
    world.far_files.put("abc-7", written(world.far_directory, 7, 5.0))
    assert world.shown()["requests_total"] == 6.0

    world.files.retire("7")

    assert world.shown() == {"requests_total": 6.0, "in_flight": 5.0}
    assert (world.directory / "counter_abc-7.db").exists()


def test_files_that_are_too_large_are_left_out_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = written(tmp_path, 7, 1.0)
    size = sum(map(len, files.values()))
    monkeypatch.setattr(fetched_module, "FILES_BYTES_MAX", size - 1)

    assert read_files(tmp_path) == ({}, size)


def test_lines_that_are_not_fetched_spill_and_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetched_module, "LINES_BYTES_MAX", 10)
    spilled: list[bytes] = []
    lines = RetainedLines(spilled.append, {"replica_tag": "default/app#1"}, SystemClock())
    lines.keep(b"one\ntwo\n")
    lines.keep(b"three\nfour\n")

    given = lines.give().splitlines(keepends=True)

    assert given[:2] == [b"one\n", b"two\n"]
    assert b'"count":2' in given[2]
    assert b"default/app#1" in given[2]
    assert spilled == [b"three\nfour\n"]
    assert lines.give() == b""


def test_who_runs_on_the_hosts_node_and_sees_its_files_shares_its_machine(tmp_path: Path) -> None:
    socket = tmp_path / "log.sock"
    place = HostLocation(metrics_dir=str(tmp_path), node_id="a", log_socket=str(socket))

    assert not place.is_shared_by("a")  # another container
    socket.touch()
    assert place.is_shared_by("a")
    assert not place.is_shared_by("b")
    assert not HostLocation(metrics_dir=str(tmp_path / "none"), node_id="a").is_shared_by("a")
    assert HostLocation().is_shared_by("b")  # a Ray of the host's own


def test_a_replica_takes_what_it_lacks_of_its_hosts_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ((LOG_SOCKET, "/another/host's"), (HOST_ID, "other"), ("MUSTER_LOG_LEVEL", "ERROR")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MUSTER_UNCOUNTED", "")
    monkeypatch.delenv("MUSTER_UNCOUNTED")
    variables = {"MUSTER_LOG_LEVEL": "DEBUG", "MUSTER_UNCOUNTED": "a"}
    place = HostLocation(node_id="a", host_id="host-1", log_socket="/x.sock", variables=variables)

    place.enter(is_shared=False)

    assert LOG_SOCKET not in os.environ
    assert [os.environ[name] for name in (HOST_ID, *variables)] == ["host-1", "ERROR", "a"]
    place.enter(is_shared=True)
    assert os.environ[LOG_SOCKET] == "/x.sock"


def test_a_directory_is_removed_by_the_next_process_once_its_own_was_killed(tmp_path: Path) -> None:
    now = SystemClock().now()
    script = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from serve_replica_host.replica.telemetry.remote import make_locked_directory\n"
        "print(make_locked_directory(time.time(), Path(sys.argv[1])), flush=True)\n"
        "sys.stdin.read()\n"
    )
    options: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], **options) as other:
        assert other.stdout is not None
        theirs = Path(other.stdout.readline().strip())
        mine = make_locked_directory(now + 3600, tmp_path)
        assert theirs.exists()
        other.kill()
    later = make_locked_directory(now, tmp_path)
    assert theirs.exists()  # it may not be locked yet
    make_locked_directory(now + 3600, tmp_path)

    assert not theirs.exists()
    assert mine.exists()
    assert later.exists()
    assert mine.name.startswith(PREFIX)

"""What a replica's process tells of the queues of its own handles."""

from __future__ import annotations

import io
import json
import logging
import re
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from serve_common.config.backend import LogEncoding, LoggingConfig
from serve_common.names import BackendTag, ReplicaTag
from serve_common.runtime.request_context import CurrentReplica, HandleQueue, RequestContext, request_context
from serve_common.runtime.settings import BusSettings
from serve_replica_host.adapters import replica_metrics
from serve_replica_host.adapters.replica_metrics import PrometheusHandleMetrics
from serve_replica_host.replica.telemetry.logs import (
    LOG_SOCKET,
    UNENDED_LENGTH_MAX,
    CaughtPrints,
    UserLogs,
    open_log_sender,
)

A, B, C = BackendTag("default/a"), BackendTag("default/b"), BackendTag("other/c")


class Case:
    """A replica whose application has `A` and `B` beside it."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.metrics = PrometheusHandleMetrics(self.registry)
        bus = BusSettings(servers=[], user="", password="", inbox_prefix="", subject_prefix="serve")
        self.replica = CurrentReplica(
            replica_tag=ReplicaTag("default/top#0"),
            backend_tag=BackendTag("default/top"),
            bus=bus,
            code_version=1,
            peer_versions={A: 1, B: 1},
        )

    def write(self, **queues: tuple[float, int]) -> None:
        tags = {"a": A, "b": B, "c": C}
        told = {tags[name]: HandleQueue(*queue) for name, queue in queues.items()}
        self.replica.handle_queues = lambda: told
        self.metrics.write(self.replica)

    def seconds(self, tag: BackendTag) -> float | None:
        return self._value("serve_router_queued_seconds_total", tag)

    def depth(self, tag: BackendTag) -> float | None:
        return self._value("serve_handle_queue_depth", tag)

    def _value(self, name: str, tag: BackendTag) -> float | None:
        return self.registry.get_sample_value(name, {"backend_tag": tag})


def test_the_series_of_its_application_are_there_before_anything_is_called() -> None:
    case = Case()
    case.metrics.write(case.replica)
    assert (case.seconds(A), case.depth(A), case.seconds(B)) == (0, 0, 0)
    assert case.seconds(C) is None
    case.write(c=(0.0, 0))
    assert (case.seconds(C), case.depth(C)) == (0, 0)


def test_what_waits_is_added_up_also_over_a_new_connection_of_the_handles() -> None:
    case = Case()
    case.write(a=(1.5, 3))
    case.write(a=(4.0, 2), c=(0.25, 1))
    assert (case.seconds(A), case.depth(A), case.seconds(C)) == (4.0, 2, 0.25)
    case.write(a=(0.5, 0), c=(0.5, 1))  # it counts from 0 again
    assert (case.seconds(A), case.depth(A), case.seconds(C)) == (4.5, 0, 0.5)
    case.write(a=(0.5, 0))  # C was deleted
    assert case.depth(C) == 0


def test_a_moment_less_than_before_is_no_new_beginning() -> None:
    case = Case()
    for seconds in (100.0, 99.99, 100.5):
        case.write(a=(seconds, 1))
    assert case.seconds(A) == 100.5


def test_a_process_that_calls_ever_new_backends_does_not_write_ever_more_series(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replica_metrics, "HANDLE_BACKENDS_MAX", 2)
    case = Case()
    case.write(a=(1.0, 1), c=(1.0, 1))
    assert (case.seconds(A), case.seconds(C)) == (1.0, None)


# The way of a replica's log lines to its host on the same machine.


PIECES = 1_000
"""More than a socket holds that nobody reads."""


# A replica's process keeps its way as long as it lives, and has nothing that closes it.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_lines_that_a_host_takes_only_after_a_while_are_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a host that has no processor for a moment while a replica prints a lot."""
    path = tmp_path / "socket"
    monkeypatch.setenv(LOG_SOCKET, str(path))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as host:
        host.bind(str(path))
        host.settimeout(30)
        way = open_log_sender()
        sending = threading.Thread(target=lambda: [way(b"%d\n" % number) for number in range(PIECES)])
        sending.start()
        sending.join(1.5)
        assert sending.is_alive(), "the socket is full"
        taken = [host.recv(100) for _ in range(PIECES)]
        sending.join()
    assert taken == [b"%d\n" % number for number in range(PIECES)]


# What user code logs and prints becomes lines with the ids of its replica and request.


IDS = {"service": "replica", "replica_tag": "default/a#0", "backend_tag": "default/a"}
TRACE = "0af7651916cd43dd8448eb211c80319c"


class FixedClock:
    def now(self) -> float:
        return 1_700_000_000.25


class RetainedLines:
    """In place of a relay."""

    is_in_forked_child = False

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def offer(self, line: bytes) -> None:
        self.lines.append(json.loads(line))

    @property
    def messages(self) -> list[str]:
        return [line["message"] for line in self.lines]


@contextmanager
def caught() -> Iterator[RetainedLines]:
    """Everything that is said within; no fixture, for pytest puts its own streams in place after these."""
    kept: Any = RetainedLines()
    root = logging.getLogger()
    ray = logging.getLogger("ray")
    before = (root.handlers[:], root.level, sys.stdout, sys.stderr)
    of_ray = (ray.handlers[:], ray.level, ray.propagate)
    kept.logs = UserLogs(kept, IDS, FixedClock())
    kept.logs.catch(logging.INFO)
    try:
        yield kept
    finally:
        kept.logs.configure(None)
        ray.handlers[:], ray.propagate = of_ray[0], of_ray[2]
        ray.setLevel(of_ray[1])
        root.handlers[:] = before[0]
        root.setLevel(before[1])
        sys.stdout, sys.stderr = before[2:]


def test_what_ray_adds_to_every_record_is_no_field_of_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    made = logging.getLogRecordFactory()

    def make(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = made(*args, **kwargs)
        record.__dict__["_ray_timestamp_ns"] = 7
        return record

    monkeypatch.setattr(logging, "_logRecordFactory", make)
    with caught() as kept:
        logging.getLogger("app.model").info("one")
        logging.getLogger("app.model").info("two", extra={"size": 3})
        one, two = kept.lines
    assert "_ray_timestamp_ns" not in {*one, *two}
    assert two["size"] == 3


def test_a_log_call_is_a_line_with_all_ids_and_its_own_fields() -> None:
    with caught() as kept:
        context = RequestContext(request_id="r1", traceparent=f"00-{TRACE}-b7ad6b7169203331-01")
        token = request_context.set(context)
        logging.getLogger("app.model").warning("loaded %s", "it", extra={"size": 3, "level": "mine"})
        request_context.reset(token)
        logging.getLogger("app.model").debug("not wanted")
        [line] = kept.lines
        assert line.pop("source").partition(":")[0] == __file__
        assert line.pop("timestamp").endswith("Z")
        assert line == {
            **IDS,
            "event": "log",
            "level": "warning",
            "logger": "app.model",
            "message": "loaded it",
            "request_id": "r1",
            "trace_id": TRACE,
            "size": 3,
            "extra_level": "mine",
        }


def test_rays_loggers_keep_their_level_although_ray_gives_them_a_handler() -> None:
    ray = logging.getLogger("ray")
    with caught() as first:  # what Ray's import does comes before
        ray.handlers[:], ray.propagate = [logging.StreamHandler(sys.stderr)], False
        ray.setLevel(logging.INFO)
        first.logs.catch(logging.INFO)
        logging.getLogger("ray.serve").info("served")
        logging.getLogger("ray.serve").debug("not asked for")
        [line] = first.lines
        assert (line["level"], line["event"], line["logger"], line["message"]) == (
            "info",
            "log",
            "ray.serve",
            "served",
        )


def test_a_logging_config_has_an_effect_by_each_of_its_fields_until_it_is_gone() -> None:
    def say() -> list[dict[str, Any]]:
        kept.lines.clear()
        for name in ("ray.serve", "muster.own", "app"):
            logging.getLogger(name).debug("detail")
            logging.getLogger(name).warning("trouble")
        print("printed")
        return list(kept.lines)

    with caught() as kept:
        plain = say()
        assert [line["level"] for line in plain] == ["warning", "warning", "warning", "info"]
        kept.logs.configure(LoggingConfig(log_level="DEBUG"))
        assert [(line["logger"], line["level"]) for line in say() if line["message"] == "detail"] == [
            ("ray.serve", "debug"),
            ("muster.own", "debug"),
        ]
        kept.logs.configure(LoggingConfig(log_level="ERROR"))
        assert [line["logger"] for line in say()] == ["app", "stdout"]
        kept.logs.configure(LoggingConfig(additional_log_standard_attrs=("funcName", "asctime", "args")))
        line = say()[0]
        assert (line["funcName"], line["args"], "encoding" in line) == ("say", [], False)
        assert line["asctime"].startswith("20")
        kept.logs.configure(LoggingConfig(encoding=LogEncoding.JSON))
        *logged, printed = say()
        assert {each["encoding"] for each in (*logged, printed)} == {"JSON"}
        assert (logged[0]["levelname"], logged[0]["filename"]) == ("WARNING", "test_telemetry.py")
        assert {"asctime", "lineno", "process"} <= logged[0].keys()
        kept.logs.configure(None)
        assert [line.keys() for line in say()] == [line.keys() for line in plain]


def test_what_the_own_loggers_log_is_in_a_file_too_where_a_directory_is_named(tmp_path: Path) -> None:
    def say() -> None:
        logging.getLogger("ray.serve").info("hello", extra={"customer": 7})
        logging.getLogger("app").warning("of another")

    [app, deployment], ordinal = IDS["backend_tag"].split("/"), IDS["replica_tag"].rpartition("#")[2]
    name = f"replica_{app}_{deployment}_{ordinal}.log"
    with caught() as kept:
        for _ in range(2):  # the second changes nothing
            kept.logs.configure(LoggingConfig(logs_dir=str(tmp_path / "a" / "b")))
        say()
        kept.logs.configure(LoggingConfig(logs_dir=str(tmp_path / "json"), encoding=LogEncoding.JSON))
        say()
        (tmp_path / "taken").write_text("")
        kept.logs.configure(LoggingConfig(logs_dir=str(tmp_path / "taken")))
        assert "no file can be written there" in kept.lines[-1]["message"]
        say()
    say()
    [line] = (tmp_path / "a" / "b" / name).read_text().splitlines()
    assert re.fullmatch(rf"INFO 20\S+ \S+ {app}_{deployment} {ordinal} -- hello", line)
    [said] = map(json.loads, (tmp_path / "json" / name).read_text().splitlines())
    assert (said["message"], said["levelname"], said["application"]) == ("hello", "INFO", app)
    assert said["customer"] == 7


class FullFile(io.StringIO):
    def write(self, _: str) -> int:
        raise OSError(28, "no space left on device")


def test_a_file_of_logs_that_cannot_be_written_fails_no_call(tmp_path: Path) -> None:
    with caught() as kept:
        kept.logs.configure(LoggingConfig(logs_dir=str(tmp_path)))
        kept.logs._file.stream.close()
        kept.logs._file.stream = FullFile()
        logging.getLogger("ray.serve").info("hello")
        assert [line["message"] for line in kept.lines] == ["hello"]


def test_an_exception_is_in_the_line_and_wrong_arguments_raise_nothing() -> None:
    with caught() as kept:
        try:
            raise ValueError("no such digit")
        except ValueError:
            logging.getLogger("app").exception("failed")
        logging.getLogger("app").error("%d", "not a number")
        assert kept.lines[0]["exception"].endswith("ValueError: no such digit\n")
        assert (kept.lines[0]["level"], kept.lines[0]["message"]) == ("error", "failed")
        assert "'%d' with arguments that do not fit" in kept.lines[1]["message"]


def test_prints_are_lines_also_from_threads_in_parts_and_in_bytes() -> None:
    with caught() as kept:
        print("a", 1)
        print("two\nlines")
        print("first ", end="")
        thread = threading.Thread(target=lambda: print("other"))
        thread.start()
        thread.join()
        print("half", flush=True)
        sys.stdout.buffer.write("bytes é\n".encode())
        sys.stderr.writelines(["e1\n", "e2\n"])
        print("\rdone 10 %\rdone 99 %", end="")
        print("\rdone 100 %")
        print()
        assert kept.messages == [
            "a 1", "two", "lines", "other", "first half", "bytes é", "e1", "e2", "done 100 %",
        ]  # fmt: skip
        assert [(line["logger"], line["level"]) for line in kept.lines[5:7]] == [
            ("stdout", "info"),
            ("stderr", "warning"),
        ]


def test_lines_without_an_end_are_handed_on_when_they_are_long_and_at_the_end() -> None:
    lines: list[str] = []
    caught = CaughtPrints(io.StringIO(), lines.append, lambda: None)
    caught.write("x" * (UNENDED_LENGTH_MAX + 1))
    caught.write("last words")
    caught.end()
    assert [len(line) for line in lines] == [UNENDED_LENGTH_MAX + 1, 10]
    with pytest.raises(TypeError):
        caught.write(b"bytes")  # type: ignore[arg-type]


def test_handlers_of_the_users_own_go_on_working() -> None:
    with caught() as kept:
        mine = io.StringIO()
        logging.getLogger().addHandler(logging.StreamHandler(mine))
        logging.getLogger("app").info("both")
        assert mine.getvalue() == "both\n"
        assert kept.messages == ["both"]
        logging.basicConfig(force=True, format="mine: %(message)s", level=logging.INFO)
        logging.getLogger("app").info("as I want it")
        assert kept.messages == ["both", "mine: as I want it"]

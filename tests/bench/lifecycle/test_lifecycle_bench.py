"""The parts of the life-cycle benchmark that could lie without anybody noticing."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest

from tests.bench.lifecycle.answer_watch import AnswerWatch
from tests.bench.lifecycle.figures import Round, conclude
from tests.bench.lifecycle.guarded import ProgramFailed, run_guarded
from tests.bench.lifecycle.report import make_report, render
from tests.bench.lifecycle.story import DELETE, FIRST_DEPLOY, SCALE_UP, STORY, BareRound, SystemRound, Taken


def _system(done_s: float, answered_s: float | None = None) -> SystemRound:
    taken = [Taken(step=change.step, done_s=done_s, answered_s=answered_s) for change in STORY]
    return SystemRound(taken=taken, requests=10, requests_failed=1)


def _round(muster_s: float, eight_s: float, serve_s: float | None = None) -> Round:
    return Round(
        busy_before=0.0,
        load_before=0.5,
        bare=BareRound(first_s=0.5, another_s=0.6, eight_s=eight_s),
        muster=_system(muster_s),
        serve=None if serve_s is None else _system(serve_s, serve_s),
    )


def test_a_relative_limit_is_judged_against_bare_ray_of_the_same_round() -> None:
    # The machine was twice as slow in two of three rounds: the ratio does not change.
    lines = {line.step: line for line in conclude([_round(1.0, 1.0), _round(2.0, 2.0), _round(2.0, 2.0)])}
    assert lines[SCALE_UP].judged == 1.0
    assert lines[SCALE_UP].is_kept
    assert lines[FIRST_DEPLOY].judged == 1.5
    assert not lines[FIRST_DEPLOY].is_kept
    assert lines[DELETE].muster_s == 2.0
    assert (lines[DELETE].muster_s_min, lines[DELETE].muster_s_max) == (1.0, 2.0)


def test_without_a_peer_its_columns_are_empty_and_with_one_the_ratio_is_of_the_same_round() -> None:
    alone = conclude([_round(1.0, 1.0)])[0]
    assert (alone.serve_s, alone.serve_answered_s, alone.of_serve) == (None, None, None)
    beside = conclude([_round(1.0, 1.0, serve_s=4.0), _round(3.0, 1.0, serve_s=12.0)])[0]
    assert (beside.serve_s, beside.of_serve) == (8.0, 0.25)


def test_the_table_shows_every_change_and_the_failed_requests() -> None:
    rounds = [_round(1.0, 1.0, serve_s=4.0)]
    text = render(make_report(rounds, conclude(rounds), 2, 5.0))
    assert all(change.step in text for change in STORY)
    assert "Muster: 1 of 10 requests failed" in text
    assert "Ray Serve: 1 of 10 requests failed" in text


class _Scripted(ThreadingHTTPServer):
    status, body = 404, b""


@pytest.fixture
def server() -> Iterator[_Scripted]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.send_response(scripted.status)
            self.send_header("Content-Length", str(len(scripted.body)))
            self.end_headers()
            self.wfile.write(scripted.body)

        def log_message(self, *arguments: object) -> None:
            pass

    scripted = _Scripted(("127.0.0.1", 0), Handler)
    scripted.daemon_threads = True
    thread = threading.Thread(target=scripted.serve_forever)
    thread.start()
    yield scripted
    scripted.shutdown()
    thread.join()
    scripted.server_close()


def test_the_watch_sees_the_new_version_and_counts_what_fails_only_while_it_must_serve(
    server: _Scripted,
) -> None:
    with AnswerWatch(server.server_port, "/noop") as watch:
        watch.expect("v1")
        with pytest.raises(TimeoutError):
            watch.seen_at(0.1)  # 404s
        server.status, server.body = 200, b"v1"
        first_at = watch.seen_at(5.0)
        assert watch.requests == 0
        watch.must_serve = True
        watch.expect("v2")
        server.status = 503
        with pytest.raises(TimeoutError):
            watch.seen_at(0.1)
        server.status, server.body = 200, b"v2"
        assert watch.seen_at(5.0) > first_at
        assert 0 < watch.requests_failed < watch.requests
        watch.must_serve = False
        failed = watch.requests_failed
        watch.expect(None)
        server.status = 404
        watch.seen_at(5.0)
        assert watch.requests_failed == failed


_LEAVES_SOMETHING = (
    "import subprocess, sys, pathlib;"
    "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True);"
    "pathlib.Path(sys.argv[1]).write_text(str(p.pid)); sys.exit(int(sys.argv[2]))"
)


@pytest.mark.parametrize("code", [0, 3])
async def test_a_guarded_program_leaves_no_process_behind_and_its_failure_is_told(
    tmp_path: Path, code: int
) -> None:
    pid_file = tmp_path / "pid"
    running = run_guarded(
        [sys.executable, "-c", _LEAVES_SOMETHING, str(pid_file), str(code)], tmp_path / "log", timeout_s=20.0
    )
    if code:
        with pytest.raises(ProgramFailed, match="code 3"):
            await running
    else:
        await running
    assert not psutil.pid_exists(int(pid_file.read_text()))

"""A real Prometheus under a test's control: to be killed and started again with what it had stored.

Why a real one: extrapolation, staleness and lookback are what tests of PromQL are about. The binary on PATH (or the one
that ``TEST_PROMETHEUS_BIN`` names) is used, otherwise the image of compose. Where there is neither the test is skipped,
or fails with ``MUSTER_REQUIRE_COMPOSE=1``.

    config = scrape_config({"proxy": ["127.0.0.1:9102"]}, interval_s=1)
    with PrometheusServer(tmp_path, config) as prometheus:
        prometheus.start()
        prometheus.wait_for("up == 1")


``promtool`` too, wherever there is one: on PATH, and in the image of compose; they may be of different versions, and
rules must be right for Prometheus 2.42 and for 3.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

import pytest

from tests.support.servers.reserved_port import HeldPort

IMAGE: Final = "prom/prometheus:v3.5.0"
START_TIMEOUT_S: Final = 120.0
_PULL_TIMEOUT_S: Final = 120.0
_ANSWER_TIMEOUT_S: Final = 60.0
MOUNT: Final = "/etc/prometheus"
"""Where the image sees the directory: as in compose."""
REQUIRED: Final = "MUSTER_REQUIRE_COMPOSE"
_TIMEOUT_S: Final = 180.0


def scrape_config(
    jobs: Mapping[str, Sequence[str]],
    *,
    interval_s: float,
    params: Mapping[str, Mapping[str, Sequence[str]]] | None = None,
    rule_files: Sequence[str] = (),
) -> str:
    """A configuration that scrapes each job's ``host:port`` targets; ``params`` adds URL parameters per job."""
    interval = f"{round(interval_s * 1000)}ms"
    jobs_written = [
        {
            "job_name": job,
            "static_configs": [{"targets": list(targets)}],
            "params": {name: list(values) for name, values in (params or {}).get(job, {}).items()},
        }
        for job, targets in jobs.items()
    ]
    written: dict[str, Any] = {
        "global": {"scrape_interval": interval, "scrape_timeout": interval, "evaluation_interval": interval},
        "rule_files": list(rule_files),
        "scrape_configs": jobs_written,
    }
    return json.dumps(written, indent=1)  # JSON is YAML


class PrometheusServer:
    """One server on a port that it keeps over a restart; leaving the ``with`` block ends it.

    ``config`` is the text of ``prometheus.yml``; ``files`` are written beside it (rules, secrets), so that the
    configuration may name them relatively. What it stores is in ``directory/data``.
    """

    def __init__(self, directory: Path, config: str, *, files: Mapping[str, str] | None = None) -> None:
        self.directory = directory
        self._binary = os.environ.get("TEST_PROMETHEUS_BIN") or shutil.which("prometheus")
        self._process: subprocess.Popen[bytes] | None = None
        self._container = ""
        self._written = {"prometheus.yml": config, **(files or {})}
        self._held_port = HeldPort()
        self.port = self._held_port.port

    @property
    def url(self) -> str:
        """Where its HTTP API begins."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def is_running(self) -> bool:
        """Between `start` and `kill`."""
        return self._process is not None

    def __enter__(self) -> Self:
        if self._binary is None:
            _require_image()
        (self.directory / "data").mkdir(exist_ok=True)
        for name, text in self._written.items():
            (self.directory / name).write_text(text, encoding="utf-8")
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        """Start it unless it runs; returns once it is ready to be asked."""
        if self._process is not None:
            return
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(self._command(), stdout=log, stderr=log)
        give_up_at = time.monotonic() + START_TIMEOUT_S
        while not self._is_ready():
            ended = self._process.poll() is not None
            assert not ended and time.monotonic() < give_up_at, self._log()  # noqa: PT018 - one reason
            time.sleep(0.05)  # it has no other way to say that it is ready

    def kill(self) -> None:
        """End it at once, unless it does not run."""
        process, self._process = self._process, None
        if process is None:
            return
        if self._container:
            subprocess.run(
                ["docker", "rm", "-f", self._container],
                check=True,
                capture_output=True,
                timeout=_ANSWER_TIMEOUT_S,
            )
        else:
            process.send_signal(signal.SIGKILL)
        process.wait(timeout=_ANSWER_TIMEOUT_S)

    def configure(self, config: str) -> None:
        """Use another configuration from now on; returns once it is in force."""
        (self.directory / "prometheus.yml").write_text(config, encoding="utf-8")
        request = urllib.request.Request(f"{self.url}/-/reload", method="POST")
        with urllib.request.urlopen(request, timeout=_ANSWER_TIMEOUT_S):
            pass

    def query(self, promql: str, at: float | None = None) -> list[dict[str, Any]]:
        """The elements of an instant vector (or matrix), as the API has them; an error is an AssertionError."""
        parameters = {"query": promql} if at is None else {"query": promql, "time": f"{at:.3f}"}
        url = f"{self.url}/api/v1/query?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=_ANSWER_TIMEOUT_S) as response:
                answer = json.load(response)
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{promql}: {error.read().decode()}") from error
        elements: list[dict[str, Any]] = answer["data"]["result"]
        return elements

    def wait_for(self, promql: str, *, timeout_s: float = 60.0, at_least: int = 1) -> list[dict[str, Any]]:
        """The elements of ``promql`` as soon as there are so many of them; what is awaited has no event to tell it."""
        give_up_at = time.monotonic() + timeout_s
        while len(elements := self.query(promql)) < at_least:
            assert time.monotonic() < give_up_at, f"{promql} gives {elements}\n{self._log()}"
            time.sleep(0.1)
        return elements

    def _command(self) -> list[str]:
        inside = str(self.directory) if self._binary else "/work"
        arguments = [
            f"--config.file={inside}/prometheus.yml",
            f"--storage.tsdb.path={inside}/data",
            f"--web.listen-address=127.0.0.1:{self.port}",
            "--web.enable-lifecycle",
            "--log.level=warn",
        ]
        if self._binary:
            return [self._binary, *arguments]
        self._container = f"muster-test-prometheus-{secrets.token_hex(6)}"
        user = f"{os.getuid()}:{os.getgid()}"
        options = ["--rm", "--name", self._container, "--network", "host", "--user", user]
        mounts = ["--volume", f"{self.directory}:/work", "--workdir", "/work"]
        return ["docker", "run", *options, *mounts, IMAGE, *arguments]

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=2) as response:
                return bool(response.status == 200)
        except OSError:
            return False

    def _log(self) -> str:
        return (self.directory / "log").read_text(encoding="utf-8", errors="replace")[-4000:]


def _require_image() -> None:
    why = _why_no_image()
    if why is None:
        return
    if os.environ.get(REQUIRED) == "1":
        pytest.fail(f"{REQUIRED}=1, but there is no prometheus on PATH and no image {IMAGE}: {why}")
    pytest.skip(
        f"NOT TESTED: what needs Prometheus, for it is not on PATH and there is no image {IMAGE}: {why}"
    )


def _why_no_image() -> str | None:
    """None when the image is here, or could be pulled."""
    why = ""
    for command, timeout_s in (("image inspect", 30.0), ("pull -q", _PULL_TIMEOUT_S)):
        try:
            done = subprocess.run(
                ["docker", *command.split(), IMAGE],
                capture_output=True,
                text=True,
                timeout=timeout_s,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
        if done.returncode == 0:
            return None
        why = done.stderr.strip()[:300]
    return why


def promtool_commands(directory: Path) -> list[list[str]]:
    """How to begin a command that runs in ``directory``, one for each that there is.

    Without any the test is skipped, or fails where `MUSTER_REQUIRE_COMPOSE` is 1.
    """
    found = []
    on_path = shutil.which("promtool")
    if on_path is not None:
        found.append([on_path])
    if _has_image():
        inside = ["--network", "none", "--volume", f"{directory}:{MOUNT}:ro", "--workdir", MOUNT]
        found.append(["docker", "run", "--rm", *inside, "--entrypoint", "promtool", IMAGE])
    if not found:
        why = f"promtool is not on PATH, and there is no image {IMAGE}"
        if os.environ.get(REQUIRED) == "1":
            pytest.fail(f"{REQUIRED}=1, but {why}")
        pytest.skip(f"NOT TESTED: alert rules, for {why}")
    return found


def run_promtool(command: Sequence[str], directory: Path) -> subprocess.CompletedProcess[str]:
    """Its end and all that it printed."""
    return subprocess.run(
        command, cwd=directory, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
    )


def _has_image() -> bool:
    try:
        return run_promtool(["docker", "image", "inspect", IMAGE], Path.cwd()).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False

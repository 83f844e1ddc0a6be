"""An alert of our rules reaches a webhook: a real Prometheus, a real Alertmanager with our configuration, a receiver.

The binary on PATH (Debian calls it ``prometheus-alertmanager``), or that of ``TEST_ALERTMANAGER_BIN``, is used with the
``amtool`` beside it. Where there is none the tests are skipped.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.paths import ROOT
from tests.support.servers.prometheus_server import PrometheusServer, scrape_config
from tests.support.servers.reserved_port import HeldPort

pytestmark = pytest.mark.timeout(300)

CONFIG = ROOT / "deploy/alertmanager/alertmanager.yml"
URL = "http://host.docker.internal:9095/alerts"
LIMIT_S = 120.0


@pytest.fixture(scope="module")
def binary() -> Path:
    found = (
        os.environ.get("TEST_ALERTMANAGER_BIN")
        or shutil.which("alertmanager")
        or shutil.which("prometheus-alertmanager")
    )
    if found is None:
        pytest.skip("NOT TESTED: that alerts reach a webhook, for alertmanager is not on PATH")
    return Path(found)


@contextmanager
def webhook() -> Iterator[tuple[str, queue.Queue[dict[str, Any]]]]:
    """The URL of a receiver, and what was posted to it."""
    posted: queue.Queue[dict[str, Any]] = queue.Queue()

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posted.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Nothing."""

    with HTTPServer(("127.0.0.1", 0), Receiver) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/alerts", posted
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def alertmanager(binary: Path, directory: Path, config: str) -> Iterator[int]:
    """A running one: its port."""
    held = HeldPort()
    (directory / "alertmanager.yml").write_text(config)
    command = [
        str(binary), f"--config.file={directory}/alertmanager.yml", f"--storage.path={directory}/alerts",
        f"--web.listen-address=127.0.0.1:{held.port}", "--cluster.listen-address=",
    ]  # fmt: skip
    log = directory / "alertmanager.log"
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as process:
        try:
            deadline = time.monotonic() + LIMIT_S
            while not is_ready(held.port):
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.05)
            yield held.port
        finally:
            process.kill()


def is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/-/ready", timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def until(posted: queue.Queue[dict[str, Any]], name: str, status: str, jobs: set[str]) -> dict[str, Any]:
    """The message after which all these jobs' alerts of a name have that status.

    Alertmanager sends the first alert of a group at once where it came later than ``group_wait`` after its start, and
    the others with the next message.
    """
    deadline = time.monotonic() + LIMIT_S
    statuses: dict[str, str] = {}
    while True:
        message = posted.get(timeout=max(0.1, deadline - time.monotonic()))
        if message["groupLabels"] == {"alertname": name}:
            statuses |= {alert["labels"]["job"]: alert["status"] for alert in message["alerts"]}
        if statuses == dict.fromkeys(jobs, status):
            return message


def test_the_configuration_is_one(binary: Path) -> None:
    amtool = binary.with_name("amtool")
    done = subprocess.run(
        [amtool, "check-config", CONFIG], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "SUCCESS" in done.stdout


def test_an_alert_reaches_the_webhook_and_so_does_its_end(binary: Path, tmp_path: Path) -> None:
    """Of services that nothing scrapes. Waiting times are shortened; all else is as it is shipped."""
    rules = (ROOT / "deploy/prometheus/rules/processes.yml").read_text()
    # Long enough for Prometheus to know Alertmanager by then: what it cannot send it sends again after a minute.
    rules = rules.replace("for: 1m", "for: 8s")
    jobs = ("controller", "proxy", "replica-host")
    with webhook() as (url, posted):
        assert CONFIG.read_text().count(URL) == 1
        config = yaml.safe_load(CONFIG.read_text().replace(URL, url))
        config["route"] |= {"group_wait": "1s", "group_interval": "1s"}
        with alertmanager(binary, tmp_path, yaml.safe_dump(config)) as port:
            target = f"127.0.0.1:{port}"  # it has metrics too, for any job's `up`

            def prometheus_config(**targets: list[str]) -> str:
                loaded = json.loads(scrape_config(targets, interval_s=1, rule_files=["processes.yml"]))
                sends_to = {"alertmanagers": [{"static_configs": [{"targets": [target]}]}]}
                return json.dumps({**loaded, "alerting": sends_to})

            with PrometheusServer(
                tmp_path, prometheus_config(), files={"processes.yml": rules}
            ) as prometheus:
                prometheus.start()
                message = until(posted, "MusterServiceMissing", "firing", set(jobs))
                assert message["commonLabels"]["severity"] == "critical"
                assert message["commonAnnotations"]["runbook"] == "docs/runbook.md#musterservicemissing"
                prometheus.configure(prometheus_config(**{job: [target] for job in jobs}))
                over = until(posted, "MusterServiceMissing", "resolved", set(jobs))
                assert over["status"] == "resolved"

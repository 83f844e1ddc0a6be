"""A host is drained: alone, and beside another that takes its replicas."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import httpx
import psutil
import pytest
from playwright.sync_api import expect

from muster.embedded.services import HOST
from serve_common.api.commands import UndrainHost
from tests.browser.conftest import Visit, console_beside, running_stack
from tests.support.browser.changes import apply, show_plan
from tests.support.browser.console_process import ConsoleProcess
from tests.support.browser.load import under_load
from tests.support.browser.models import delete, deploy
from tests.support.browser.visitor import SOON_MS
from tests.support.paths import ROOT
from tests.support.stacks.embedded_stack import EmbeddedStack

pytestmark = pytest.mark.timeout(300)

FIRST: Final = "host-1"
_JOINS_WITHIN_S: Final = 120.0
_STOPS_WITHIN_S: Final = 40.0


@pytest.fixture(scope="module")
def stack(executable: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedStack]:
    """One of its own: hosts that have left are shown for an hour."""
    with running_stack(tmp_path_factory.mktemp("d")) as stack:
        yield stack


@pytest.fixture(scope="module")
def console(stack: EmbeddedStack) -> Iterator[ConsoleProcess]:
    with console_beside(stack) as console:
        yield console


@contextlib.contextmanager
def running_second_host(stack: EmbeddedStack, host_id: str) -> Iterator[str]:
    """Its id, once the controller knows it. It has all variables of the first but those that are its own."""
    first = psutil.Process(stack.pid(HOST))
    # Sockets of Ray and of direct links need a short path.
    with tempfile.TemporaryDirectory(prefix="muster-", dir="/tmp", ignore_cleanup_errors=True) as directory:
        metrics = Path(directory) / "metrics"
        metrics.mkdir(mode=0o700)
        environment = {
            **first.environ(),
            "MUSTER_HOST_ID": host_id,
            "MUSTER_OPS_PORT": "0",
            "MUSTER_RAY_TEMP_DIR": directory,
            "MUSTER_DIRECT_DIR": str(Path(directory) / "direct"),
            "PROMETHEUS_MULTIPROC_DIR": str(metrics),
        }
        log_path = stack.state_dir.parent / f"{host_id}.log"
        with log_path.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "serve_replica_host"],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        try:
            end = time.monotonic() + _JOINS_WITHIN_S
            while host_id not in [host["host_id"] for host in stack.status()["hosts"]]:
                assert process.poll() is None, log_path.read_text()[-4000:]
                assert time.monotonic() < end, log_path.read_text()[-4000:]
                time.sleep(0.1)
            yield host_id
        finally:
            process.terminate()
            try:
                process.wait(_STOPS_WITHIN_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(_STOPS_WITHIN_S)
                raise


@pytest.fixture(scope="module")
def second(stack: EmbeddedStack) -> Iterator[str]:
    """Another host, whose id this is."""
    with running_second_host(stack, "host-2") as host_id:
        yield host_id


def test_a_host_is_drained_and_taken_back(
    visit: Visit, way: str, stack: EmbeddedStack, console: ConsoleProcess
) -> None:
    """The only one: its replica serves until there is another host for it, and the page says what is waited for."""
    deploy(stack, "moves")
    visitor = visit("operate", way=way, console=console)
    visitor.open(f"/do/drain_host?host_id={FIRST}")
    try:
        show_plan(visitor)
        visitor.press(visitor.page.get_by_role("button", name="Apply"))
        visitor.page.wait_for_url("**/goals/**")
        assert stack.status()["hosts"][0]["draining"]
        visitor.open("/")
        expect(visitor.row("moves")).to_contain_text("1 running, 1 waiting", timeout=SOON_MS)
        assert httpx.get(f"{stack.record()['http_url']}/moves").text == "steady"
    finally:
        visitor.open(f"/do/undrain_host?host_id={FIRST}")
        show_plan(visitor)
        with visitor.page.expect_navigation():
            visitor.press(visitor.page.get_by_role("button", name="Apply"))
    visitor.open("/")
    expect(visitor.row("moves")).to_contain_text("1 running1 of 1", timeout=SOON_MS)
    assert not stack.status()["hosts"][0]["draining"]
    delete(stack, "moves")


def test_a_host_is_drained_under_load_and_its_replicas_go_to_another(
    visit: Visit, way: str, stack: EmbeddedStack, console: ConsoleProcess, second: str
) -> None:
    deploy(stack, "moves", replicas=2)
    visitor, watcher = visit("operate", way=way, console=console), visit("view", console=console)
    watcher.open("/hosts")
    hosts = {host: watcher.page.get_by_role("article", name=f"Host {host}") for host in (FIRST, second)}
    with under_load(f"{stack.record()['http_url']}/moves") as load:
        visitor.open(f"/do/drain_host?host_id={FIRST}")
        show_plan(visitor)
        apply(visitor)
        expect(hosts[FIRST]).to_contain_text("Nothing runs here.", timeout=SOON_MS)
        expect(hosts[FIRST]).to_contain_text("draining")
        expect(hosts[second].get_by_role("link", name="moves")).to_be_visible()
        assert hosts[second].locator(".dot-running").count() == 2
        visitor.open(f"/do/undrain_host?host_id={FIRST}")
        show_plan(visitor)
        with visitor.page.expect_navigation():
            visitor.press(visitor.page.get_by_role("button", name="Apply"))
        expect(hosts[FIRST]).not_to_contain_text("draining")
        visitor.open(f"/do/drain_host?host_id={second}")
        show_plan(visitor)
        apply(visitor)
        expect(hosts[second]).to_contain_text("Nothing runs here.", timeout=SOON_MS)
        assert hosts[FIRST].locator(".dot-running").count() == 2
    assert load.failures == []
    assert len(load.ends) > 100
    delete(stack, "moves")
    stack.request(UndrainHost(host_id=second))

"""Proxies and replicas as on different machines: direct links over TCP, and networks that are cut under load."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import re
import subprocess
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from serve_common.protocol.frames import FRAME_BODY_BYTES_MAX
from tests.compose.stack import PROJECT, Stack

pytestmark = [pytest.mark.compose, pytest.mark.timeout(1500)]

CLIENTS = 4
SIZES = (1_000, 70_000, 300_000, 2_000_000)
CUT_S = 8.0
"""Longer than a link needs to notice that its other end is silent."""
MACHINE_CUT_S = 5.0
"""Shorter than the silence after which a host counts as lost: its replicas would be started elsewhere."""

APP = """
class Echo:
    async def __call__(self, request):
        return await request.body()
"""
METRICS = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:9102/metrics').read().decode())"


def docker(*arguments: str) -> str:
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def apart(stack: Stack) -> Iterator[Stack]:
    """The stack with proxies and replicas apart, and an application that echoes."""
    app = Path(os.environ["MUSTER_APPS"]) / "echo_app"
    app.mkdir(mode=0o755)
    (app / "echo.py").write_text(APP)
    (app / "echo.py").chmod(0o644)
    files = stack.compose.compose_file_name
    assert isinstance(files, list)
    files.append("tests/compose/machines.yaml")
    stack.compose.__dict__.pop("compose_command_property", None)  # it is cached
    try:
        stack.up()
        stack.muster(
            "deploy", "echo:Echo", "--name", "echo", "--route-prefix", "/echo", "--app-dir", "/apps/echo_app",
            "--num-cpus", "0.1", "--num-replicas", "2", "--max-replicas-per-host", "1",
        )  # fmt: skip
        stack.wait_until_healthy("default/echo")
        yield stack
        stack.muster("delete", "echo")
    finally:
        files.pop()
        stack.compose.__dict__.pop("compose_command_property", None)
        stack.up("--remove-orphans")
        with contextlib.suppress(AssertionError):  # it was not made
            docker("network", "rm", f"{PROJECT}_links")


def echo(stack: Stack, body: bytes, *, is_repeatable: bool = False) -> str:
    """What became of one request."""
    headers = {"Idempotency-Key": os.urandom(16).hex()} if is_repeatable else {}
    request = urllib.request.Request(stack.http("/echo"), data=body, method="POST", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=90) as response:
            answer = response.read()
    except urllib.error.HTTPError as error:
        return f"{error.code} {error.read()[:300]!r}"
    except OSError as error:
        return f"{type(error).__name__}: {error}"
    return "right" if hashlib.sha256(answer).digest() == hashlib.sha256(body).digest() else "wrong"


@contextlib.contextmanager
def under_load(
    stack: Stack, sizes: Sequence[int] = SIZES, *, is_repeatable: bool = False
) -> Iterator[Counter[str]]:
    """Clients that post bodies inside the block; not ``is_repeatable``: none may be sent to a second replica."""
    outcomes: Counter[str] = Counter()
    is_over = threading.Event()

    def client(seed: int) -> None:
        rng = random.Random(seed)
        while not is_over.is_set():
            body = rng.randbytes(rng.choice(sizes))
            outcomes[echo(stack, body, is_repeatable=is_repeatable)] += 1

    threads = [threading.Thread(target=client, args=(seed,)) for seed in range(CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        time.sleep(2)
        yield outcomes
        time.sleep(2)
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


def metric(stack: Stack, name: str) -> float:
    page = stack.run("exec", "-T", "proxy", "python", "-c", METRICS)
    return float(re.search(f"^{re.escape(name)} (\\S+)$", page, re.MULTILINE)[1])  # type: ignore[index]


def tcp_links(stack: Stack) -> float:
    """Open links over TCP, after requests that are worth one."""
    for _ in range(8):
        assert echo(stack, bytes(300_000)) == "right"
    return metric(stack, 'serve_proxy_direct_links{transport="tcp"}')


@contextlib.contextmanager
def cut_off(stack: Stack, service: str, *networks: str) -> Iterator[None]:
    """Take a service's container off some of its networks inside the block; it comes back under its address."""
    container = next(iter(stack.containers(service)))
    found = stack.inspect(service)["NetworkSettings"]["Networks"]
    for network in networks:
        docker("network", "disconnect", f"{PROJECT}_{network}", container)
    try:
        yield
    finally:
        for network in networks:
            known = found[f"{PROJECT}_{network}"]
            aliases = [part for alias in known["Aliases"] or () for part in ("--alias", alias)]
            docker("network", "connect", *aliases, f"{PROJECT}_{network}", container)


def test_large_bodies_take_tls_between_containers_without_a_common_directory(apart: Stack) -> None:
    apart.wait_until(lambda: tcp_links(apart) == 2, "the proxy has a link to each replica")
    assert metric(apart, 'serve_proxy_direct_links{transport="unix"}') == 0
    before = metric(apart, 'serve_proxy_direct_frames_total{direction="sent"}')
    assert echo(apart, random.Random(1).randbytes(4_000_000)) == "right"
    assert (
        metric(apart, 'serve_proxy_direct_frames_total{direction="sent"}') - before
        >= 4_000_000 / FRAME_BODY_BYTES_MAX
    )


def test_a_network_of_links_that_is_cut_and_comes_back_fails_no_request(apart: Stack) -> None:
    apart.wait_until(lambda: tcp_links(apart) == 2, "the proxy has a link to each replica")
    lost = metric(apart, 'serve_proxy_direct_dials_total{outcome="lost"}')
    with under_load(apart) as outcomes:
        with cut_off(apart, "proxy", "links"):
            time.sleep(CUT_S)
            in_the_cut = outcomes["right"]
        time.sleep(2)
    print(outcomes, f"{in_the_cut} by the end of the cut")
    assert set(outcomes) == {"right"}
    assert outcomes["right"] > 10
    assert metric(apart, 'serve_proxy_direct_dials_total{outcome="lost"}') > lost
    apart.wait_until(lambda: tcp_links(apart) == 2, "the proxy has both links again")


def test_a_machine_that_is_cut_off_for_seconds_fails_no_request(apart: Stack) -> None:
    apart.wait_until(lambda: tcp_links(apart) == 2, "the proxy has a link to each replica")
    with under_load(apart) as outcomes:
        with cut_off(apart, "replica-host-2", "replicas", "links"):
            time.sleep(MACHINE_CUT_S)
        time.sleep(2)
    print(outcomes)
    assert set(outcomes) == {"right"}
    assert outcomes["right"] > 10
    apart.wait_until(lambda: tcp_links(apart) == 2, "the proxy has both links again")


def test_a_machine_that_is_lost_for_longer_fails_no_request_that_may_be_repeated(apart: Stack) -> None:
    apart.wait_until(lambda: tcp_links(apart) == 2, "the proxy has a link to each replica")

    def live_hosts() -> int:
        return sum(host["status"] == "live" for host in apart.status()["hosts"])

    with under_load(apart, SIZES[:3], is_repeatable=True) as outcomes:
        with cut_off(apart, "replica-host-2", "replicas", "links"):
            apart.wait_until(lambda: live_hosts() == 1, "a host is lost", live_hosts)
            time.sleep(2)
        apart.wait_until(lambda: live_hosts() == 2, "both hosts live", live_hosts)
    print(outcomes)
    assert set(outcomes) == {"right"}
    assert outcomes["right"] > 10
    apart.wait_until_healthy("default/echo")
    apart.wait_until(lambda: tcp_links(apart) == 2, "the proxy has both links again")

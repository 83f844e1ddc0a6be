"""The embedded stack as a user has it: `muster up`, the example under load, and the death of every process in turn.

One stack for the module (it takes seconds to start); each test leaves it whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import os
import shutil
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from serve_common.errors import ServeError
from serve_common.runtime.tasks import raise_if_cancelled
from tests.support.paths import ROOT
from tests.support.stacks.embedded_stack import EmbeddedStack
from tests.support.stacks.scraped_pages import contradictions, missing
from tests.support.waiting import eventually

SAMPLE = (ROOT / "examples" / "digits" / "sample.png").read_bytes()
HEAL_LIMIT_S = 90.0
"""Many times what is promised: this is no measurement, and the machine may be busy."""
REQUESTS_OF_A_HEALED_STACK = 100

pytestmark = pytest.mark.timeout(400)


class Stack(EmbeddedStack):
    """With the example."""

    def deploy(self, *more: str, version: str = "v1", exit_code: int = 0) -> str:
        return self.muster(
            *(
                "deploy",
                "digits:Digits",
                "--app-dir",
                "examples/digits",
                "--name",
                "digits",
                "--route-prefix",
                "/digits",
            ),
            *("--num-replicas", "2", "--num-cpus", "0.5", "--version", version),
            *more,
            exit_code=exit_code,
        )

    @property
    def url(self) -> str:
        return f"{self.record()['http_url']}/digits"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    stack = Stack(tmp_path_factory.mktemp("s") / "state")
    stack.start()
    try:
        stack.deploy()
        yield stack
    finally:
        if stack.process is not None:
            stack.stop()
        stack.output.close()


async def classify(session: aiohttp.ClientSession, url: str) -> str:
    """'ok', or what went wrong."""
    try:
        async with session.post(
            url, data=SAMPLE, headers={"Content-Type": "image/png", "Idempotency-Key": os.urandom(8).hex()}
        ) as response:
            body = await response.json()
            return "ok" if response.status == 200 and body["digit"] == 7 else f"{response.status} {body}"
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        return repr(error)


class Load:
    """Requests that never pause, and how each ended."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.ends: list[str] = []
        self._ended = asyncio.Event()

    @property
    def failures(self) -> list[str]:
        return [end for end in self.ends if end != "ok"]

    async def run(self) -> None:
        timeout = aiohttp.ClientTimeout(total=30)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            while True:
                self.ends.append(await classify(session, self.url))
                self._ended.set()
                raise_if_cancelled()  # a time-out in the same moment would have swallowed it

    async def until(self, count: int) -> None:
        """So many have ended."""
        async with asyncio.timeout(HEAL_LIMIT_S):
            while len(self.ends) < count:
                self._ended.clear()
                await self._ended.wait()


@asynccontextmanager
async def under_load(stack: Stack, workers: int = 4) -> AsyncIterator[Load]:
    load = Load(stack.url)
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(load.run()) for _ in range(workers)]
        try:
            yield load
        finally:
            for task in running:
                task.cancel()


async def killed(stack: Stack, name: str) -> None:
    """Until the next one of it is there, and so all that belonged to the one that was killed is gone."""
    before = stack.pid(name)
    os.kill(before, signal.SIGKILL)
    await replaced(stack, name, before)


async def replaced(stack: Stack, name: str, before: int) -> None:
    await eventually(
        lambda: stack.pid(name) not in (0, before) and stack.is_ready(), within_s=HEAL_LIMIT_S, every_s=0.1
    )


async def until_healed(stack: Stack) -> None:
    """Until ten requests in a row succeed and two replicas serve."""
    begun = time.monotonic()
    timeout = aiohttp.ClientTimeout(total=5)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        good, last = 0, ""
        while good < 10:
            last = await classify(session, stack.url)
            good = good + 1 if last == "ok" else 0
            assert time.monotonic() - begun < HEAL_LIMIT_S, f"not healed: {last}\n{stack.said()}"
            if last != "ok":
                await asyncio.sleep(0.1)
    while True:
        deployment = await asyncio.to_thread(healthy_deployment, stack)
        if deployment is not None:
            return
        assert time.monotonic() - begun < HEAL_LIMIT_S, (
            f"not healthy: {stack.muster('status', exit_code=None)}"
        )
        await asyncio.sleep(0.2)


def healthy_deployment(stack: Stack) -> dict[str, Any] | None:
    try:
        status = stack.status()
    except ServeError:  # NATS or the controller is away
        return None
    deployment = next(d for d in status["deployments"] if d["name"] == "default/digits")
    running = [r for r in deployment["replicas"] if r["state"] == "running"]
    return deployment if deployment["status"] == "healthy" and len(running) == 2 else None


def without_volatile(status: dict[str, Any]) -> list[Any]:
    return [
        (d["name"], d["status"], d["version"], d["route_prefix"], [r["replica_tag"] for r in d["replicas"]])
        for d in status["deployments"]
    ]


async def test_what_the_whole_stack_does_and_says_can_be_watched(stack: Stack) -> None:
    async with under_load(stack, workers=1), asyncio.timeout(HEAL_LIMIT_S):
        top, row = await looked_at_load(stack)
        while (
            top["unreachable"] or not row["requests_per_s"]
        ):  # who stood still did not answer, or served nobody
            top, row = await looked_at_load(stack)
    assert 0 < row["p50_s"] <= row["p99_s"] < 10
    assert (row["running"], row["wanted"], row["errors_per_s"]) == (2, 2, 0.0)
    services: set[str] = set()
    async with asyncio.timeout(HEAL_LIMIT_S):
        while not services >= {"controller", "proxy", "replica-host"}:  # who is slow to answer is left out
            said = await asyncio.to_thread(stack.muster, "logs", "--no-follow", "--tail", "1000", "--json")
            services |= {json.loads(line)["service"] for line in said.splitlines()}


async def looked_at_load(stack: Stack) -> tuple[dict[str, Any], dict[str, Any]]:
    """What `muster top` shows, and its row of the deployment."""
    top = json.loads(await asyncio.to_thread(stack.muster, "top", "--once", "--json", "--interval-s", "1"))
    [row] = [row for row in top["rows"] if row["name"] == "default/digits"]
    return top, row


async def test_a_killed_controller_costs_no_request_and_comes_back_unchanged(stack: Stack) -> None:
    before = without_volatile(stack.status())
    async with under_load(stack) as load:
        await killed(stack, "controller")
        after = without_volatile(await asyncio.to_thread(stack.status))
        await asyncio.to_thread(stack.deploy, "--user-config", '{"threshold": 0.0}')
        await load.until(100)
    assert after == before
    assert load.failures == []


async def test_a_killed_replica_is_replaced(stack: Stack) -> None:
    await until_healed(stack)
    before = {r["replica_tag"] for r in stack.status()["deployments"][0]["replicas"]}
    async with under_load(stack) as load:
        pids = await asyncio.to_thread(replica_pids, stack)
        assert len(pids) == 2
        os.kill(pids[0], signal.SIGKILL)
        begun = time.monotonic()
        while True:
            replicas = (await asyncio.to_thread(stack.status))["deployments"][0]["replicas"]
            running = {r["replica_tag"] for r in replicas if r["state"] == "running"}
            if len(running) == 2 and running != before:
                break
            assert time.monotonic() - begun < HEAL_LIMIT_S, replicas
            await asyncio.sleep(0.1)
    # Every request bears an Idempotency-Key, so even those the dead replica had begun are sent again.
    assert load.failures == []


def processes_of(stack_id: str) -> dict[int, bytes]:
    """Command line by pid of every process that belongs to a stack, as the kernel knows them."""
    marker = f"MUSTER_STACK_ID={stack_id}".encode()
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and marker in (entry / "environ").read_bytes():
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
        except OSError:
            continue
    return found


def replica_pids(stack: Stack) -> list[int]:
    """The actors' processes: Ray names them after their class. Spares are such too, but have not met NATS yet."""
    record = stack.record()
    nats_port = int(record["nats_url"].rpartition(":")[2])
    actors = [pid for pid, command in processes_of(record["stack_id"]).items() if b"ray::Replica" in command]
    return [
        pid
        for pid in actors
        if any(
            end.raddr and end.raddr.port == nats_port for end in psutil.Process(pid).net_connections("tcp")
        )
    ]


async def test_a_killed_raylet_ends_its_host_and_the_next_one_serves(stack: Stack) -> None:
    host = stack.pid("replica-host")
    raylets = [child for child in psutil.Process(host).children(recursive=True) if child.name() == "raylet"]
    assert len(raylets) == 1
    raylets[0].kill()
    await replaced(stack, "replica-host", host)
    await until_healed(stack)


@pytest.mark.parametrize("name", ["proxy", "replica-host", "nats", "postgres"])
async def test_the_stack_heals_by_itself_after_a_kill_of(name: str, stack: Stack) -> None:
    await killed(stack, name)
    await until_healed(stack)
    async with under_load(stack) as load:
        await load.until(REQUESTS_OF_A_HEALED_STACK)
    assert load.failures == []
    stack.deploy(version=f"after-{name}")
    await until_healed(stack)


async def test_changes_under_load_fail_no_request(stack: Stack) -> None:
    async with under_load(stack) as load:
        await asyncio.to_thread(stack.deploy, "--user-config", '{"threshold": 0.5}', version="roll-1")
        await asyncio.to_thread(stack.deploy, "--user-config", '{"threshold": 0.0}', version="roll-1")
        await asyncio.to_thread(stack.deploy, version="roll-2")
        await load.until(100)
    assert load.failures == []


async def test_a_version_that_cannot_start_fails_with_its_traceback_and_the_old_one_serves(
    stack: Stack,
) -> None:
    await until_healed(stack)
    before = stack.status()["deployments"][0]["version"]
    async with under_load(stack) as load:
        for code, folder, told in (
            ("failing:RaisesInConstructor", "failing", ("on purpose", "Traceback")),
            ("nowhere:Nothing", "digits", ("ModuleNotFoundError",)),
        ):
            text = await asyncio.to_thread(
                stack.muster,
                *("deploy", code, "--app-dir", f"examples/{folder}", "--name", "digits"),
                *(
                    "--route-prefix",
                    "/digits",
                    "--version",
                    folder,
                    "--num-cpus",
                    "0.5",
                    "--num-replicas",
                    "2",
                ),
                exit_code=1,
            )
            assert all(words in text for words in told)
    assert load.failures == []
    await until_healed(stack)
    assert stack.status()["deployments"][0]["version"] == before


async def test_a_call_over_nats_is_answered(stack: Stack) -> None:
    text = stack.muster("call", "digits", "--data", json.dumps({"pixels": [0] * 64}))
    assert "probabilities" in text


async def test_every_process_serves_its_metrics(stack: Stack) -> None:
    wanted = {
        "controller": [
            "serve_controller_leader 1.0",
            "serve_controller_replicas{",
            "serve_controller_goals{",
            "\nserve_controller_effects_total",
            "\nserve_controller_replicas_wanted",
        ],
        "console": ["serve_console_sessions 0.0", 'serve_console_sign_ins_total{outcome="ok"}'],
        "proxy": ["serve_proxy_requests_total{", "serve_proxy_request_seconds_bucket{"],
        "replica-host": [
            "serve_replica_requests_total{",
            "serve_host_replicas{",
            "\nserve_replica_start_seconds_count",
            "\nprocess_resident_memory_bytes",
        ],
    }
    pages: dict[str, str] = {}

    def lacking() -> list[str]:
        return [
            f"{name} does not show {line}"
            for name, lines in wanted.items()
            for line in lines
            if line not in pages[name]
        ] + missing(pages)

    begun = time.monotonic()
    async with aiohttp.ClientSession() as session:
        assert await classify(session, stack.url) == "ok"
        while (
            not pages or lacking()
        ):  # replicas write twice a second, and some tell what they counted only then
            assert time.monotonic() - begun < HEAL_LIMIT_S, lacking()
            for name in wanted:
                async with session.get(f"{stack.record()['ops_urls'][name]}/metrics") as response:
                    pages[name] = await response.text()
            await asyncio.sleep(0.1)
    assert contradictions(pages) == []


def leave_litter(state_dir: Path) -> None:
    """What user code could do in places that are written at each start."""
    shutil.rmtree(state_dir / "metrics")
    (state_dir / "metrics").write_text("no directory")
    (state_dir / "nats" / "nats.conf").unlink()
    (state_dir / "nats" / "nats.conf").mkdir()
    ray = state_dir / "ray"
    if ray.exists():
        ray.rename(state_dir / "was-ray")
    ray.symlink_to("/nowhere")


async def test_nothing_of_the_stack_listens_beyond_the_loopback(stack: Stack) -> None:
    """But for HTTP where that is asked for; here it is not."""
    listening = {}
    for pid in processes_of(stack.record()["stack_id"]):
        with contextlib.suppress(psutil.Error):  # one that has just ended
            process = psutil.Process(pid)
            for connection in process.net_connections("inet"):
                if connection.status == psutil.CONN_LISTEN:
                    listening[connection.laddr.port] = (process.name(), connection.laddr.ip)
    beyond = {
        port: told
        for port, told in listening.items()
        if not ipaddress.ip_address(told[1].removeprefix("::ffff:")).is_loopback
    }
    assert beyond == {}
    assert set(stack.record()["ports"].values()) <= set(listening)
    assert any("raylet" in name for name, _ in listening.values())


async def test_a_stopped_stack_brings_its_deployment_back_and_leaves_no_process_behind(stack: Stack) -> None:
    stack_id = stack.record()["stack_id"]
    stack.stop()
    assert processes_of(stack_id) == {}
    leave_litter(stack.state_dir)
    stack.start()
    await until_healed(stack)
    assert [d["name"] for d in stack.status()["deployments"]] == ["default/digits"]


async def test_a_deleted_deployment_is_gone(stack: Stack) -> None:
    stack.muster("delete", "digits")
    assert json.loads(stack.muster("status", "--json"))["deployments"] == []
    async with aiohttp.ClientSession() as session, session.post(stack.url, data=SAMPLE) as response:
        assert response.status == 404
    stack.muster("delete", "digits")

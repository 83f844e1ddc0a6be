"""A real replica host process with real Ray and a real nats-server, driven as a controller and a proxy would."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from muster.secrets import Secrets, generate
from serve_common.config.backend import RayActorOptions, ReplicaConfig
from serve_common.identities.roles import Role, inbox_prefix
from serve_common.names import BackendTag, HostId, ReplicaTag, replica_tag
from serve_common.nats.client import connect_nats
from serve_common.nats.connection import BusConnection, Inbox
from serve_common.nats.login import build_login
from serve_common.nats.options import BusOptions
from serve_common.protocol.frames import (
    LARGE_WINDOW_FRAMES,
    WINDOW_FRAMES,
    AliveHead,
    BodyHead,
    CancelHead,
    CreditHead,
    ErrorHead,
    Head,
    ProbeHead,
    RefusedHead,
    RequestHead,
    RequestKind,
    ResponseHead,
    decode_frame,
    encode_frame,
    split_body,
)
from serve_common.protocol.reports import HostGoal, HostReport, ReplicaGoal, ReplicaReport, ReplicaStatus
from serve_common.protocol.subjects import Subjects
from serve_common.runtime.settings import BusSettings
from tests.support.identities import NAMES, bus_settings, lay_out_nats
from tests.support.paths import ROOT
from tests.support.servers.nats_server import NatsServer
from tests.support.waiting import eventually

pytestmark = pytest.mark.timeout(300)

HOST = HostId("host-1")
IDENTITY_S = 9
"""How long identities of replicas last here: they are renewed every three seconds, whatever else is tested."""
WITHIN_S = 90.0
"""How long is waited for anything whose time is not what a test is about."""
SUBJECTS = Subjects()

APP = """
from __future__ import annotations

import asyncio
import logging
import os
import threading
import time

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse


class Echo:
    def __init__(self, greeting="hello"):
        self.greeting = greeting
        self.cancelled = 0

    def reconfigure(self, user_config):
        self.greeting = user_config["greeting"]

    async def __call__(self, request: Request):
        path = request.url.path
        if path.endswith("/body"):
            return await request.body()
        if path.endswith("/large"):
            return b"x" * int(request.query_params["bytes"])
        if path.endswith("/slow"):
            try:
                await asyncio.sleep(float(request.query_params["s"]))
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
            return "slept"
        if path.endswith("/hold"):
            open(request.query_params["begun"], "w").close()
            while not os.path.exists(request.query_params["until"]):
                await asyncio.sleep(0.01)
            return "held"
        if path.endswith("/spin"):
            open(request.query_params["begun"], "w").close()
            while not os.path.exists(request.query_params["until"]):
                time.sleep(0.01)
            return "spun"
        if path.endswith("/stream"):
            async def pieces():
                for number in range(int(request.query_params["n"])):
                    yield b"%d," % number
            return StreamingResponse(pieces(), media_type="text/event-stream")
        if path.endswith("/teapot"):
            raise HTTPException(418, "short and stout")
        if path.endswith("/raise"):
            raise ValueError("no such digit")
        if path.endswith("/object"):
            return object()
        if path.endswith("/kill"):
            os._exit(3)
        return JSONResponse({
            "greeting": self.greeting, "method": request.method, "path": path,
            "query": dict(request.query_params), "header": request.headers.get("x-a"),
            "cancelled": self.cancelled, "env": os.environ.get("FLAVOUR"),
        })


ALL_PLAIN = threading.Barrier(20)


def plain(request: Request) -> dict:
    ALL_PLAIN.wait(timeout=60)
    return {"plain": request.query_params.get("a")}


class Broken:
    def __init__(self):
        print("before it broke")
        self.load()

    def load(self):
        raise RuntimeError("the model file is missing")


class Stuck:
    def __init__(self):
        time.sleep(600)

    def __call__(self, request):
        return "never"


class Sick:
    checks = 0

    def check_health(self):
        self.checks += 1
        if self.checks > 1:  # the first belongs to the start
            raise RuntimeError("no disk")

    def __call__(self, request):
        return "sick"


class Talker:
    def __init__(self):
        print("constructed")

    async def __call__(self, request: Request):
        if request.url.path.endswith("/flood"):
            await asyncio.to_thread(self.flood, int(request.query_params["n"]))
            return "flooded"
        if request.url.path.endswith("/rss"):
            with open("/proc/self/status") as status:
                return next(line.split()[1] for line in status if line.startswith("VmRSS"))
        if request.url.path.endswith("/say"):
            print("printed for", request.query_params["who"])
            await asyncio.to_thread(logging.getLogger("talker").warning, "logged", extra={"shape": [1, 2]})
        return "said"

    def flood(self, count):
        for number in range(count):
            print("line", number, "of", count, "x" * 50)


class Picky:
    def reconfigure(self, user_config):
        if user_config == "bad":
            raise ValueError("user_config: is bad")

    def __call__(self, request):
        return "picky"
"""


class Stack:
    """What the tests of this module share: a nats-server and one host process."""

    def __init__(self, url: str, secrets: Secrets, host: subprocess.Popen[bytes]) -> None:
        self.url = url
        self.secrets = secrets
        self.host = host
        self.ops_url = ""
        self.app_dir = ""
        self.log = Path()
        self.metrics_dir = Path()

    def bus_settings(self, role: Role) -> BusSettings:
        return bus_settings(self.secrets, self.url, role)

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(self.ops_url + path, timeout=30) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The host is started before NATS is there, and without a home directory."""
    directory = tmp_path_factory.mktemp("host")
    (directory / "apps").mkdir()
    (directory / "apps" / "host_app.py").write_text(APP)
    ray_dir = Path(tempfile.mkdtemp(prefix="mr", dir="/tmp"))  # short: Ray puts unix sockets below it
    secrets = generate(directory / "secrets")
    nats = NatsServer(directory, config=lay_out_nats(directory, secrets).read_text())
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MUSTER_", "RAY_", "PROMETHEUS_"))
    } | {
        "HOME": "/nonexistent",
        "MUSTER_NATS_URL": nats.url,
        "MUSTER_NATS_KEYS_FILE": str(secrets.keys_file(Role.HOST)),
        "MUSTER_HOST_ID": HOST,
        "MUSTER_OPS_PORT": "0",
        "MUSTER_RAY_TEMP_DIR": str(ray_dir),
        "MUSTER_NUM_CPUS": "4",
        "MUSTER_SPARE_REPLICAS": "2",
        "MUSTER_APP_ROOT": str(directory),
        "MUSTER_DRAIN_TIMEOUT_S": "30",
        "MUSTER_UNHEALTHY_AFTER_S": "2",
        "MUSTER_REPLICA_IDENTITY_S": str(IDENTITY_S),
    }
    command = [sys.executable, "-m", "serve_replica_host"]
    log_path = directory / "host.log"
    with log_path.open("wb") as log:
        host = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=directory)
    stack = Stack(nats.url, secrets, host)
    stack.log, stack.app_dir = log_path, "apps"
    stack.metrics_dir = ray_dir / f"metrics-{HOST}"
    try:
        stack.ops_url = f"http://127.0.0.1:{_port(stack)}"
        _until_told(stack, "/readyz", (503, "NATS is not connected\n"))
        _until_told(stack, "/healthz", (200, "ok\n"))  # a restart would not help
        nats.start()
        _until_told(stack, "/readyz", (200, "ok\n"))
        yield stack
    finally:
        if host.poll() is None:
            host.terminate()
        try:
            host.wait(60)
        finally:
            host.kill()
            nats.close()
            shutil.rmtree(ray_dir, ignore_errors=True)


def _until_told(stack: Stack, path: str, expected: tuple[int, str]) -> None:
    give_up_at = time.monotonic() + 180
    while stack.get(path) != expected:
        assert stack.host.poll() is None, stack.log.read_text()
        assert time.monotonic() < give_up_at, stack.log.read_text()
        time.sleep(0.05)  # it is asked again and again, as by an orchestrator


def _port(stack: Stack) -> int:
    give_up_at = time.monotonic() + 120
    while time.monotonic() < give_up_at:
        for line in host_lines(stack):
            if line["event"] == "operations_port":
                return int(line["port"])
        assert stack.host.poll() is None, stack.log.read_text()
        time.sleep(0.05)  # the log is where a port chosen by the system is told
    raise AssertionError(stack.log.read_text())


class Request:
    """One request from a router's point of view."""

    def __init__(self, driver: Driver, subject: bytes, credit: bool) -> None:
        self._driver = driver
        self._subject = subject
        self._gives_credit = credit
        self.frames: asyncio.Queue[tuple[Head, bytes]] = asyncio.Queue()
        self.credits = WINDOW_FRAMES - 1
        self.credited = 0
        self._credited = asyncio.Event()
        self.token, self.reply = driver.inbox.new_reply(self._take, self._nobody)

    def _take(self, payload: bytes, _reply: bytes, _headers: bytes | None) -> None:
        head, body = decode_frame(payload)
        if isinstance(head, CreditHead):
            self.credits += head.frames
            self._credited.set()
            return
        if isinstance(head, BodyHead) and self._gives_credit:
            self.credited += 1
            self.send(CreditHead(1, self.credited))
        self.frames.put_nowait((head, bytes(body)))

    def _nobody(self) -> None:
        self.frames.put_nowait((RefusedHead("no_responders", 0), b""))

    def send(self, head: Head, body: bytes | memoryview = b"") -> None:
        self._driver.connection.publish(self._subject, encode_frame(head, body), self.reply)

    async def wait_credit(self) -> None:
        while self.credits <= 0:
            self._credited.clear()
            await self._credited.wait()
        self.credits -= 1

    async def frame(self, timeout_s: float = 60) -> tuple[Head, bytes]:
        return await asyncio.wait_for(self.frames.get(), timeout_s)

    async def answer(self, timeout_s: float = 60) -> tuple[Head, bytes]:
        """The head, and the whole body if there is one."""
        head, body = await self.frame(timeout_s)
        if not isinstance(head, ResponseHead) or head.last:
            return head, body
        pieces, expected = [body], 1
        while True:
            more, piece = await self.frame(timeout_s)
            if isinstance(more, ErrorHead):
                return more, b"".join(pieces)
            assert isinstance(more, BodyHead)
            assert more.sequence == expected
            expected += 1
            pieces.append(piece)
            if more.last:
                return head, b"".join(pieces)


class Driver:
    """Plays the controller (goals, reports) and a router (frames)."""

    _generation = itertools.count(1)
    _ordinal = itertools.count(1)

    def __init__(self, stack: Stack, connection: BusConnection, controller: Any) -> None:
        self.stack = stack
        self.connection = connection
        self.inbox = Inbox(connection, f"t{random.randrange(10**9)}")
        self.controller = controller
        self.reports: list[HostReport] = []
        self._reported = asyncio.Event()

    def on_report(self, payload: bytes) -> None:
        self.reports.append(msgspec.json.decode(payload, type=HostReport))
        self._reported.set()

    async def until(
        self, holds: Callable[[HostReport], bool], *, heard_before: int | None = None
    ) -> HostReport:
        """The first report, from now on or after the first ``heard_before``, of which ``holds`` is true."""
        looked_at = len(self.reports) if heard_before is None else heard_before
        async with asyncio.timeout(WITHIN_S):
            while True:
                while looked_at < len(self.reports):
                    report = self.reports[looked_at]
                    looked_at += 1
                    if holds(report):
                        return report
                self._reported.clear()
                await self._reported.wait()

    async def until_status(self, tag: ReplicaTag, status: ReplicaStatus) -> ReplicaReport:
        report = await self.until(lambda r: _status(r, tag) is status)
        return next(replica for replica in report.replicas if replica.replica_tag == tag)

    def replica(self, attribute: str, **changes: Any) -> ReplicaGoal:
        backend = BackendTag("default/app")
        config = ReplicaConfig(
            import_path=f"host_app:{attribute}",
            app_dir=self.stack.app_dir,
            ray_actor_options=changes.pop("ray_actor_options", RayActorOptions(num_cpus=0.1)),
            init_kwargs=changes.pop("init_kwargs", {}),
        )
        fields: dict[str, Any] = {
            "replica_tag": replica_tag(backend, next(self._ordinal)),
            "backend_tag": backend,
            "replica_config": config,
            "config_version": 1,
            "max_concurrent_queries": 100,
            "graceful_shutdown_timeout_s": 5.0,
            "health_check_period_s": 10.0,
            "health_check_timeout_s": 10.0,
            "start_timeout_s": WITHIN_S,
        }
        return ReplicaGoal(**(fields | changes))

    async def goal(
        self,
        *replicas: ReplicaGoal,
        epoch: int = 1,
        generation: int | None = None,
        kill: tuple[ReplicaTag, ...] = (),
    ) -> int:
        generation = next(self._generation) if generation is None else generation
        goal = HostGoal(
            host_id=HOST, epoch=epoch, generation=generation, replicas=list(replicas), kill=list(kill)
        )
        await self.controller.publish(SUBJECTS.host_goal(HOST), msgspec.json.encode(goal))
        return generation

    async def run(self, *replicas: ReplicaGoal) -> None:
        """Make these the goal and wait until all of them serve."""
        await self.goal(*replicas)
        tags = {replica.replica_tag for replica in replicas}
        await self.until(
            lambda r: {x.replica_tag for x in r.replicas if x.status is ReplicaStatus.RUNNING} == tags
        )

    def request(
        self,
        tag: ReplicaTag,
        path: str = "/app",
        *,
        query: str = "",
        body: bytes = b"",
        timeout_s: float = WITHIN_S,
        method: str = "POST",
        credit: bool = True,
        kind: RequestKind = RequestKind.HTTP,
    ) -> Request:
        request = Request(self, SUBJECTS.replica(tag).encode(), credit)
        head = RequestHead(
            kind=kind,
            method=method,
            path=path,
            route="/app",
            query=query,
            headers=[(b"x-a", b"b"), (b"content-type", b"application/octet-stream")],
            timeout_s=timeout_s,
            body_bytes=len(body),
            endpoint_tag="default/app",
            request_id=f"r-{request.token}",
        )
        request.send(head, split_body(body)[0])
        return request

    async def call(self, tag: ReplicaTag, path: str = "/app", **options: Any) -> tuple[Head, bytes]:
        return await self.request(tag, path, **options).answer()

    async def hold(self, tag: ReplicaTag, directory: Path) -> Request:
        """A request that the replica works on, until there is the file ``go`` in ``directory``."""
        begun = directory / "begun"
        held = self.request(tag, "/app/hold", query=f"begun={begun}&until={directory / 'go'}")
        await until_so(begun.exists)
        return held

    async def until_nobody_answers(self, tag: ReplicaTag) -> None:
        """Until NATS says so. What it sends before it sees that a killed process' connection ended, nobody answers."""
        async with asyncio.timeout(WITHIN_S):
            while True:
                try:
                    told, _ = await self.request(tag).answer(1.0)
                except TimeoutError:
                    continue
                assert told == RefusedHead("no_responders", 0)
                return


def _actors(stack: Stack) -> list[psutil.Process]:
    """The processes of replicas, and those that wait to become one."""
    children = psutil.Process(stack.host.pid).children(recursive=True)
    return [child for child in children if "ReplicaActor" in _title(child)]


async def until_so(is_so: Callable[[], object]) -> None:
    await eventually(is_so, within_s=WITHIN_S)


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # it has ended
        return ""


async def _alive(*pids: int) -> list[int]:
    """Those that have not ended within some time; one that only waits to be reaped has."""
    processes = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            processes.append(psutil.Process(pid))
    _, left = await asyncio.to_thread(psutil.wait_procs, [p for p in processes if _title(p)], 60)
    return [process.pid for process in left if _title(process)]


def _reports(report: HostReport, tag: ReplicaTag) -> list[ReplicaReport]:
    """None or one."""
    return [x for x in report.replicas if x.replica_tag == tag]


def _status(report: HostReport, tag: ReplicaTag) -> ReplicaStatus | None:
    return next((x.status for x in _reports(report, tag)), None)


@pytest.fixture
async def driver(stack: Stack) -> AsyncIterator[Driver]:
    options = BusOptions(
        servers=[stack.url],
        login=build_login(stack.bus_settings(Role.PROXY)),
        inbox_prefix=inbox_prefix(Role.PROXY, NAMES[Role.PROXY]),
    )
    connection = BusConnection(options, random.Random(1))
    await connection.connect(WITHIN_S)
    controller = await connect_nats(stack.bus_settings(Role.CONTROLLER), name="test", deadline_s=WITHIN_S)
    driver = Driver(stack, connection, controller)

    async def on_report(message: Any) -> None:
        driver.on_report(message.data)

    await controller.subscribe(SUBJECTS.host_reports, cb=on_report)
    await controller.flush()
    yield driver
    await controller.close()
    await connection.close()


async def test_a_replica_outlives_its_identity_and_loses_nothing(stack: Stack, driver: Driver) -> None:
    """NATS ends a connection whose token has expired; who has a newer one moves to another link before."""
    echo = driver.replica("Echo", init_kwargs={"greeting": "hi"})
    await driver.run(echo)
    began = time.monotonic()
    requests = 0
    while time.monotonic() - began < 2 * IDENTITY_S:
        head, body = await driver.call(echo.replica_tag, "/app/x", query=f"q={requests}")
        assert isinstance(head, ResponseHead), head
        assert (head.status, json.loads(body)["query"]) == (200, {"q": str(requests)})
        requests += 1
    said = [line for line in host_lines(stack) if line.get("replica_tag") == echo.replica_tag]
    renewed = [line for line in said if line["event"] == "bus_renewed"]
    assert len(renewed) >= 4
    assert not [line for line in said if line["event"] in {"bus_disconnected", "bus_not_renewed"}]
    assert requests > 10 * len(renewed)


async def test_async_code_knows_method_path_query_headers_and_its_environment(driver: Driver) -> None:
    options = RayActorOptions(num_cpus=0.1, runtime_env={"env_vars": {"FLAVOUR": "vanilla"}})
    echo = driver.replica("Echo", init_kwargs={"greeting": "hi"}, ray_actor_options=options)
    await driver.run(echo)

    head, body = await driver.call(echo.replica_tag, "/app/a%20b", query="q=1", method="PUT")

    assert isinstance(head, ResponseHead)
    assert (head.status, head.in_flight) == (200, 0)
    assert dict(head.headers)[b"content-type"] == b"application/json"
    assert json.loads(body) == {
        "greeting": "hi", "method": "PUT", "path": "/app/a b", "query": {"q": "1"},
        "header": "b", "cancelled": 0, "env": "vanilla",
    }  # fmt: skip


async def test_the_host_reports_the_address_of_its_page(driver: Driver) -> None:
    report = await driver.until(lambda report: bool(report.metrics_url))
    assert report.metrics_url == f"{driver.stack.ops_url}/metrics"
    _, page = await asyncio.to_thread(driver.stack.get, "/metrics?name[]=serve_host_info")
    assert f'serve_host_info{{host_id="{HOST}"}} 1.0' in page


async def test_plain_functions_run_at_the_same_time_in_threads(driver: Driver) -> None:
    plain = driver.replica("plain")
    await driver.run(plain)

    # None of them ends before all twenty have begun.
    answers = await asyncio.gather(*(driver.call(plain.replica_tag, query=f"a={n}") for n in range(20)))

    assert [json.loads(body) for _, body in answers] == [{"plain": str(n)} for n in range(20)]


async def test_errors_of_user_code_arrive_as_what_they_are(driver: Driver) -> None:
    echo = driver.replica("Echo")
    await driver.run(echo)

    raised, _ = await driver.call(echo.replica_tag, "/app/raise")
    teapot, text = await driver.call(echo.replica_tag, "/app/teapot")
    unsendable, _ = await driver.call(echo.replica_tag, "/app/object")

    assert raised == ErrorHead("user_code_raised", 500, "ValueError: no such digit", 0)
    assert isinstance(teapot, ResponseHead)
    assert (teapot.status, text) == (418, b"short and stout")
    assert isinstance(unsendable, ErrorHead)
    assert "object" in unsendable.message
    assert "JSON" in unsendable.message


async def test_a_failed_import_and_a_raising_constructor_are_reported_with_their_reason(
    driver: Driver,
) -> None:
    broken, missing, lost = (driver.replica(name) for name in ("Broken", "Absent", "Echo"))
    config = msgspec.structs.replace(lost.replica_config, import_path="no_such_module:App")
    await driver.goal(broken, missing, msgspec.structs.replace(lost, replica_config=config))

    failed = await driver.until_status(broken.replica_tag, ReplicaStatus.FAILED)
    absent = await driver.until_status(missing.replica_tag, ReplicaStatus.FAILED)
    unimported = await driver.until_status(lost.replica_tag, ReplicaStatus.FAILED)

    assert failed.error.endswith("RuntimeError: the model file is missing")
    assert "in load" in failed.error
    assert "serve_replica_host" not in failed.error
    assert "has no Absent" in absent.error
    *_, raised, hint = unimported.error.splitlines()
    assert raised == "ModuleNotFoundError: No module named 'no_such_module'"
    assert "runtime_env" in hint
    await driver.goal()
    await driver.until(lambda report: not report.replicas)


async def test_reconfigure_changes_a_running_replica_and_keeps_its_process(driver: Driver) -> None:
    echo = driver.replica("Echo")
    await driver.run(echo)
    before = await driver.until_status(echo.replica_tag, ReplicaStatus.RUNNING)

    await driver.goal(msgspec.structs.replace(echo, config_version=2, user_config={"greeting": "moin"}))
    report = await driver.until(lambda r: r.replicas and r.replicas[-1].config_version == 2)

    _, body = await driver.call(echo.replica_tag)
    assert json.loads(body)["greeting"] == "moin"
    assert report.replicas[-1].pid == before.pid


async def test_a_refused_configuration_is_reported_and_the_replica_serves_on(driver: Driver) -> None:
    picky = driver.replica("Picky")
    await driver.run(picky)

    await driver.goal(msgspec.structs.replace(picky, config_version=2, user_config="bad"))
    report = await driver.until(lambda r: r.replicas and r.replicas[-1].config_error_version == 2)

    assert report.replicas[-1].status is ReplicaStatus.RUNNING
    assert report.replicas[-1].config_version == 1
    assert report.replicas[-1].error.endswith("ValueError: user_config: is bad")
    assert (await driver.call(picky.replica_tag))[1] == b"picky"


async def test_a_drained_replica_finishes_what_is_in_flight_and_refuses_the_rest(
    driver: Driver, tmp_path: Path
) -> None:
    echo = driver.replica("Echo", graceful_shutdown_timeout_s=WITHIN_S)
    await driver.run(echo)
    held = await driver.hold(echo.replica_tag, tmp_path)

    await driver.goal()
    async with asyncio.timeout(WITHIN_S):
        while isinstance((refused := (await driver.call(echo.replica_tag))[0]), ResponseHead):
            pass  # the goal is on its way
    (tmp_path / "go").touch()
    answered, body = await held.answer()
    await driver.until(lambda report: not report.replicas)

    assert refused == RefusedHead("draining", 1)
    assert isinstance(answered, ResponseHead)
    assert body == b"held"
    await driver.until_nobody_answers(echo.replica_tag)


async def test_a_killed_replica_process_is_reported_dead_at_once(driver: Driver) -> None:
    echo = driver.replica("Echo", health_check_period_s=3600.0)  # so that it is no check that finds it
    await driver.run(echo)
    running = await driver.until_status(echo.replica_tag, ReplicaStatus.RUNNING)

    os.kill(running.pid, signal.SIGKILL)
    dead = await driver.until_status(echo.replica_tag, ReplicaStatus.DEAD)

    assert str(running.pid) in dead.error
    await driver.until_nobody_answers(echo.replica_tag)
    await driver.goal()
    await driver.until(lambda report: not report.replicas)
    await driver.goal(echo)
    again = await driver.until_status(echo.replica_tag, ReplicaStatus.DEAD)
    assert "never used again" in again.error


async def test_large_bodies_travel_both_ways_in_frames_under_credit(driver: Driver) -> None:
    echo = driver.replica("Echo")
    await driver.run(echo)
    sent = random.Random(3).randbytes(3 * 1024 * 1024 + 17)

    request = driver.request(echo.replica_tag, "/app/body", body=sent)
    _, *rest = split_body(sent)
    for number, piece in enumerate(rest, 1):
        await request.wait_credit()
        request.send(BodyHead(number, number == len(rest)), piece)
    head, received = await request.answer()

    assert isinstance(head, ResponseHead)
    assert dict(head.headers)[b"content-length"] == b"%d" % len(sent)
    assert received == sent


async def test_an_answer_waits_for_credit_beyond_its_deadline_and_a_cancel_frees_its_slot(
    driver: Driver,
) -> None:
    echo = driver.replica("Echo", max_concurrent_queries=1)
    await driver.run(echo)

    deadline_s = 2.0  # within which the answer must have begun, as slow as the machine may be
    stuck = driver.request(
        echo.replica_tag, "/app/large", query="bytes=5000000", credit=False, timeout_s=deadline_s
    )
    frames = [await stuck.frame() for _ in range(LARGE_WINDOW_FRAMES)]
    await asyncio.sleep(deadline_s)
    busy, _ = await driver.call(echo.replica_tag)
    stuck.send(CancelHead())

    assert [type(head) for head, _ in frames] == [ResponseHead, *[BodyHead] * (LARGE_WINDOW_FRAMES - 1)]
    assert busy == RefusedHead("busy", 1)
    assert stuck.frames.empty()
    async with asyncio.timeout(WITHIN_S):
        while not isinstance((await driver.call(echo.replica_tag))[0], ResponseHead):
            pass  # the cancel is on its way


async def test_a_streamed_answer_arrives_whole_and_in_order(driver: Driver) -> None:
    echo = driver.replica("Echo")
    await driver.run(echo)

    head, body = await driver.call(echo.replica_tag, "/app/stream", query="n=2000")

    assert isinstance(head, ResponseHead)
    assert dict(head.headers)[b"content-type"].startswith(b"text/event-stream")
    assert body == b"".join(b"%d," % number for number in range(2000))


async def test_cancel_ends_the_work_and_gives_the_slot_back(driver: Driver) -> None:
    echo = driver.replica("Echo", max_concurrent_queries=2)
    await driver.run(echo)
    slow = driver.request(echo.replica_tag, "/app/slow", query="s=600", timeout_s=600.0)
    during, _ = await driver.call(echo.replica_tag)

    slow.send(CancelHead())
    async with asyncio.timeout(WITHIN_S):
        while True:
            after, body = await driver.call(echo.replica_tag)
            assert isinstance(after, ResponseHead)
            # The body is made before the head is, so it may still tell of the moment before.
            if after.in_flight == 0 and json.loads(body)["cancelled"] == 1:
                break

    assert isinstance(during, ResponseHead)
    assert during.in_flight == 1
    assert slow.frames.empty()


async def test_user_code_that_blocks_its_loop_stops_no_probe_and_no_refusal(
    driver: Driver, tmp_path: Path
) -> None:
    echo = driver.replica("Echo", max_concurrent_queries=1)
    await driver.run(echo)
    begun, until = tmp_path / "begun", tmp_path / "until"
    spinning = driver.request(echo.replica_tag, "/app/spin", query=f"begun={begun}&until={until}")
    await until_so(begun.exists)

    busy, _ = await driver.call(echo.replica_tag)
    stranger = Request(driver, SUBJECTS.replica(echo.replica_tag).encode(), credit=True)
    stranger.send(ProbeHead())
    unknown, _ = await stranger.frame()
    spinning.send(ProbeHead())
    alive, _ = await spinning.frame()

    assert spinning.frames.empty(), "all that was while it blocked"
    until.touch()
    assert busy == RefusedHead("busy", 1)
    assert unknown == RefusedHead("unknown", 1)
    assert alive == AliveHead()
    assert (await spinning.answer())[1] == b"spun"


async def test_a_replica_without_room_waits_and_says_why_until_its_time_is_over(driver: Driver) -> None:
    options = RayActorOptions(num_cpus=40)
    patient = driver.replica("Echo", ray_actor_options=options, start_timeout_s=600.0)
    hasty = driver.replica("Echo", ray_actor_options=options, start_timeout_s=3.0)
    await driver.goal(patient, hasty)

    failed = await driver.until_status(hasty.replica_tag, ReplicaStatus.FAILED)
    waiting = await driver.until(lambda r: any("40 CPU" in x.error for x in _reports(r, patient.replica_tag)))

    assert "longer than 3 s" in failed.error
    assert "40 CPU" in failed.error
    assert _status(waiting, patient.replica_tag) is ReplicaStatus.STARTING


@pytest.mark.parametrize(("num_cpus", "fitting"), [(3.0, 1), (1.9, 2)])
async def test_a_replica_that_was_given_up_before_it_was_placed_takes_no_room_later(
    driver: Driver, num_cpus: float, fitting: int
) -> None:
    """Both by an actor of its own and by one that waits: neither may come late."""
    options = RayActorOptions(num_cpus=num_cpus)
    first = [driver.replica("Echo", ray_actor_options=options) for _ in range(fitting)]
    await driver.run(*first)
    late = driver.replica("Echo", ray_actor_options=options, start_timeout_s=3.0)
    await driver.goal(*first, late)

    failed = await driver.until_status(late.replica_tag, ReplicaStatus.FAILED)
    await driver.goal()
    await driver.until(lambda report: not report.replicas)
    await driver.run(*(driver.replica("Echo", ray_actor_options=options) for _ in range(fitting)))

    assert failed.pid == 0
    assert "longer than 3 s" in failed.error
    assert f"{num_cpus:g} CPU" in failed.error


async def test_a_stuck_constructor_keeps_no_other_replica_waiting_and_is_killed_when_its_time_is_over(
    driver: Driver,
) -> None:
    stuck = driver.replica("Stuck", start_timeout_s=600.0)
    short = driver.replica("Stuck", start_timeout_s=1.0)
    echo = driver.replica("Echo")
    await driver.goal(stuck, short, echo)

    heard_before = len(driver.reports)
    report = await driver.until(
        lambda r: (
            _status(r, echo.replica_tag) is ReplicaStatus.RUNNING
            and any(x.pid for x in _reports(r, stuck.replica_tag))
        )
    )
    failed = await driver.until_status(short.replica_tag, ReplicaStatus.FAILED)

    assert _status(report, stuck.replica_tag) is ReplicaStatus.STARTING
    assert "longer than 1 s" in failed.error
    await driver.goal()
    await driver.until(lambda report: not report.replicas)
    pids = {x.pid for r in driver.reports[heard_before:] for x in r.replicas if x.pid}
    assert await _alive(*pids) == []


async def test_a_replica_that_does_not_stop_keeps_no_other_waiting_and_is_killed_by_force(
    driver: Driver,
) -> None:
    patient = driver.replica("Echo", graceful_shutdown_timeout_s=600.0)
    hasty = driver.replica("Echo", graceful_shutdown_timeout_s=0.5)
    await driver.run(patient, hasty)
    pids = [
        (await driver.until_status(goal.replica_tag, ReplicaStatus.RUNNING)).pid for goal in (patient, hasty)
    ]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    echo = driver.replica("Echo")

    await driver.goal(echo)
    started = await driver.until(lambda r: _status(r, echo.replica_tag) is ReplicaStatus.RUNNING)
    ended = await driver.until(lambda r: _status(r, hasty.replica_tag) is None)

    assert _status(started, patient.replica_tag) is ReplicaStatus.DRAINING
    assert _status(ended, patient.replica_tag) is ReplicaStatus.DRAINING
    await driver.goal(echo, kill=(patient.replica_tag,))
    await driver.until(lambda r: _status(r, patient.replica_tag) is None)
    assert await _alive(*pids) == []


async def test_a_replica_to_be_killed_is_not_waited_for(driver: Driver, tmp_path: Path) -> None:
    echo = driver.replica("Echo", graceful_shutdown_timeout_s=3600.0)
    await driver.run(echo)
    await driver.hold(echo.replica_tag, tmp_path)
    await driver.goal()
    await driver.until_status(echo.replica_tag, ReplicaStatus.DRAINING)

    await driver.goal(kill=(echo.replica_tag,))

    await driver.until(lambda report: not report.replicas)


async def test_a_storm_of_starts_and_kills_costs_no_bystander_its_health_and_leaves_no_metrics(
    driver: Driver, stack: Stack
) -> None:
    """Replicas come and go faster than they can start; one that is checked often stays what it is."""
    bystander = driver.replica(
        "Echo",
        health_check_period_s=0.2,
        health_check_timeout_s=2.0,
        health_check_failure_threshold=1,
    )
    await driver.run(bystander)
    pid = (await driver.until_status(bystander.replica_tag, ReplicaStatus.RUNNING)).pid
    heard_before = len(driver.reports)

    for _ in range(40):
        await driver.goal(bystander, *(driver.replica("Echo") for _ in range(25)))
        await asyncio.sleep(0.05)  # a storm has a rate
    await driver.goal(bystander)
    await driver.until(
        lambda r: [x.replica_tag for x in r.replicas] == [bystander.replica_tag],
        heard_before=len(driver.reports),
    )

    told = {_status(report, bystander.replica_tag) for report in driver.reports[heard_before:]}
    assert told == {ReplicaStatus.RUNNING}
    assert (await driver.until_status(bystander.replica_tag, ReplicaStatus.RUNNING)).pid == pid
    files = stack.metrics_dir.glob
    await until_so(lambda: {file.stem.rpartition("_")[2] for file in files("*.db")} == {str(pid)})


async def test_replicas_start_also_when_the_processes_that_wait_for_them_were_killed(
    driver: Driver, stack: Stack
) -> None:
    await driver.goal()
    await driver.until(lambda report: not report.replicas)
    spares: list[psutil.Process] = []
    while not spares:  # they are started when nothing else is
        spares = _actors(stack)
        await asyncio.sleep(0.05)
    for spare in spares:
        with contextlib.suppress(psutil.NoSuchProcess):  # one that was a replica may end in this moment
            spare.kill()
    await asyncio.to_thread(psutil.wait_procs, spares, 60)
    await driver.until(lambda report: True)

    await driver.run(*(driver.replica("Echo") for _ in range(3)))


async def test_a_sick_replica_is_reported_unhealthy(driver: Driver) -> None:
    sick = driver.replica("Sick", health_check_period_s=0.1)
    await driver.goal(sick)

    unhealthy = await driver.until_status(sick.replica_tag, ReplicaStatus.UNHEALTHY)

    assert unhealthy.error.endswith("RuntimeError: no disk")


async def test_an_older_goal_is_refused_and_a_notice_of_a_leader_is_answered_by_a_report(
    driver: Driver,
) -> None:
    generation = await driver.goal()
    await driver.until(lambda report: report.generation == generation and not report.replicas)

    await driver.goal(driver.replica("Echo"), generation=generation - 1)
    report = await driver.until(lambda report: True)

    assert (report.generation, report.replicas) == (generation, [])
    assert report.resources["CPU"] == 4.0
    assert not any(name.startswith("node:") for name in report.resources)


async def test_metrics_keep_the_totals_of_ended_replicas(driver: Driver, stack: Stack) -> None:
    echo = driver.replica("Echo")
    await driver.run(echo)
    for _ in range(3):
        await driver.call(echo.replica_tag)
    await driver.goal()
    await driver.until(lambda report: not report.replicas)

    def answered() -> float:
        shown = samples(stack, "counter").items()
        return sum(
            value
            for name, value in shown
            if name.startswith("serve_replica_requests_total") and "('code', '200')" in name
        )

    total = answered()
    text = stack.get("/metrics")[1]
    assert total >= 3
    assert 'serve_host_replicas{status="running"} 0.0' in text
    assert "serve_replica_request_seconds_bucket" in text
    assert "serve_replica_refused_total" in text
    await driver.run(driver.replica("Echo"))
    assert answered() == total


def samples(stack: Stack, *kinds: str) -> dict[str, float]:
    """What the host's page shows of metrics of these kinds."""
    return {
        f"{sample.name}{sorted(sample.labels.items())}": sample.value
        for family in text_string_to_metric_families(stack.get("/metrics")[1])
        if family.type in kinds
        for sample in family.samples
        if sample.name.startswith("serve_")
    }


async def test_the_death_of_a_replica_lets_no_counter_fall(driver: Driver, stack: Stack) -> None:
    async def until(is_so: Callable[[dict[str, float]], bool]) -> None:
        await eventually(lambda: is_so(samples(stack, "counter", "gauge", "histogram")), within_s=WITHIN_S)

    echo = driver.replica("Echo")
    await driver.run(echo)
    backend = [("backend_tag", str(echo.backend_tag))]
    ongoing, in_flight = (
        f"serve_replica_{name}{backend}" for name in ("ongoing_seconds_total", "in_flight_requests")
    )
    await until(lambda shown: ongoing in shown)
    at_first = samples(stack, "counter")[ongoing]
    await driver.call(echo.replica_tag)
    driver.request(echo.replica_tag, "/app/slow", query="s=600", timeout_s=600.0)
    await until(lambda shown: shown[ongoing] >= at_first + 0.5 and shown.get(in_flight) == 1.0)
    before = samples(stack, "counter", "histogram")

    running = await driver.until_status(echo.replica_tag, ReplicaStatus.RUNNING)
    os.kill(running.pid, signal.SIGKILL)
    await driver.until_status(echo.replica_tag, ReplicaStatus.DEAD)
    await until(lambda shown: in_flight not in shown)
    after = samples(stack, "counter", "histogram")

    assert {name: after.get(name, -1.0) for name in before if after.get(name, -1.0) < before[name]} == {}
    deaths = f"serve_replica_failures_total{[*backend, ('reason', 'death')]}"
    assert after[deaths] == before.get(deaths, 0.0) + 1.0
    await driver.goal()
    await driver.until(lambda report: not report.replicas)


def host_lines(stack: Stack) -> list[dict[str, Any]]:
    whole, _, _ = stack.log.read_text().rpartition("\n")  # what follows is being written
    return [json.loads(line) for line in whole.splitlines()]


async def muster_logs(stack: Stack, *arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "muster.cli.main", "logs", *arguments, "--json"),
        env={
            **os.environ,
            "MUSTER_NATS_URL": stack.url,
            "MUSTER_NATS_CREDS_FILE": str(stack.secrets.credentials_file(Role.ADMIN)),
        },
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
    )


async def test_what_user_code_prints_and_logs_reaches_the_hosts_output_and_who_follows(
    driver: Driver, stack: Stack
) -> None:
    broken = driver.replica("Broken")
    await driver.goal(broken)
    await driver.until_status(broken.replica_tag, ReplicaStatus.FAILED)
    talker = driver.replica("Talker")
    await driver.run(talker)
    follower = await muster_logs(stack, "app", "--tail", "200")
    assert follower.stdout is not None

    heard: list[dict[str, Any]] = []

    async def until_said(message: str, replica: ReplicaGoal = talker) -> dict[str, Any]:
        """By ``replica``, before or from now on: what different processes remember comes in any order."""
        said = {"message": message, "replica_tag": str(replica.replica_tag)}
        async with asyncio.timeout(WITHIN_S):
            while True:
                for line in heard:
                    if line.items() >= said.items():
                        return line
                heard.append(json.loads(await follower.stdout.readline()))

    try:
        # Remembered, for nobody listened when it was said.
        await until_said("before it broke", broken)
        constructed = await until_said("constructed")
        request = driver.request(talker.replica_tag, "/app/say", query="who=me")
        await request.answer()
        printed = await until_said("printed for me")
        logged = await until_said("logged")
    finally:
        follower.send_signal(signal.SIGINT)
        assert await follower.wait() == 0
    ids = {"replica_tag": talker.replica_tag, "backend_tag": "default/app", "host_id": HOST}
    assert printed.items() >= {**ids, "event": "print", "logger": "stdout", "level": "info"}.items()
    assert logged.items() >= {**ids, "event": "log", "logger": "talker", "level": "warning"}.items()
    assert logged["shape"] == [1, 2]
    assert "request_id" not in constructed
    assert printed["request_id"] == logged["request_id"] == f"r-{request.token}"
    # Who follows hears of it from the replica, and may do so before the host has written it.
    await until_so(lambda: all(line in host_lines(stack) for line in (constructed, printed, logged)))


async def test_a_flood_of_prints_holds_nobody_up_fills_no_memory_and_says_what_was_left_out(
    driver: Driver, stack: Stack
) -> None:
    talker = driver.replica("Talker")
    await driver.run(talker)
    loop = asyncio.get_running_loop()

    async def rss_kb() -> int:
        return int((await driver.call(talker.replica_tag, "/app/rss"))[1])

    heard: list[dict[str, Any]] = []

    async def follow(follower: asyncio.subprocess.Process) -> None:
        assert follower.stdout is not None
        while line := await follower.stdout.readline():
            heard.append(json.loads(line))

    def counted(lines: list[dict[str, Any]]) -> tuple[int, int]:
        """The flood's lines, and how many are said to have been left out."""
        lines = [line for line in lines if line.get("replica_tag") == talker.replica_tag]
        dropped = sum(line["count"] for line in lines if line["event"] == "log_lines_dropped")
        return sum(str(line.get("message", "")).startswith("line ") for line in lines), dropped

    waited_s = []
    async with asyncio.TaskGroup() as group:
        follower = await muster_logs(stack, "app", "--tail", "1")
        group.create_task(follow(follower))
        await until_so(lambda: heard)
        before_kb = await rss_kb()
        flood = driver.request(talker.replica_tag, "/app/flood", query="n=100000")
        flood_began = loop.time()
        while flood.frames.empty():
            began = loop.time()
            await driver.call(talker.replica_tag)
            waited_s.append(loop.time() - began)
            await asyncio.sleep(0.01)
        flood_s = loop.time() - flood_began
        assert (await flood.answer())[1] == b"flooded"
        grown_kb = await rss_kb() - before_kb
        await until_so(lambda: sum(counted(host_lines(stack))) >= 100_000)
        await until_so(lambda: sum(counted(heard)) >= 100_000)
        follower.send_signal(signal.SIGINT)
    # Lines of its own go the same way and may be among what was left out, such as that it renewed its identity.
    assert 100_000 <= sum(counted(host_lines(stack))) <= 100_010
    written = [str(line.get("message", "")) for line in host_lines(stack)]
    written = [message for message in written if message.startswith("line ")]
    assert len(set(written)) == len(written), "no line is written twice"
    assert 100_000 <= sum(counted(heard)) <= 100_010
    assert counted(heard)[0] < 50_000
    assert statistics.median(waited_s) < flood_s / 4, "others were answered meanwhile, not after it"
    assert grown_kb < 60_000


async def test_sigterm_drains_and_leaves_no_process_behind(
    driver: Driver, stack: Stack, tmp_path: Path
) -> None:
    echo = driver.replica("Echo")
    await driver.run(echo)
    children = psutil.Process(stack.host.pid).children(recursive=True)
    held = await driver.hold(echo.replica_tag, tmp_path)

    heard_before = len(driver.reports)
    stack.host.terminate()
    leaving = await driver.until(lambda report: report.leaving, heard_before=heard_before)
    (tmp_path / "go").touch()
    answer, _ = await held.answer()
    # The last one comes only once, maybe before the answer.
    await driver.until(lambda report: report.leaving and not report.replicas, heard_before=heard_before)

    assert _status(leaving, echo.replica_tag) is ReplicaStatus.DRAINING
    assert isinstance(answer, ResponseHead)
    assert await asyncio.to_thread(stack.host.wait, WITHIN_S) == 0
    _, alive = await asyncio.to_thread(psutil.wait_procs, children, 60)
    assert alive == []
    # Every line of the host's output is a JSON event: Ray's own prose is kept out.
    assert all("event" in json.loads(line) for line in stack.log.read_text().splitlines())

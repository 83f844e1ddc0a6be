"""A Ray cluster of two nodes on this machine, and a replica host that joins it: for tests of replicas elsewhere.

To a replica, another node is another machine: it shares no directory with its host that it would know of.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import sys
import tempfile
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import nats
import psutil
from nats.aio.client import Client
from prometheus_client.parser import text_string_to_metric_families

from serve_common.config.backend import RayActorOptions, ReplicaConfig
from serve_common.names import BackendTag, HostId, ReplicaTag, replica_tag
from serve_common.protocol.frames import Head, RequestHead, RequestKind, decode_frame, encode_frame
from serve_common.protocol.reports import HostGoal, HostReport, ReplicaGoal, ReplicaReport, ReplicaStatus
from serve_common.protocol.subjects import Subjects
from tests.support.paths import ROOT
from tests.support.servers.nats_server import NatsServer

HOST = HostId("host-1")
SUBJECTS = Subjects()
ELSEWHERE = "elsewhere"
"""A custom resource that only the second node has."""
AT_HOME = "node:__internal_head__"
"""One of Ray's own, that only the head has."""
_STARTS_WITHIN_S = 120.0
_SHOWN_WITHIN_S = 60.0


class RayNode:
    """A process of `ray_node`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.address = ""
        self.node_id = ""
        self.raylet = 0

    @classmethod
    @asynccontextmanager
    async def running(
        cls, directory: Path, environment: dict[str, str], *arguments: str
    ) -> AsyncIterator[RayNode]:
        with (directory / "nodes.log").open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tests.support.servers.ray_node", str(directory), *arguments),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=environment,
                cwd=ROOT,
            )
        node = cls(process)
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            async with asyncio.timeout(_STARTS_WITHIN_S):
                line = await process.stdout.readline()
            assert line, (directory / "nodes.log").read_text()
            told = json.loads(line)
            node.address, node.node_id, node.raylet = told["address"], told["node_id"], told["raylet"]
            yield node
        finally:
            # Workers of a raylet that was killed would be left.
            children = (
                psutil.Process(process.pid).children(recursive=True) if process.returncode is None else []
            )
            process.stdin.close()
            try:
                async with asyncio.timeout(15):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()
            for child in children:
                with contextlib.suppress(psutil.NoSuchProcess):  # most have ended by now
                    child.kill()


class HostOnCluster:
    """The host's process, driven as a controller and a router would."""

    def __init__(self, directory: Path, client: Client, process: asyncio.subprocess.Process) -> None:
        self.log = directory / "host.log"
        self.process = process
        self._directory = directory
        self._client = client
        self._generation = 0
        self._ordinal = 0
        self._reports: asyncio.Queue[HostReport] = asyncio.Queue()
        self._ops_url = ""

    @classmethod
    @asynccontextmanager
    async def running(
        cls, directory: Path, environment: dict[str, str], nats_url: str
    ) -> AsyncIterator[HostOnCluster]:
        client = await nats.connect(nats_url)
        with (directory / "host.log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "serve_replica_host"),
                env=environment,
                stdout=log,
                stderr=log,
                cwd=directory,
            )
        host = cls(directory, client, process)

        async def on_report(message: Any) -> None:
            host._reports.put_nowait(msgspec.json.decode(message.data, type=HostReport))

        try:
            await client.subscribe(SUBJECTS.host_reports, cb=on_report)
            first = await host.until(lambda report: bool(report.metrics_url), _STARTS_WITHIN_S)
            host._ops_url = first.metrics_url
            yield host
        finally:
            await client.close()
            if process.returncode is None:
                process.terminate()
            try:
                async with asyncio.timeout(15):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()

    def replica(self, attribute: str, *, at: str = ELSEWHERE) -> ReplicaGoal:
        """The goal of a new replica of the tests' application, on the node that has ``at``."""
        self._ordinal += 1
        backend = BackendTag("default/app")
        config = ReplicaConfig(
            import_path=f"far_app:{attribute}",
            app_dir=str(self._directory / "apps"),
            ray_actor_options=RayActorOptions(num_cpus=0.1, resources={at: 0.01}),
        )
        return ReplicaGoal(
            replica_tag=replica_tag(backend, self._ordinal),
            backend_tag=backend,
            replica_config=config,
            config_version=1,
            max_concurrent_queries=100,
            graceful_shutdown_timeout_s=10.0,
            health_check_period_s=10.0,
            health_check_timeout_s=10.0,
            start_timeout_s=_STARTS_WITHIN_S,
        )

    async def goal(self, *replicas: ReplicaGoal) -> None:
        self._generation += 1
        goal = HostGoal(host_id=HOST, epoch=1, generation=self._generation, replicas=list(replicas))
        await self._client.publish(SUBJECTS.host_goal(HOST), msgspec.json.encode(goal))

    async def until(self, holds: Callable[[HostReport], bool], timeout_s: float = 120.0) -> HostReport:
        """The first report, from now on, of which ``holds`` is true."""
        while not self._reports.empty():
            self._reports.get_nowait()
        try:
            async with asyncio.timeout(timeout_s):
                while not holds(report := await self._reports.get()):
                    pass
        except TimeoutError:
            raise AssertionError(self.log.read_text()) from None
        return report

    async def until_status(self, status: ReplicaStatus, *tags: ReplicaTag) -> dict[ReplicaTag, ReplicaReport]:
        def found(report: HostReport) -> dict[ReplicaTag, ReplicaReport]:
            return {r.replica_tag: r for r in report.replicas if r.status is status and r.replica_tag in tags}

        return found(await self.until(lambda report: found(report).keys() == set(tags)))

    async def run(self, *replicas: ReplicaGoal) -> dict[ReplicaTag, ReplicaReport]:
        """Make these the goal and wait until all of them serve."""
        await self.goal(*replicas)
        return await self.until_status(ReplicaStatus.RUNNING, *(goal.replica_tag for goal in replicas))

    async def call(self, tag: ReplicaTag, path: str = "/", query: str = "") -> tuple[Head, bytes]:
        """A request whose answer is one frame."""
        head = RequestHead(
            kind=RequestKind.HTTP,
            method="POST",
            path=path,
            route="/",
            query=query,
            headers=[],
            timeout_s=20.0,
            body_bytes=0,
            endpoint_tag="default/app",
            request_id="r-1",
        )
        reply = await self._client.request(SUBJECTS.replica(tag), encode_frame(head, b""), timeout=20)
        answer, body = decode_frame(reply.data)
        return answer, bytes(body)

    async def samples(self, *types: str) -> dict[str, float]:
        """What is on the host's page now, without what the host says of itself."""

        def fetch() -> str:
            with urllib.request.urlopen(self._ops_url, timeout=30) as answer:
                text: str = answer.read().decode()
                return text

        families = text_string_to_metric_families(await asyncio.to_thread(fetch))
        return {
            sample.name: sample.value
            for family in families
            if not types or family.type in types
            for sample in family.samples
            if sample.labels.get("backend_tag") == "default/app" and len(sample.labels) == 1
        }

    async def until_shown(self, holds: Callable[[dict[str, float]], bool]) -> dict[str, float]:
        async with asyncio.timeout(_SHOWN_WITHIN_S):
            while not holds(shown := await self.samples()):  # noqa: ASYNC110 - it is scraped
                await asyncio.sleep(0.05)
        return shown

    def said(self) -> list[dict[str, Any]]:
        """The host's output."""
        whole, _, _ = self.log.read_text().rpartition("\n")  # what follows is being written
        return [json.loads(line) for line in whole.splitlines()]

    async def until_said(self, **fields: str) -> dict[str, Any]:
        async with asyncio.timeout(_SHOWN_WITHIN_S):
            while True:
                for line in self.said():
                    if line.items() >= fields.items():
                        return line
                await asyncio.sleep(0.05)  # the host's output is a file


class Cluster:
    """Everything, up."""

    def __init__(self, second: RayNode, host: HostOnCluster, directory: Path) -> None:
        self.second = second
        self.host = host
        self.directory = directory

    @classmethod
    @asynccontextmanager
    async def running(cls, app: str) -> AsyncIterator[Cluster]:
        """With ``app`` as the text of the applications' module."""
        directory = Path(tempfile.mkdtemp(prefix="mc", dir="/tmp"))  # short: Ray puts unix sockets below it
        (directory / "apps").mkdir()
        (directory / "tmp").mkdir()
        (directory / "apps" / "far_app.py").write_text(app)
        server = NatsServer(directory)
        server.start()
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("MUSTER_", "RAY_", "PROMETHEUS_"))
        } | {
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",
            "RAY_raylet_start_wait_time_s": "120",
        }
        of_nodes = environment | {"TMPDIR": str(directory / "tmp")}
        of_host = environment | {
            "MUSTER_NATS_URL": f"nats://127.0.0.1:{server.port}",
            "MUSTER_NATS_PASSWORD": "anyone",
            "MUSTER_REPLICA_NATS_PASSWORD": "anyone",
            "MUSTER_HOST_ID": HOST,
            "MUSTER_OPS_PORT": "0",
            "MUSTER_RAY_TEMP_DIR": str(directory / "host"),
            "MUSTER_DRAIN_TIMEOUT_S": "5",
        }
        try:
            async with AsyncExitStack() as stack:
                head = await stack.enter_async_context(RayNode.running(directory, of_nodes, "1"))
                of_host["RAY_ADDRESS"] = head.address
                async with asyncio.TaskGroup() as starts:
                    second = starts.create_task(
                        stack.enter_async_context(
                            RayNode.running(directory, of_nodes, "2", head.address, ELSEWHERE)
                        )
                    )
                    host = starts.create_task(
                        stack.enter_async_context(
                            HostOnCluster.running(directory, of_host, of_host["MUSTER_NATS_URL"])
                        )
                    )
                yield cls(second.result(), host.result(), directory)
        finally:
            server.kill()
            shutil.rmtree(directory, ignore_errors=True)

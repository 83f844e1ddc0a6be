"""What the tests of handles share: a nats-server as compose has it, a bucket, and real replicas without Ray."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from muster.secrets import generate
from serve_common.config.backend import ReplicaConfig
from serve_common.identities.roles import Role, call_tags
from serve_common.names import BackendTag, EndpointTag, ReplicaTag, parse_backend_tag
from serve_common.nats.client import connect_nats
from serve_common.protocol.reports import ReplicaGoal
from serve_common.protocol.snapshots import BackendSnapshot, EndpointSnapshot, Snapshot
from serve_common.protocol.subjects import Subjects, backend_key, endpoint_key, tokens
from serve_common.runtime.settings import BusSettings
from serve_controller.adapters.jetstream import bucket_config
from serve_replica_host.replica.process import StartReplicaRequest
from tests.support.identities import bus_settings, lay_out_nats
from tests.support.paths import APPS
from tests.support.waiting import until

APP_DIR = APPS / "handle_app"
SUBJECTS = Subjects()


class GuardedNats:
    """A nats-server with the users and permissions that compose has, on a port of the system's choice."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.secrets = generate(directory / "secrets")
        config = lay_out_nats(directory, self.secrets)
        binary = str(Path(sysconfig.get_path("scripts")) / "nats-server")
        command = [binary, "-c", str(config), "-a", "127.0.0.1", "-p", "-1"]
        command += ["-sd", str(directory / "js"), "--ports_file_dir", str(directory)]
        with (directory / "log").open("wb") as log:
            self.process = subprocess.Popen(command, stderr=log, stdout=log)
        ports_file = directory / f"nats-server_{self.process.pid}.ports"
        until(lambda: ports_file.exists() and ports_file.read_text())
        self.url = json.loads(ports_file.read_text())["nats"][0]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()

    def settings(self, role: Role, **more: Any) -> BusSettings:
        return bus_settings(self.secrets, self.url, role, **more)


class HandleStack:
    """Writes the bucket as a controller would, and starts replicas as a host would."""

    def __init__(self, nats: GuardedNats) -> None:
        self.nats = nats
        self.snapshot_id = 0
        self.processes: list[subprocess.Popen[str]] = []
        self.metrics_dir = nats.directory / "metrics"
        """What the replicas' processes count."""
        self.metrics_dir.mkdir()

    def start(self, *orders: StartReplicaRequest) -> None:
        """Start a process with these replicas; see `wait_ready`."""
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("replica_runner.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(self.metrics_dir)},
        )
        self.processes.append(process)
        assert process.stdin is not None
        for order in orders:
            process.stdin.write(base64.b64encode(msgspec.msgpack.encode(order)).decode() + "\n")
        process.stdin.write("\n")
        process.stdin.flush()

    def order(
        self,
        name: str,
        tag: str,
        *,
        code_version: int = 1,
        peer_versions: Mapping[BackendTag, int] | None = None,
    ) -> StartReplicaRequest:
        """For one replica of the class ``name``; a `Leaf` is told its tag."""
        backend_tag = parse_backend_tag(ReplicaTag(tag))
        goal = ReplicaGoal(
            replica_tag=ReplicaTag(tag),
            backend_tag=backend_tag,
            replica_config=ReplicaConfig(
                import_path=f"handle_app:{name}", init_args=[tag] if name == "Leaf" else []
            ),
            config_version=1,
            max_concurrent_queries=100,
            graceful_shutdown_timeout_s=5,
            health_check_period_s=5,
            health_check_timeout_s=5,
            start_timeout_s=30,
            code_version=code_version,
            peer_versions=dict(peer_versions or {}),
        )
        tags = call_tags(goal.backend_tag, goal.may_call)
        bus = self.nats.settings(Role.REPLICA, name=tokens(goal.replica_tag), tags=tags)
        return StartReplicaRequest(goal=goal, bus=bus, app_dir=str(APP_DIR))

    def wait_ready(self) -> None:
        """Until all replicas serve."""
        for process in self.processes:
            assert process.stdout is not None
            # Log lines come before it on the same stream.
            for line in process.stdout:
                if line.startswith("ready"):
                    break
                print(line, end="")
            else:
                raise AssertionError("a replica did not start")

    async def write_bucket(
        self,
        deployments: Mapping[str, Sequence[str]],
        versions: Mapping[str, int] | None = None,
        routes: Mapping[str, str | None] | None = None,
    ) -> None:
        """One without replicas is scaled to zero."""
        client = await connect_nats(self.nats.settings(Role.CONTROLLER), name="test", deadline_s=20.0)
        try:
            bucket = await client.jetstream().create_key_value(bucket_config(SUBJECTS))
            for deployment, replicas in deployments.items():
                backend_tag, endpoint_tag = BackendTag(deployment), EndpointTag(deployment)
                endpoint = EndpointSnapshot(
                    endpoint_tag=endpoint_tag,
                    route=(routes or {}).get(deployment, "/" if deployment.endswith("/middle") else None),
                    methods=["GET", "POST"] if routes else ["POST"],
                    traffic={backend_tag: 1.0},
                )
                backend = BackendSnapshot(
                    backend_tag=backend_tag,
                    replicas=[ReplicaTag(tag) for tag in replicas],
                    draining=[],
                    max_concurrent_queries=100,
                    max_queued_requests=100,
                    can_wake=not replicas,
                    code_versions={
                        ReplicaTag(tag): version
                        for tag, version in (versions or {}).items()
                        if tag in replicas
                    },
                )
                for key, content in (
                    (endpoint_key(endpoint_tag), endpoint),
                    (backend_key(backend_tag), backend),
                ):
                    self.snapshot_id += 1
                    value = Snapshot(snapshot_id=self.snapshot_id, epoch=1, content=content)
                    await bucket.put(key, msgspec.json.encode(value))
        finally:
            await client.close()

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                assert stream is not None
                stream.close()

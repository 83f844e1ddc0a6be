"""One stack of compose.yaml for all compose tests: a project, ports and secrets of its own.

Why not just DockerCompose: tests scale services, take the stack down with its volumes kept and bring it up again,
and act on it as a person would, with the CLI and the example's evaluation. What is asked again and again is asked
without a process for each time, which would take most of these tests' time.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
from testcontainers.compose import DockerCompose

from muster.client import StackAddress, connect_stack
from muster.client.admin import AdminClient
from muster.secrets import Secrets
from serve_common.api.queries import GetAutoscaling, GetStatus
from serve_common.identities.roles import Role
from tests.support.paths import ROOT

PROJECT: Final = os.environ.get("MUSTER_TEST_PROJECT", "muster-test")
UP_TIMEOUT_S: Final = 540.0
DIGITS_REQUESTS: Final = 'serve_proxy_requests_total{endpoint_tag="default/digits"}'
_BUILD_LIMIT_S: Final = 900.0
_COMMAND_TIMEOUT_S: Final = 300.0
_CHANGE_TIMEOUT_S: Final = 180.0
"""For what takes seconds on a quiet machine, and has no limit of its own on a busy one."""


def why_no_engine() -> str | None:
    """What keeps this machine from running a stack in containers; None: nothing."""
    try:
        done = subprocess.run(["docker", "info"], capture_output=True, text=True, timeout=30, check=False)
        if done.returncode == 0:
            done = subprocess.run(
                ["docker", "compose", "version"], capture_output=True, text=True, timeout=30, check=False
            )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None if done.returncode == 0 else done.stderr.strip()[:300]


def make_readable(directory: Path) -> None:
    """For what is mounted: the users of the containers are others than ours."""
    for path in (directory, *directory.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)


class Stack:
    """A running stack."""

    def __init__(self, compose: DockerCompose, secrets: Secrets) -> None:
        self.compose = compose
        self.secrets = secrets
        self._addresses: dict[tuple[str, int], str] = {}
        self._deployed: tuple[str, ...] | None = None
        """How the example was deployed last."""

    def run(self, *arguments: str, timeout_s: float = _COMMAND_TIMEOUT_S) -> str:
        """``docker compose ARGUMENTS``; raises with all it said when it fails."""
        if arguments[0] not in ("exec", "port"):
            self._addresses.clear()  # a container that starts anew has other ports
        return _run([*self.compose.compose_command_property, *arguments], timeout_s)

    def build(self, *services: str) -> None:
        """Build the images of these services, or all; what is as it was costs seconds.

        One image after the other: built at once, each would have its own copy of the layers that they share, and a
        second build would find those of one image only.
        """
        command = [*self.compose.compose_command_property, "build", "--quiet", *services]
        _run(command, _BUILD_LIMIT_S, environment={**os.environ, "COMPOSE_PARALLEL_LIMIT": "1"})

    def up(self, *arguments: str) -> None:
        """Bring up what compose.yaml says, and wait until all of it is healthy."""
        self.run("up", "--detach", *arguments, timeout_s=UP_TIMEOUT_S)
        self.wait_for_containers()

    def wait_for_containers(self) -> None:
        """Wait until all of them are healthy.

        Compose's own ``--wait`` gives up on one that ends and is started anew, as a replica host does when Ray needs
        more time to start than it gives itself.
        """

        def health() -> dict[str | None, str | None]:
            return {each.Name: each.Health for each in self.compose.get_containers(include_all=True)}

        self.wait_until(
            lambda: set(health().values()) == {"healthy"}, "all are healthy", health, timeout_s=UP_TIMEOUT_S
        )

    def containers(self, *services: str) -> set[str]:
        """Ids of the containers of these services."""
        return {str(each.ID) for each in self.compose.get_containers() if each.Service in services}

    @property
    def compose_file(self) -> str:
        """What ``COMPOSE_FILE`` is for whoever types commands for this stack, in any directory."""
        return os.pathsep.join(str(ROOT / name) for name in self.compose.compose_file_name or ())

    def upgrade(self) -> str:
        """What `make upgrade` does after it has built the images: what it prints."""
        environment = {
            **os.environ,
            "COMPOSE_FILE": self.compose_file,
            "MUSTER": str(Path(sys.executable).with_name("muster")),
            "MUSTER_NATS_URL": self.nats_url,
            "MUSTER_NATS_CREDS_FILE": str(self.secrets.credentials_file(Role.ADMIN)),
        }
        return _run([str(ROOT / "deploy/upgrade.sh")], UP_TIMEOUT_S, environment=environment)

    def kill_container(self, container_id: str) -> None:
        """End one container of ours as a crash would; it does not come back by itself."""
        ours = {container.ID[:12] for container in self.compose.get_containers() if container.ID}
        assert container_id in ours, f"{container_id} is none of this project's containers: {ours}"
        _run(["docker", "kill", container_id], _COMMAND_TIMEOUT_S)

    def inspect(self, service: str) -> dict[str, Any]:
        """What the engine knows of the first container of a service."""
        container = next(each for each in self.compose.get_containers() if each.Service == service)
        assert container.ID is not None
        (found,) = json.loads(_run(["docker", "inspect", container.ID], _COMMAND_TIMEOUT_S))
        known: dict[str, Any] = found
        return known

    def networks(self, service: str) -> list[dict[str, Any]]:
        """How the first container of a service is connected, for each of its networks."""
        return list(self.inspect(service)["NetworkSettings"]["Networks"].values())

    def address(self, service: str, port: int) -> str:
        """``host:port`` at which this machine reaches a service's port."""
        known = self._addresses.get((service, port))
        if known is None:
            known = self._addresses[service, port] = self.run("port", service, str(port)).strip()
        return known

    @property
    def nats_url(self) -> str:
        """Without user and password."""
        return f"nats://{self.address('nats', 4222)}"

    def http(self, path: str) -> str:
        """The URL of ``path`` at the ingress."""
        return f"http://{self.address('ingress', 8000)}{path}"

    def muster(self, *arguments: str) -> str:
        """The CLI, pointed at this stack as the admin."""
        command = [str(Path(sys.executable).with_name("muster")), *arguments, "--nats", self.nats_url]
        return _run([*command, "--creds", str(self.secrets.credentials_file(Role.ADMIN))], 300.0)

    def python(self, script: Path, *arguments: str) -> str:
        """What a program prints that finds this stack as the admin."""
        environment = {
            **os.environ,
            "MUSTER_NATS_URL": self.nats_url,
            "MUSTER_NATS_CREDS_FILE": str(self.secrets.credentials_file(Role.ADMIN)),
        }
        return _run([sys.executable, str(script), *arguments], 300.0, environment=environment)

    def get(self, path: str) -> str:
        """The body of a response of the ingress. Raises for a status that is no success."""
        with urllib.request.urlopen(self.http(path), timeout=60) as response:
            body: bytes = response.read()
        return body.decode()

    def forget(self) -> None:
        """Somebody else has changed what is deployed."""
        self._addresses.clear()
        self._deployed = None

    def have_digits(self) -> None:
        """As `deploy_digits`, unless that was what was done last."""
        if self._deployed != ():
            self.deploy_digits()

    def deploy_digits(self, *more: str) -> None:
        """Deploy the example, or leave it as it is when it is deployed like this."""
        self._deployed = None
        self.muster(
            "deploy", "digits:Digits", "--name", "digits", "--route-prefix", "/digits",
            "--app-dir", "/apps/digits", "--version", "1", *more,
        )  # fmt: skip
        self._deployed = more

    def evaluate(self, *more: str) -> dict[str, Any]:
        """What `evaluate.py` measures over the whole held-out part."""
        said = _run(evaluation(self.http("/digits"), *more), 300.0, check=False)
        result: dict[str, Any] = json.loads(said)
        return result

    @contextmanager
    def under_load(self) -> Iterator[dict[str, Any]]:
        """Evaluates without a pause inside the block; the dict is filled when the block ends."""
        result: dict[str, Any] = {}
        command = evaluation(self.http("/digits"), "--forever", "--concurrency", "4")
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            try:
                _wait_for_line(process, _CHANGE_TIMEOUT_S)  # it says so when the first request has ended
                yield result
            finally:
                process.send_signal(signal.SIGINT)  # as Ctrl-C: it says what it saw
                said, complained = process.communicate(timeout=_CHANGE_TIMEOUT_S)
        assert said, complained
        result.update(json.loads(said))

    def status(self) -> dict[str, Any]:
        """What `muster status` knows."""
        status: dict[str, Any] = self._asked(lambda admin: admin.call(GetStatus()))
        return status

    def _asked(self, question: Callable[[AdminClient], Awaitable[Any]]) -> Any:
        """The answer as the CLI's ``--json`` has it."""
        address = StackAddress(
            urls=(self.nats_url,), credentials_file=str(self.secrets.credentials_file(Role.ADMIN))
        )

        async def ask() -> Any:
            async with connect_stack(address, connect_within_s=30.0, retry_for_s=60.0) as reached:
                return msgspec.to_builtins(await question(reached.admin))

        with ThreadPoolExecutor(1) as thread:  # some tests have a loop of their own
            return thread.submit(asyncio.run, ask()).result()

    def wait_until_healthy(self, name: str) -> None:
        """Wait until the controller says that a deployment is as it should be."""

        def is_healthy() -> bool:
            return {"healthy"} == {
                known["status"] for known in self.status()["deployments"] if known["name"] == name
            }

        self.wait_until(is_healthy, f"{name} is healthy")

    def wait_for_autoscaling(
        self, name: str, *, is_seen: bool = False, why: str = "", **expected: Any
    ) -> None:
        """Wait until the autoscaling of a deployment says what is expected, and ``why`` among its reasons."""
        found: dict[str, Any] = {}

        def is_so() -> bool:
            views = self._asked(lambda admin: admin.call(GetAutoscaling()))
            found.update(next(view for view in views if view["backend_tag"] == f"default/{name}"))
            is_known = not is_seen or found["seen"] is not None
            return is_known and why in found["why"] and {key: found[key] for key in expected} == expected

        self.wait_until(is_so, f"{name} is autoscaled as {expected}", lambda: found)

    def query(self, promql: str) -> list[tuple[dict[str, str], float]]:
        """An instant query's labels and values."""
        query = urllib.parse.urlencode({"query": promql})
        url = f"http://{self.address('prometheus', 9090)}/api/v1/query?{query}"
        with urllib.request.urlopen(url, timeout=60.0) as response:
            found = json.load(response)["data"]["result"]
        return [(row["metric"], float(row["value"][1])) for row in found]

    def wait_for_query(self, promql: str, expected: float) -> None:
        """Wait until a query that has one value has the expected one: scrapes are seconds apart."""
        self.wait_until(
            lambda: [value for _, value in self.query(promql)] == [expected],
            f"{promql} is {expected}",
            lambda: self.query(promql),
        )

    def wait_until(
        self,
        is_so: Callable[[], bool],
        what: str,
        seen: Callable[[], object] = lambda: "",
        *,
        timeout_s: float = _CHANGE_TIMEOUT_S,
    ) -> None:
        """Wait for what nobody tells; ``seen`` says what there is instead when it does not come about."""
        deadline = time.monotonic() + timeout_s
        while not is_so():
            assert time.monotonic() < deadline, f"it did not come about that {what}: {seen()}"
            time.sleep(0.5)


def evaluation(url: str, *more: str) -> list[str]:
    """The command that evaluates the example at ``url``."""
    return [sys.executable, str(ROOT / "examples/digits/evaluate.py"), url, "--json", *more]


def _wait_for_line(process: subprocess.Popen[str], timeout_s: float) -> None:
    assert process.stderr is not None
    ready, _, _ = select.select([process.stderr], [], [], timeout_s)
    assert ready, f"nothing was said within {timeout_s} s"
    line = process.stderr.readline()
    assert line.startswith("asking"), line


def _run(
    command: list[str], timeout_s: float, *, check: bool = True, environment: dict[str, str] | None = None
) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, timeout=timeout_s, check=False, env=environment
    )
    if check and done.returncode:
        raise AssertionError(
            f"{command} ended with {done.returncode}:\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
        )
    return done.stdout

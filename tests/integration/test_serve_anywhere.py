"""`serve.run` and its relatives in loops, notebooks, threads and replicas, and while processes of the stack die."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from muster.cli.session import StackChoice, find_stack
from muster.client import connect_stack
from muster.embedded.services import CONTROLLER, HOST, NATS
from muster.embedded.stack import EmbeddedStack
from muster.secrets import Secrets
from serve_common.api.queries import GetDeploymentInfo
from serve_common.api.views import DeploymentStatus as Health
from serve_common.identities.roles import Role
from tests.support.paths import ROOT
from tests.support.servers.reserved_port import ANY_PORTS

pytestmark = [pytest.mark.timeout(500), pytest.mark.asyncio(loop_scope="module")]

RUN_LIMIT_S = 150.0
"""Many times what a restart takes: this is no measurement, and the machine may be busy."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EmbeddedStack]:
    async with EmbeddedStack(tmp_path_factory.mktemp("anywhere") / "state", ANY_PORTS) as stack:
        yield stack


def start(stack: EmbeddedStack, directory: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MUSTER_")}
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=directory,
        env={**environment, "MUSTER_STATE_DIR": str(stack.record.state_dir)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


async def run(stack: EmbeddedStack, directory: Path, program: str) -> list[Any]:
    """Run a program as a notebook does, without a file; returns what it printed, line by line."""
    process = start(stack, directory, "-")
    try:
        output, errors = await asyncio.to_thread(process.communicate, program, RUN_LIMIT_S)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0, errors
    return [json.loads(line) for line in output.splitlines()]


NOTEBOOK = """
import asyncio, json, threading
import muster as serve

@serve.deployment(ray_actor_options={"num_cpus": 0.1})
class Doubler:
    def __call__(self, number):
        return FACTOR * number

    def items(self, count):
        yield from range(count)

FACTOR = 2
handle = serve.run(Doubler.bind(), name="cells", route_prefix=None)
again = serve.run(Doubler.bind(), name="cells", route_prefix=None)
print(json.dumps([handle.remote(1).result(), again.remote(2).result()]))

async def cell():
    global FACTOR
    FACTOR = 3
    handle = serve.run(Doubler.bind(), name="cells", route_prefix=None)
    assert serve.status().applications["cells"].status == "RUNNING"
    found = serve.get_app_handle("cells")
    items = found.options(stream=True).items.remote(2)
    return [await handle.remote(1), await found.remote(2), [item async for item in items]]

print(json.dumps(asyncio.run(cell())))

results = {}
def deploy(name):
    results[name] = serve.run(Doubler.bind(), name=name, route_prefix=None).remote(5).result()

threads = [threading.Thread(target=deploy, args=(f"thread-{number}",)) for number in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(json.dumps(results))
for name in results:
    serve.delete(name)
print(json.dumps(sorted(serve.status().applications)))
"""


async def test_programs_without_a_file_in_loops_and_in_threads_run(
    stack: EmbeddedStack, tmp_path: Path
) -> None:
    twice, cell, threads, left = await run(stack, tmp_path, NOTEBOOK)
    assert twice == [2, 4]
    assert cell == [3, 6, [0, 1]]
    assert threads == {f"thread-{number}": 15 for number in range(3)}
    assert left == ["cells"]


def get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=60) as response:
        return bytes(response.read())


INSIDE = """
import json, sys
import muster as serve
from muster.exceptions import RayServeException

@serve.deployment(ray_actor_options={"num_cpus": 0.1})
def inner(request):
    return "from within"

@serve.deployment(ray_actor_options={"num_cpus": 0.1, "runtime_env": {"env_vars": json.loads(VARIABLES)}})
class Outer:
    def __call__(self):
        return None

    def status(self):
        return sorted(serve.status().applications)

    def deploy(self):
        serve.run(inner.bind(), name="inside", route_prefix="/inside")
        return [*self.status(), serve.get_app_handle("inside").remote(None).result()]

    def find(self, name):
        return [serve.get_deployment_handle("Outer").status.remote().result(), serve.get_app_handle(name).app_name]

handle = serve.run(Outer.bind(), name="outer", route_prefix=None)

def tried(method, *args):
    try:
        return getattr(handle, method).remote(*args).result(timeout_s=60)
    except RayServeException as error:
        return str(error)

for method in ("status", "deploy"):
    print(json.dumps(tried(method)))
print(json.dumps(tried("find", "outer")))
print(json.dumps(tried("find", "nobody")))
"""


async def test_a_replica_deploys_with_an_admins_credentials_and_not_without(
    stack: EmbeddedStack, tmp_path: Path
) -> None:
    own, _, _, _ = await run(stack, tmp_path, f"VARIABLES = '{{}}'\n{INSIDE}")
    assert "outer" in own  # the embedded stack's, which it finds by itself
    nothing = json.dumps({"MUSTER_STATE_DIR": ""})
    without = await run(stack, tmp_path, f"VARIABLES = {nothing!r}\n{INSIDE}")
    for line in without[:2]:
        assert "a replica may not deploy, delete, shut down or ask for the status by itself" in line
        assert "MUSTER_NATS_CREDS_FILE" in line
    file = Secrets(Path(stack.record.secrets)).credentials_file(Role.ADMIN)
    given = json.dumps({"MUSTER_NATS_CREDS_FILE": str(file)})
    status, deployed, found, unknown = await run(stack, tmp_path, f"VARIABLES = {given!r}\n{INSIDE}")
    assert "outer" in status
    assert set(deployed) >= {"outer", "inside", "from within"}
    assert found[1] == "outer"
    assert unknown == "Application 'nobody' does not exist."
    assert await asyncio.to_thread(get, f"{stack.record.http_url}/inside") == b"from within"


LOOP = """
import json, sys
import muster as serve
from muster.exceptions import RayServeException

@serve.deployment(ray_actor_options={"num_cpus": 0.1})
class Model:
    def __init__(self, version):
        self.version = version

    def __call__(self):
        return self.version

for line in sys.stdin:
    version = json.loads(line)
    print(json.dumps("begun"), flush=True)
    try:
        handle = serve.run(Model.bind(version), name="loop", route_prefix=None)
        state = serve.status().applications["loop"].deployments["Model"].status
        value = handle.options(idempotent=True).remote().result(timeout_s=60)
        print(json.dumps(["answered", value, state]), flush=True)
    except (RayServeException, RuntimeError, TimeoutError) as error:
        print(json.dumps(["raised", str(error)]), flush=True)
"""


class LoopingProgram:
    """Calls `serve.run` whenever it is told to."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def begin(self, version: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{version}\n")
        self.process.stdin.flush()
        assert self.line() == "begun"

    def line(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())


@contextmanager
def looping(stack: EmbeddedStack, directory: Path) -> Iterator[LoopingProgram]:
    (directory / "loop.py").write_text(LOOP)
    process = start(stack, directory, "loop.py")
    try:
        yield LoopingProgram(process)
    finally:
        process.kill()
        process.communicate()


async def until_down(stack: EmbeddedStack, name: str) -> None:
    """Until the controller knows that the deployment does not serve."""
    address = find_stack(StackChoice(), {"MUSTER_STATE_DIR": stack.record.state_dir}, ROOT)
    async with connect_stack(address) as connected, asyncio.timeout(60):
        while (await connected.admin.call(GetDeploymentInfo(name=name))).status is Health.HEALTHY:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def kill(stack: EmbeddedStack, name: str) -> None:
    (pid,) = (process.pid for process in stack.record.processes if process.name == name)
    os.kill(pid, signal.SIGKILL)


async def test_a_killed_process_of_the_stack_lets_no_run_hang_and_none_return_before_it_serves(
    stack: EmbeddedStack, tmp_path: Path
) -> None:
    with looping(stack, tmp_path) as program:

        async def outcome(version: int, *, killed: str = "", after_s: float = 0.0) -> Any:
            await asyncio.to_thread(program.begin, version)
            if killed:
                await asyncio.sleep(after_s)
                kill(stack, killed)
            async with asyncio.timeout(RUN_LIMIT_S):
                return await asyncio.to_thread(program.line)

        assert await outcome(1) == ["answered", 1, "HEALTHY"]
        # The same again, whose replica is gone: it returns once it serves, though there is nothing to change.
        kill(stack, HOST)
        await until_down(stack, "loop/Model")
        assert await outcome(1) == ["answered", 1, "HEALTHY"]
        for version, (name, after_s) in enumerate(((CONTROLLER, 0.0), (HOST, 0.3), (NATS, 0.3)), 2):
            word, *rest = await outcome(version, killed=name, after_s=after_s)
            assert word == "raised" or rest[0] == version, (name, word, rest)
            assert rest[0], name
            # The next one finds the stack healed.
            assert await outcome(version) == ["answered", version, "HEALTHY"], name

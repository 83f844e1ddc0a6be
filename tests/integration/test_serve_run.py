"""A Ray Serve program after one changed line: beside a stack, and with one of its own."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import time
import urllib.request
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from muster.client import connect_stack
from muster.embedded.stack import EmbeddedStack
from serve_common.api.queries import GetAutoscaling, ListDeployments
from serve_common.identities.roles import Role
from serve_common.nats.client import connect_nats
from serve_common.runtime.settings import Environment, read_bus_settings
from tests.parity import programs_of
from tests.support.certificates import Certificate
from tests.support.paths import ROOT
from tests.support.servers.reserved_port import ANY_PORTS

pytestmark = pytest.mark.timeout(300)

PROGRAM = """
import sys
import urllib.request

import muster as serve
from muster.handle import DeploymentHandle


@serve.deployment(ray_actor_options={"num_cpus": 0.1})
class Multiplier:
    def __init__(self, table: dict[str, int]) -> None:
        self.table = table

    def __call__(self, word: str) -> int:
        return self.table.get(word, 0) * FACTOR


@serve.deployment(ray_actor_options={"num_cpus": 0.1})
class Ingress:
    async def __init__(self, multiplier: DeploymentHandle) -> None:
        self.multiplier = multiplier

    async def __call__(self, request) -> dict[str, object]:
        word = request.query_params["word"]
        return {"number": await self.multiplier.remote(word), "replica": serve.get_replica_context().replica_id}


FACTOR = 2
if __name__ == "__main__":
    handle = serve.run(Ingress.bind(Multiplier.bind({"one": 1, "two": 2})), name="shop", route_prefix="/shop")
    print(serve.status().applications["shop"].status)
    print(type(handle).__name__)
"""


def run(directory: Path, state_dir: Path | None, program: str = PROGRAM) -> subprocess.CompletedProcess[str]:
    (directory / "program.py").write_text(program)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MUSTER_")}
    if state_dir is not None:
        environment["MUSTER_STATE_DIR"] = str(state_dir)
    return subprocess.run(
        [sys.executable, "program.py"],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EmbeddedStack]:
    async with EmbeddedStack(tmp_path_factory.mktemp("run") / "state", ANY_PORTS) as stack:
        yield stack


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=60) as response:
        return json.loads(response.read())


@pytest.mark.asyncio(loop_scope="module")
async def test_a_program_deploys_its_own_classes_and_again_restarts_nothing(
    stack: EmbeddedStack, tmp_path: Path
) -> None:
    state_dir = Path(stack.record.state_dir)
    url = f"{stack.record.http_url}/shop?word=two"
    first = await asyncio.to_thread(run, tmp_path, state_dir)
    assert first.returncode == 0, first.stderr
    assert first.stdout.splitlines() == ["ApplicationStatus.RUNNING", "DeploymentHandle"]
    answer = await asyncio.to_thread(get, url)
    assert answer["number"] == 4
    again = await asyncio.to_thread(run, tmp_path, state_dir)
    assert again.returncode == 0, again.stderr
    assert await asyncio.to_thread(get, url) == answer
    changed = await asyncio.to_thread(run, tmp_path, state_dir, PROGRAM.replace("FACTOR = 2", "FACTOR = 5"))
    assert changed.returncode == 0, changed.stderr
    after = await asyncio.to_thread(get, url)
    assert after["number"] == 10
    broken = await asyncio.to_thread(
        run,
        tmp_path,
        state_dir,
        PROGRAM.replace("self.table = table", "raise ValueError('no table today')").replace(
            "0.1})\nclass M", "0.1}, max_constructor_retry_count=1)\nclass M"
        ),
    )
    assert broken.returncode == 1
    assert "no table today" in broken.stderr
    assert "failed: Failed to update the deployments ['" in broken.stderr
    assert "DeployFailed" in broken.stderr
    assert (await asyncio.to_thread(get, url))["number"] == 10


LOGGING = """
import logging
import os
import urllib.request

import muster as serve
from muster.schema import LoggingConfig


@serve.deployment(ray_actor_options={"num_cpus": 0.1})
class Speaker:
    def __call__(self, request) -> str:
        step = request.query_params["step"]
        logging.getLogger("ray.serve").debug("fine %s", step)
        logging.getLogger("ray.serve").info("plain %s", step)
        logging.getLogger("muster").debug("own %s", step)
        print("printed", step)
        return str(os.getpid())


def ask(step, deployment=Speaker, logging_config=None):
    serve.run(deployment.bind(), name="words", route_prefix="/words", logging_config=logging_config)
    with urllib.request.urlopen(f"URL/words/{step}?step={step}") as response:
        print(response.read().decode())


detailed = LoggingConfig(log_level=logging.DEBUG, encoding="JSON", additional_log_standard_attrs=["funcName"])
ask("unset")
ask("app", logging_config=detailed)
ask("deployment", Speaker.options(logging_config={"enable_access_log": False}), detailed)
ask("quiet", logging_config={"log_level": "WARNING"})
serve.start(logging_config={"log_level": "DEBUG"})
ask("global")
"""


@pytest.mark.asyncio(loop_scope="module")
async def test_logging_config_reaches_replicas_that_go_on_by_each_of_its_fields(
    stack: EmbeddedStack, tmp_path: Path
) -> None:
    state_dir = Path(stack.record.state_dir)
    program = LOGGING.replace("URL", stack.record.http_url)
    done = await asyncio.to_thread(run, tmp_path, state_dir, program)
    assert done.returncode == 0, done.stderr
    assert len(set(done.stdout.splitlines())) == 1, "no replica was restarted"
    command = (
        sys.executable,
        "-m",
        "muster.cli.main",
        "logs",
        "words/Speaker",
        "--no-follow",
        "--tail",
        "500",
    )
    shown = await asyncio.to_thread(
        subprocess.run,
        [*command, "--json"],
        env=os.environ | {"MUSTER_STATE_DIR": str(state_dir)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    lines = [json.loads(line) for line in shown.stdout.splitlines()]

    def said(step: str) -> dict[str, dict[str, Any]]:
        """Lines of a step by their messages, without durations."""
        found = {
            line["message"].rpartition(" 200 ")[0] or line["message"]: line
            for line in lines
            if "message" in line
        }
        return {message: line for message, line in found.items() if step in message}

    unset, app, own = said("unset"), said("app"), said("deployment")
    assert unset.keys() == {"plain unset", "printed unset"}
    assert [(line["level"], line["logger"]) for line in unset.values()] == [
        ("info", "ray.serve"),
        ("info", "stdout"),
    ]
    assert app.keys() == {"fine app", "plain app", "own app", "printed app", "GET /words/app"}
    access = app["GET /words/app"]
    assert (app["fine app"]["level"], access["level"], access["logger"]) == ("debug", "info", "ray.serve")
    assert app["fine app"]["funcName"] == "__call__"
    assert app["fine app"]["request_id"] == access["request_id"] != ""
    assert {line["encoding"] for line in app.values()} == {"JSON"}
    assert own.keys() == {"plain deployment", "printed deployment"}, (
        "a deployment's own counts, and logs no requests"
    )
    assert said("quiet").keys() == {"printed quiet"}
    assert said("global").keys() == {
        "fine global",
        "plain global",
        "own global",
        "printed global",
        "GET /words/global",
    }


TICKER = """
import asyncio
import time
from pathlib import Path

from starlette.responses import StreamingResponse

import muster as serve


@serve.deployment(ray_actor_options={"num_cpus": 0.1})
class Ticker:
    def __call__(self, request):
        return StreamingResponse(self.tick())

    async def tick(self):
        try:
            while True:
                yield "tick"
                await asyncio.sleep(0.1)
        finally:
            Path("MARK").write_text(str(time.monotonic()))


serve.run(Ticker.bind(), name="ticker", route_prefix="/ticker")
"""


@pytest.mark.asyncio(loop_scope="module")
async def test_a_streamed_call_with_callers_credentials_stops_within_a_second_when_its_caller_leaves(
    stack: EmbeddedStack, tmp_path: Path
) -> None:
    state_dir, mark = Path(stack.record.state_dir), tmp_path / "stopped"
    done = await asyncio.to_thread(run, tmp_path, state_dir, TICKER.replace("MARK", str(mark)))
    assert done.returncode == 0, done.stderr
    environment = {
        "MUSTER_NATS_URL": stack.record.nats_url,
        "MUSTER_NATS_CREDS_FILE": str(state_dir / "secrets" / "caller.creds"),
    }
    settings = read_bus_settings(Environment(environment), Role.CALLER)
    caller = await connect_nats(settings, name="caller", deadline_s=20.0)
    inbox = caller.new_inbox()
    pieces = await caller.subscribe(inbox)
    await caller.publish("serve.call.ticker.Ticker", b"", reply=inbox, headers={"X-Serve-Stream": "1"})
    for _ in range(3):
        assert (await pieces.next_msg(timeout=20)).data == b"tick"
    assert not mark.exists()
    left_at = time.monotonic()
    await caller.close()
    async with asyncio.timeout(20):
        while not (mark.exists() and mark.read_text()):  # noqa: ASYNC110 - another process writes it
            await asyncio.sleep(0.02)
    assert float(mark.read_text()) - left_at < 1


@pytest.mark.asyncio(loop_scope="module")
async def test_code_is_named_by_its_digest_in_views(stack: EmbeddedStack, tmp_path: Path) -> None:
    from muster.cli.session import StackChoice, find_stack

    result = await asyncio.to_thread(run, tmp_path, Path(stack.record.state_dir))
    assert result.returncode == 0, result.stderr
    address = find_stack(StackChoice(), {"MUSTER_STATE_DIR": stack.record.state_dir}, ROOT)
    async with connect_stack(address) as connected:
        views = {view.name: view for view in await connected.admin.call(ListDeployments())}
    assert len(views["shop/Ingress"].replica_config.code) == 64
    assert views["shop/Ingress"].replica_config.import_path == "__main__:Ingress"


@pytest.mark.asyncio(loop_scope="module")
async def test_a_backup_has_the_code_and_brings_it_back_on_an_empty_stack(
    stack: EmbeddedStack, tmp_path: Path
) -> None:
    def muster(state_dir: str, *arguments: str) -> str:
        result = subprocess.run(
            [sys.executable, "-m", "muster.cli.main", *arguments],
            cwd=tmp_path,
            env={**os.environ, "MUSTER_STATE_DIR": state_dir},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        return result.stdout

    (tmp_path / "helper.py").write_text("NUMBER = 4")
    program = "import helper\n" + PROGRAM.replace("FACTOR = 2", "FACTOR = helper.NUMBER")
    result = await asyncio.to_thread(run, tmp_path, Path(stack.record.state_dir), program)
    assert result.returncode == 0, result.stderr
    await asyncio.to_thread(muster, stack.record.state_dir, "backup", "full.muster")
    await asyncio.to_thread(muster, stack.record.state_dir, "backup", "bare.muster", "--no-code")
    assert zipfile.is_zipfile(tmp_path / "full.muster")
    assert not zipfile.is_zipfile(tmp_path / "bare.muster")
    async with EmbeddedStack(tmp_path / "new" / "state", ANY_PORTS) as new:
        await asyncio.to_thread(muster, new.record.state_dir, "restore", "full.muster", "--yes")
        assert (await asyncio.to_thread(get, f"{new.record.http_url}/shop?word=two"))["number"] == 8


POLICY = """
import time
from pathlib import Path

import laws
import muster as serve
from muster.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy


class Follow:
    def __init__(self, most: int) -> None:
        self.most, self.calls = most, 0

    def __call__(self, ctx: AutoscalingContext) -> tuple[float, dict[str, int]]:
        self.calls += 1
        Path("STATE").write_text(f"{ctx.policy_state.get('calls', 0)} {self.calls} {ctx.deployment_name}")
        level = max(ctx.raw_metrics["level"][replica][-1].value for replica in ctx.aggregated_metrics["level"])
        if level < 0:
            raise ValueError("the level is below zero")
        if level == 0:
            time.sleep(6)
        return min(level, self.most), {"calls": self.calls}


@serve.deployment(
    ray_actor_options={"num_cpus": 0.1},
    autoscaling_config=AutoscalingConfig(
        max_replicas=4,
        upscale_delay_s=0,
        downscale_delay_s=0,
        metrics_interval_s=1,
        look_back_period_s=5,
        policy=AutoscalingPolicy(policy_function=Follow, policy_kwargs={"most": 3}),
    ),
)
class Levelled:
    def record_autoscaling_stats(self) -> dict[str, float]:
        return {"level": float(Path("LEVEL").read_text())}

    def __call__(self, request) -> str:
        return serve.get_replica_context().replica_id.unique_id


serve.run(Levelled.bind(), name="levelled", route_prefix="/levelled")
"""


@pytest.mark.asyncio(loop_scope="module")
async def test_a_policy_of_the_program_scales_by_what_replicas_record_and_one_that_raises_leaves_their_number(
    stack: EmbeddedStack, tmp_path: Path
) -> None:
    from muster.cli.session import StackChoice, find_stack

    state_dir, level, state = Path(stack.record.state_dir), tmp_path / "level", tmp_path / "state"
    program = POLICY.replace("LEVEL", str(level)).replace("STATE", str(state))
    (tmp_path / "laws.py").write_text("def two(ctx):\n    return 2, {}\n")
    level.write_text("3")
    done = await asyncio.to_thread(run, tmp_path, state_dir, program)
    assert done.returncode == 0, done.stderr
    address = find_stack(StackChoice(), {"MUSTER_STATE_DIR": stack.record.state_dir}, ROOT)
    async with connect_stack(address) as connected:

        async def running() -> set[str]:
            views = {view.name: view for view in await connected.admin.call(ListDeployments())}
            return {
                each.replica_tag for each in views["levelled/Levelled"].replicas if each.state == "running"
            }

        async def until_running(count: int) -> set[str]:
            async with asyncio.timeout(60):
                while len(found := await running()) != count:  # noqa: ASYNC110 - another process decides
                    await asyncio.sleep(0.1)
            return found

        async def until_decided(words: str) -> None:
            async with asyncio.timeout(60):
                while True:
                    views = {v.backend_tag: v for v in await connected.admin.call(GetAutoscaling())}
                    if words in views["levelled/Levelled"].why:
                        return
                    await asyncio.sleep(0.1)

        await until_running(3)
        level.write_text("1")
        [first] = await until_running(1)
        last, calls, name = state.read_text().split()
        assert (int(last), name) == (int(calls) - 1, "Levelled"), "its state comes back to it"
        level.write_text("2")
        two = await until_running(2)
        assert first in two
        level.write_text("-1")
        await until_decided("the policy __main__:Follow failed: ValueError: the level is below zero")
        assert await running() == two
        level.write_text("0")
        await until_decided("did not return within 2 s")
        assert await running() == two
        level.write_text("2")
        await until_decided("the policy function asks for 2 replicas")
        again = await asyncio.to_thread(run, tmp_path, state_dir, program)
        assert again.returncode == 0, again.stderr
        assert await running() == two, "the same program again restarts nothing"
        changed = program.replace('"most": 3', '"most": 1')
        done = await asyncio.to_thread(run, tmp_path, state_dir, changed)
        assert done.returncode == 0, done.stderr
        assert await until_running(1) <= two, "another policy neither"
        named = program.replace(
            'policy_function=Follow, policy_kwargs={"most": 3}', 'policy_function="laws:two"'
        )
        done = await asyncio.to_thread(run, tmp_path, state_dir, named)
        assert done.returncode == 0, done.stderr
        await until_decided("the policy function asks for 2 replicas")
        await until_running(2)


SIBLINGS = """
import helpers
import muster as serve
from mylib.model import Model


class Plain:
    pass


@serve.deployment(
    ray_actor_options={"num_cpus": 0.1, "runtime_env": {"working_dir": "files", "py_modules": ["modules/extra"]}}
)
class Main:
    def __init__(self, model, thing):
        self.model, self.thing = model, thing

    async def __call__(self, request):
        import extra
        import lazy

        return {
            "helper": helpers.tell(self.thing),
            "model": await self.model.remote(2),
            "lazy": lazy.VALUE,
            "extra": extra.VALUE,
            "file": open("file.txt").read(),
            "replica": serve.get_replica_context().replica_id,
        }


serve.run(Main.bind(Model.bind(), helpers.Thing(7)), name="files", route_prefix="/files")
"""
FILES = {
    "helpers.py": "class Thing:\n    def __init__(self, n):\n        self.n = n\ndef tell(thing):\n    return thing.n",
    "lazy.py": "VALUE = 'later'",
    "mylib/__init__.py": "",
    "mylib/model.py": (
        "from pathlib import Path\nimport muster as serve\nfrom mylib.sub.factor import FACTOR\n"
        "@serve.deployment(ray_actor_options={'num_cpus': 0.1})\nclass Model:\n"
        "    def __call__(self, n):\n"
        "        assert 'code-' in __file__, __file__\n"
        "        return [n * FACTOR, Path(__file__).with_name('data.txt').read_text()]"
    ),
    "mylib/data.txt": "in the package",
    "mylib/sub/__init__.py": "",
    "mylib/sub/factor.py": "FACTOR = 10",
    "modules/extra/__init__.py": "VALUE = 'extra'",
    "files/file.txt": "in the working directory",
    "files/secrets/key": "not to travel",
}


@pytest.mark.asyncio(loop_scope="module")
async def test_files_beside_the_program_and_those_of_its_runtime_env_travel(
    stack: EmbeddedStack, tmp_path: Path
) -> None:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    state_dir, url = Path(stack.record.state_dir), f"{stack.record.http_url}/files"
    result = await asyncio.to_thread(run, tmp_path, state_dir, SIBLINGS)
    assert result.returncode == 0, result.stderr
    first = await asyncio.to_thread(get, url)
    expected = {
        "helper": 7,
        "model": [20, "in the package"],
        "lazy": "later",
        "extra": "extra",
        "file": "in the working directory",
        "replica": first["replica"],
    }
    assert first == expected
    assert not await asyncio.to_thread(lambda: list(state_dir.rglob("secrets/key")))
    result = await asyncio.to_thread(run, tmp_path, state_dir, SIBLINGS)
    assert result.returncode == 0, result.stderr
    assert await asyncio.to_thread(get, url) == expected, "the same files again restart nothing"
    (tmp_path / "mylib/sub/factor.py").write_text("FACTOR = 11")
    (tmp_path / "files/file.txt").write_text("another")
    result = await asyncio.to_thread(run, tmp_path, state_dir, SIBLINGS)
    assert result.returncode == 0, result.stderr
    after = await asyncio.to_thread(get, url)
    assert after["replica"] != first["replica"]
    assert (after["model"][0], after["file"]) == (22, "another")


PACKAGES = """
import muster as serve


def options(**runtime_env):
    return {"num_cpus": 0.1, "runtime_env": runtime_env}


@serve.deployment(ray_actor_options=options(pip=["requests==2.25.1"]))
class Old:
    def __call__(self):
        import requests
        return requests.__version__


@serve.deployment(ray_actor_options=options(uv=["requests==2.26.0"]))
class Main:
    def __init__(self, old):
        self.old = old

    async def __call__(self, request):
        import requests
        return [await self.old.remote(), requests.__version__]


serve.run(Main.bind(Old.bind()), name="packages", route_prefix="/packages")
"""


@pytest.mark.asyncio(loop_scope="module")
async def test_deployments_of_one_application_have_packages_of_their_own(
    stack: EmbeddedStack, tmp_path: Path
) -> None:
    state_dir = Path(stack.record.state_dir)
    result = await asyncio.to_thread(run, tmp_path, state_dir, PACKAGES)
    assert result.returncode == 0, result.stderr
    assert await asyncio.to_thread(get, f"{stack.record.http_url}/packages") == ["2.25.1", "2.26.0"]
    broken = PACKAGES.replace("requests==2.25.1", "no-such-package-of-muster==1").replace(
        "@serve.deployment(ray", "@serve.deployment(max_constructor_retry_count=1, ray"
    )
    result = await asyncio.to_thread(run, tmp_path, state_dir, broken)
    assert result.returncode == 1
    assert "DeployFailed" in result.stderr
    assert "No matching distribution found for no-such-package-of-muster==1" in result.stderr
    assert await asyncio.to_thread(get, f"{stack.record.http_url}/packages") == ["2.25.1", "2.26.0"]


OWN = """
import sys
import muster as serve

@serve.deployment(ray_actor_options={"num_cpus": 0.1})
def hello(request):
    print("greets")
    return "hello from " + request.query_params.get("name", "nobody")

serve.start(http_options={"port": 0, "ssl_certfile": "tls.crt", "ssl_keyfile": "tls.key"})
handle = serve.run(hello.bind())
sys.stdin.readline()
serve.shutdown()
print("ended")
"""


AND_AGAIN = """
@serve.deployment
class Again:
    def __init__(self, counter):
        self.counter = counter

    async def add(self, n):
        return await self.counter.add.remote(n)


ray.shutdown()  # of the replicas too
counter = Counter.remote()
handle = serve.run(Again.bind(counter), name="again", route_prefix="/again")
print("again", handle.add.remote(4).result())


@ray.remote
def in_a_task(handle, n):
    return handle.add.remote(n).result() + serve.get_app_handle("again").add.remote(n).result()


@serve.deployment
class Refs:
    def __init__(self, refs):
        self.value = ray.get(refs[0])

    def __call__(self, nested):
        return self.value + ray.get(nested["ref"])


print("in a task", ray.get(in_a_task.remote(handle, 1)))
refs = serve.run(Refs.bind([ray.put(1)]), name="refs", route_prefix="/refs")
print("references", refs.remote({"ref": ray.put(2)}).result())
"""


def test_a_program_and_its_replicas_share_a_ray_also_after_it_was_shut_down(tmp_path: Path) -> None:
    program = programs_of.for_muster((programs_of.PROGRAMS / "ray_actors.py").read_text())
    done = run(
        tmp_path,
        None,
        program.replace(
            "import muster as serve", 'import muster as serve\nserve.start(http_options={"port": 0})'
        )
        + AND_AGAIN,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        *programs_of.recorded()["ray_actors"],
        "again 4",
        "in a task 11",
        "references 3",
    ]


@pytest.mark.asyncio(loop_scope="module")
async def test_rays_objects_are_arguments_and_its_tasks_run_in_replicas_beside_a_stack(
    stack: EmbeddedStack, tmp_path: Path
) -> None:
    port = int(stack.record.http_url.rpartition(":")[2])
    printed = await asyncio.to_thread(
        programs_of.run_under_muster, "ray_tasks", port, Path(stack.record.state_dir), tmp_path
    )
    assert printed == programs_of.recorded()["ray_tasks"]


RANKS = """
import time

import muster as serve
from muster.schema import ReplicaRank


@serve.deployment(num_replicas=3, ray_actor_options={"num_cpus": 0.1})
class Shard:
    def __init__(self):
        self.at_start = serve.get_replica_context().rank.rank
        self.told = []

    def reconfigure(self, user_config, rank: ReplicaRank):
        assert isinstance(rank, ReplicaRank), rank
        self.told.append(rank.rank)

    def ranks(self):
        context = serve.get_replica_context()
        return context.rank.rank, context.rank.local_rank, context.world_size, self.at_start, self.told[-1]


def ranks(handle, wanted):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = sorted(handle.broadcast("ranks").results())
        if [(rank, local, world) for rank, local, world, _, _ in found] == [(n, n, wanted) for n in range(wanted)]:
            return found
        time.sleep(0.1)
    return f"not {wanted}: {found}"


handle = serve.run(Shard.bind(), name="shards", route_prefix=None)
print(ranks(handle, 3))
serve.run(Shard.options(num_replicas=2).bind(), name="shards", route_prefix=None)
print(ranks(handle, 2))
serve.delete("shards")
"""


def test_replicas_have_ranks_without_gaps_and_learn_of_new_ones(tmp_path: Path) -> None:
    done = run(tmp_path, None, RANKS)
    assert done.returncode == 0, done.stderr
    three, two = done.stdout.splitlines()
    assert three == "[(0, 0, 3, 0, 0), (1, 1, 3, 1, 1), (2, 2, 3, 2, 2)]"
    assert two == "[(0, 0, 2, 0, 0), (1, 1, 2, 1, 1)]"


def test_a_program_without_a_stack_has_one_for_its_life(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    trust = Certificate(tmp_path).trust()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MUSTER_")}
    process = subprocess.Popen(
        [sys.executable, "own.py"],
        cwd=tmp_path,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stderr is not None
    try:
        line = process.stderr.readline()
        found = re.search(r"(https://\S+); ", line)
        assert found is not None, line + process.stderr.read()
        end = time.monotonic() + 120
        while True:
            try:
                with urllib.request.urlopen(f"{found[1]}/?name=you", timeout=10, context=trust) as response:
                    assert response.read() == b"hello from you"
                break
            except OSError:
                assert time.monotonic() < end
                time.sleep(0.2)
        output, errors = process.communicate("\n", timeout=120)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, errors
    assert output == "(default/hello#1) greets\nended\n"
    assert re.search(r"^\(default/hello#1\) INFO GET / 200 [\d.]+ms$", errors, re.MULTILINE), errors
    assert not list(tmp_path.glob(".muster*"))

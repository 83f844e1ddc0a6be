"""Ray Serve's commands on a real stack: `muster run` with one of its own; `build`, `deploy`, `status` beside one."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = pytest.mark.timeout(300)

APP = """
import os

import words
import muster as serve


@serve.deployment(ray_actor_options={"num_cpus": 0.1})
class Hello:
    def __init__(self, greeting="hello"):
        self.greeting = words.polite(greeting)

    def __call__(self, request):
        print("greeted", request.query_params["name"])
        return f"{self.greeting} {request.query_params['name']} {os.getpid()}"


app = Hello.bind()


def build(args):
    return Hello.bind(args["greeting"])
"""
WITH_AN_ACTOR = """
import ray


@ray.remote(num_cpus=0)
class Counter:
    count = 0

    def add(self):
        self.count += 1
        return self.count


counter = Counter.remote()


class Counting(Hello.func_or_class):
    async def __call__(self, request):
        return f"{super().__call__(request)} {await counter.add.remote()}"


app = serve.deployment(Counting, ray_actor_options={"num_cpus": 0.1}).bind()
"""
SCALED = """
from pathlib import Path

import muster as serve
from muster.config import AutoscalingContext, DeploymentID

SCALING = {"min_replicas": 1, "max_replicas": 4, "upscale_delay_s": 0, "metrics_interval_s": 1}


@serve.deployment(ray_actor_options={"num_cpus": 0.1}, autoscaling_config=SCALING)
class Back:
    def record_autoscaling_stats(self):
        return {"level": float(Path("LEVEL_FILE").read_text())}

    def __call__(self, request):
        return "back"


@serve.deployment(ray_actor_options={"num_cpus": 0.1}, autoscaling_config=SCALING)
class Front:
    def __init__(self, back):
        self.back = back


def both(contexts: dict[DeploymentID, AutoscalingContext]):
    by_name = {each.name: each for each in contexts}
    levels = contexts[by_name["Back"]].aggregated_metrics.get("level", {})
    level = max(levels.values(), default=1)
    return {by_name["Front"]: level, by_name["Back"]: level + 1}, {}


app = Front.bind(Back.bind())
"""
WORDS = "def polite(text):\n    return text + ','\n"


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("MUSTER_")}


@contextmanager
def start(directory: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-m", "muster.cli.main", *words],
        cwd=directory,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def muster(directory: Path, *words: str, code: int = 0) -> str:
    with start(directory, *words) as done:
        output = done.communicate(timeout=200)[0]
    assert done.returncode == code, output
    return output


def lines_until(process: subprocess.Popen[str], text: str) -> list[str]:
    """What a process has printed up to a line with the text."""
    lines = []
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line.rstrip())
        if text in line:
            return lines
    raise AssertionError(f"it ended without {text!r}:\n" + "\n".join(lines))


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as response:
        return str(response.read().decode())


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a program of two modules and nothing else."""
    directory = tmp_path_factory.mktemp("program")
    (directory / "app.py").write_text(APP)
    (directory / "words.py").write_text(WORDS)
    return directory


@pytest.fixture(scope="module")
def url(directory: Path) -> Iterator[str]:
    """A stack that `muster start` has started in the background from that directory: its HTTP address."""
    line = muster(directory, "start", "--http-port", "0").splitlines()[-1]
    assert "the stack runs in the background" in line
    try:
        yield line.partition(" at ")[2].partition(";")[0]
    finally:
        stop(int(line.partition("'kill ")[2].partition("'")[0]))


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + 60
    while Path(f"/proc/{pid}/stat").exists() and time.monotonic() < deadline:
        time.sleep(0.2)


def status(directory: Path, name: str) -> Any:
    return yaml.safe_load(muster(directory, "status", "--name", name, "--format", "ray"))


def test_what_build_writes_is_deployed_and_again_restarts_nothing(directory: Path, url: str) -> None:
    assert "a stack runs already" in muster(directory, "start")
    muster(directory, "build", "app:app", "-o", "f.yaml")
    assert "application default is deployed" in muster(directory, "deploy", "f.yaml")
    shown = status(directory, "default")
    assert (shown["status"], shown["deployments"]["Hello"]["replica_states"]) == ("RUNNING", {"RUNNING": 1})
    first = get(f"{url}/?name=bob")
    assert first.startswith("hello, bob ")
    assert "nothing to do: application default" in muster(directory, "diff", "f.yaml")
    assert "nothing to do: application default" in muster(directory, "deploy", "f.yaml")
    assert get(f"{url}/?name=bob") == first, "the same process serves"
    config = yaml.safe_load(muster(directory, "config", "--name", "default"))
    assert config["import_path"] == "app:app"
    (directory / "g.yaml").write_text(
        "applications:\n"
        "- {name: moved, route_prefix: /, import_path: 'app:build', args: {greeting: moin}}\n"
        "- {name: hidden, route_prefix: null, import_path: app.app}\n"
    )
    told = muster(directory, "diff", "g.yaml", code=1)
    assert "+ route_prefix: /" in told
    assert "note: the file leaves it out" in told
    assert "application default is deleted: the file leaves it out" in muster(directory, "deploy", "g.yaml")
    assert get(f"{url}/?name=bob").startswith("moin, bob ")
    assert status(directory, "hidden")["status"] == "RUNNING"
    assert "is deleted" in muster(directory, "shutdown", "-y")
    assert muster(directory, "config") == "No configuration was found.\n"
    with pytest.raises(
        urllib.error.URLError, match="refused"
    ):  # until something is deployed, as in Ray Serve
        get(url)
    assert "there is nothing" in muster(directory, "shutdown", "-y")
    shown = yaml.safe_load(muster(directory, "status"))
    assert (shown["applications"], shown["proxies"]) == ({}, {})
    muster(directory, "deploy", "g.yaml")
    assert get(f"{url}/?name=bob").startswith("moin, bob ")
    muster(directory, "shutdown", "-y")


def test_an_application_that_cannot_be_built_fails_by_itself_and_its_former_version_serves_on(
    directory: Path, url: str
) -> None:
    (directory / "h.yaml").write_text(
        "applications:\n"
        "- {name: changes, route_prefix: /changes, import_path: app:app}\n"
        "- {name: stays, route_prefix: /stays, import_path: app:app}\n"
    )
    muster(directory, "deploy", "h.yaml")
    first = get(f"{url}/changes?name=bob")
    (directory / "i.yaml").write_text(
        "applications:\n"
        "- {name: changes, route_prefix: /changes, import_path: 'app:build', args: {greting: moin}}\n"
        "- {name: new, route_prefix: /new, import_path: 'nowhere:app'}\n"
        "- {name: stays, route_prefix: /stays, import_path: 'app:build', args: {greeting: moin}}\n"
    )
    output = muster(directory, "deploy", "i.yaml")
    assert "error: application changes: the change failed:" in output
    assert "KeyError: 'greeting'" in output
    assert "i.yaml:3: applications[1].import_path: nowhere:app: No module named 'nowhere'" in output
    assert "application stays is deployed" in output
    assert get(f"{url}/stays?name=bob").startswith("moin, bob ")
    assert get(f"{url}/changes?name=bob") == first, "the same process serves"
    shown = yaml.safe_load(muster(directory, "status"))["applications"]
    states = {name: each["status"] for name, each in shown.items()}
    assert states == {"changes": "DEPLOY_FAILED", "new": "DEPLOY_FAILED", "stays": "RUNNING"}
    assert shown["changes"]["message"].startswith("Deploying app 'changes' failed with exception:\n")
    assert "KeyError: 'greeting'" in shown["changes"]["message"]
    assert shown["changes"]["deployments"]["Hello"]["replica_states"] == {"RUNNING": 1}
    assert shown["new"]["deployments"] == {}
    configs = muster(directory, "config", "--name", "new")
    assert yaml.safe_load(configs)["import_path"] == "nowhere:app"
    output = muster(directory, "deploy", "h.yaml")
    assert "nothing to do: application changes" in output
    assert "application new is deleted: the file leaves it out" in output
    shown = yaml.safe_load(muster(directory, "status"))["applications"]
    assert {name: each["status"] for name, each in shown.items()} == dict.fromkeys(
        ("changes", "stays"), "RUNNING"
    )
    muster(directory, "shutdown", "-y")


def test_the_policy_of_an_application_in_a_file_scales_its_deployments(directory: Path, url: str) -> None:
    (directory / "scaled.py").write_text(SCALED.replace("LEVEL_FILE", str(directory / "level")))
    (directory / "level").write_text("1")
    (directory / "s.yaml").write_text(
        "applications:\n"
        "- name: scaled\n"
        "  route_prefix: /scaled\n"
        "  import_path: scaled:app\n"
        "  autoscaling_policy:\n"
        "    policy_function: scaled:both\n"
    )
    muster(directory, "deploy", "s.yaml")
    (directory / "level").write_text("2")
    deadline = time.monotonic() + 60
    while True:
        shown = status(directory, "scaled")["deployments"]
        running = {name: each["replica_states"].get("RUNNING") for name, each in shown.items()}
        if running == {"Front": 2, "Back": 3}:
            break
        assert time.monotonic() < deadline, muster(directory, "autoscaling", "list")
        time.sleep(0.5)
    muster(directory, "shutdown", "-y")


def test_a_run_beside_a_stack_reloads_and_deletes_at_ctrl_c_what_it_deployed(
    directory: Path, url: str
) -> None:
    words = directory / "words.py"
    try:
        with start(
            directory,
            *("run", "app:build", "greeting=hey", "--name", "ran", "--route-prefix", "/ran", "--reload"),
        ) as run:
            lines = lines_until(run, "Ctrl-C ends it")
            assert lines[0] == "Running import path: 'app:build'."
            assert f"Application 'ran' is ready at {url}/ran." in lines
            assert get(f"{url}/ran?name=eve").startswith("hey, eve ")
            lines_until(run, "greeted eve")
            assert re.search(
                r" INFO +ran/Hello#\d+ ray.serve: GET /ran 200 [\d.]+ms", lines_until(run, "GET ")[-1]
            )
            words.write_text(WORDS.replace("','", "'!'"))
            lines_until(run, "is deployed")
            assert get(f"{url}/ran?name=eve").startswith("hey! eve ")
            words.write_text("raise RuntimeError('half written')\n")
            assert "half written" in "\n".join(lines_until(run, "What served before still serves"))
            assert get(f"{url}/ran?name=eve").startswith("hey! eve ")
            run.send_signal(signal.SIGINT)
            lines_until(run, "Got KeyboardInterrupt, shutting down...")
            assert run.wait(60) == 0
    finally:
        words.write_text(WORDS)
    with pytest.raises(urllib.error.HTTPError, match="404") as raised:
        get(f"{url}/ran?name=eve")
    raised.value.close()


def test_a_run_that_fails_says_why_and_leaves_nothing(directory: Path, url: str) -> None:
    (directory / "failing.py").write_text(
        "import muster as serve\n\n"
        '@serve.deployment(max_constructor_retry_count=1, ray_actor_options={"num_cpus": 0.1})\n'
        "class Failing:\n    def __init__(self):\n        raise ValueError('no weights')\n\n"
        "app = Failing.bind()\n"
    )
    with start(directory, "run", "failing:app", "--name", "failing", "--non-blocking") as run:
        output = run.communicate(timeout=120)[0]
    assert run.returncode == 1
    assert "ValueError: no weights" in output
    assert "failing" not in muster(directory, "app", "list")


def test_a_run_without_a_stack_has_one_of_its_own_that_other_commands_find(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APP + WITH_AN_ACTOR)  # of the Ray that the command then shares
    (tmp_path / "words.py").write_text(WORDS)
    with start(tmp_path, "run", "--http-port", "0", "app:app") as run:
        lines = lines_until(run, "Ctrl-C ends it")
        [line] = [line for line in lines if "Muster runs within this process, at " in line]
        url = line.partition(" at ")[2].partition(";")[0]
        answers = [get(f"{url}/?name=ann").split() for _ in range(2)]
        assert [(*answer[:2], answer[3]) for answer in answers] == [
            ("hello,", "ann", "1"),
            ("hello,", "ann", "2"),
        ]
        assert status(tmp_path, "default")["status"] == "RUNNING"
        run.send_signal(signal.SIGTERM)
        assert run.wait(60) == 0
    assert not (tmp_path / ".muster").exists()


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def test_an_empty_stack_in_the_background_takes_the_port_of_the_first_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    default, port, another = free_port(), free_port(), free_port()
    # As another stack may have the default port on this machine.
    (tmp_path / "sitecustomize.py").write_text(
        f"import muster.cli.background as background\nbackground.DEFAULT_HTTP_PORT = {default}\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "app.py").write_text(APP)
    (tmp_path / "words.py").write_text(WORDS)
    file = "http_options: {{port: {}}}\napplications: [{{import_path: 'app:app'}}]\n"
    (tmp_path / "one.yaml").write_text(file.format(port))
    (tmp_path / "two.yaml").write_text(file.format(another))
    assert "Unable to shutdown: no stack was found" in muster(tmp_path, "shutdown", "-y")
    muster(tmp_path, "shutdown", "-y", "--json", code=3)
    muster(tmp_path, "start", "--http-port", str(default))
    pids = [json.loads((tmp_path / ".muster/run.json").read_text())["pid"]]
    try:
        output = muster(tmp_path, "deploy", "one.yaml")
        assert f"the stack serves nothing yet, and starts anew at HTTP port {port}" in output
        pids.append(json.loads((tmp_path / ".muster/run.json").read_text())["pid"])
        assert "note:" not in output
        assert get(f"http://127.0.0.1:{port}/?name=bob").startswith("hello, bob ")
        output = muster(tmp_path, "deploy", "two.yaml")
        assert "note: two.yaml: without effect in Muster: http_options.port;" in output
        assert get(f"http://127.0.0.1:{port}/?name=bob").startswith("hello, bob ")
    finally:
        stop(pids[-1])
    assert len(set(pids)) == 2

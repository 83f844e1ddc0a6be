"""The stack in containers that all compose tests share: built and started once, gone without a trace afterwards."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from testcontainers.compose import DockerCompose

from muster.secrets import generate
from tests.compose.stack import PROJECT, ROOT, Stack, make_readable, why_no_engine
from tests.support.servers.reserved_port import HeldPort

_REQUIRED = "MUSTER_REQUIRE_COMPOSE"


def _quick_prometheus(directory: Path) -> Path:
    """A copy of Prometheus' configuration that scrapes and resolves names every second."""
    shutil.copytree(ROOT / "deploy/prometheus", directory)
    file = directory / "prometheus.yml"
    text = file.read_text().replace("scrape_timeout: 4s", "scrape_timeout: 1s")
    assert text.count(": 5s") >= 6, "intervals as they are there"
    file.write_text(text.replace(": 5s", ": 1s"))
    make_readable(directory)
    return directory


def _apps(directory: Path) -> Path:
    """The examples, and what attacks its host."""
    shutil.copytree(ROOT / "examples", directory)
    shutil.copytree(Path(__file__).parent / "hostile_app", directory / "hostile_app")
    make_readable(directory)
    return directory


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Every service but Grafana, whose image need not be at hand."""
    why = why_no_engine()
    if why is not None:
        if os.environ.get(_REQUIRED) == "1":
            pytest.fail(f"{_REQUIRED}=1, but no Docker engine with compose answers: {why}")
        pytest.skip(f"NOT TESTED: the stack in containers, for no Docker engine with compose answers: {why}")
    secrets = generate(tmp_path_factory.mktemp("secrets"), for_containers=True)
    files = ["compose.yaml", "deploy/grafana/left-out.yaml", "tests/compose/quick.yaml"]
    compose = DockerCompose(ROOT, files, wait=False)
    prometheus = _quick_prometheus(tmp_path_factory.mktemp("prometheus") / "etc")
    apps = _apps(tmp_path_factory.mktemp("models") / "apps")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("COMPOSE_PROJECT_NAME", PROJECT)
        environment.setenv("MUSTER_SECRETS", str(secrets.directory))
        environment.setenv("MUSTER_TEST_PROMETHEUS", str(prometheus))
        environment.setenv("MUSTER_APPS", str(apps))
        # Chosen here and not by the engine, for `muster` finds the stack by them as a user's does.
        ports = {name: HeldPort() for name in ("HTTP", "NATS", "PROMETHEUS", "CONSOLE")}
        for name, held in ports.items():
            environment.setenv(f"MUSTER_{name}_PORT", f"127.0.0.1:{held.port}")
        for name in ("MUSTER_REQUIREMENTS", "COMPOSE_PROFILES", "COMPOSE_FILE"):
            environment.delenv(name, raising=False)
        compose.stop()  # what a run that was killed left behind
        stack = Stack(compose, secrets)
        stack.build()
        with compose:
            stack.wait_for_containers()
            yield stack

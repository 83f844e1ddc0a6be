"""What the services of the embedded stack are told."""

from __future__ import annotations

from pathlib import Path

from muster.embedded.options import StackOptions, StatePaths
from muster.embedded.services import ServiceSpecs
from muster.secrets import Secrets
from serve_common.runtime.settings import Environment
from serve_replica_host.settings import read_host_settings

PORTS = dict.fromkeys(
    ("nats", "nats_monitor", "postgres", "http", "controller_ops", "host_ops", "proxy_ops"), 1
)


def specs(root: Path, options: StackOptions | None = None) -> ServiceSpecs:
    paths = StatePaths(root)
    return ServiceSpecs(paths, options or StackOptions(), Secrets(paths.secrets), PORTS, paths.ray)


def test_bytecode_goes_to_the_state_directory_where_it_may_not_lie_beside_the_sources(tmp_path: Path) -> None:
    for spec in specs(tmp_path).all({"PYTHONDONTWRITEBYTECODE": "1", "PATH": "/bin"}):
        assert "PYTHONDONTWRITEBYTECODE" not in spec.env
        assert spec.env["PYTHONPYCACHEPREFIX"] == str(tmp_path / "bytecode")
        assert spec.env["PATH"] == "/bin"


def test_otherwise_bytecode_lies_where_python_puts_it(tmp_path: Path) -> None:
    assert all("PYTHONPYCACHEPREFIX" not in spec.env for spec in specs(tmp_path).all({"PATH": "/bin"}))


def test_the_proxy_is_told_how_many_processes_share_its_port(tmp_path: Path) -> None:
    for options, expected in ((None, "1"), (StackOptions(proxy_processes=4), "4")):
        envs = [spec.env for spec in specs(tmp_path, options).all({})]
        assert [env["MUSTER_PROXY_PROCESSES"] for env in envs if "MUSTER_PROXY_PROCESSES" in env] == [
            expected
        ]


def test_the_controller_alone_is_told_where_nats_shows_its_state(tmp_path: Path) -> None:
    told = {spec.name: spec.env.get("MUSTER_NATS_MONITOR_URL") for spec in specs(tmp_path).all({})}
    assert told == {"controller": "http://127.0.0.1:1", "replica-host": None, "proxy": None}


def test_replicas_of_another_user_have_their_places_outside_the_state_directory(tmp_path: Path) -> None:
    def of_host(root: Path, environment: dict[str, str]) -> dict[str, str]:
        return dict(next(spec.env for spec in specs(root).all(environment) if spec.name == "replica-host"))

    same = of_host(tmp_path, {})
    assert same["MUSTER_RAY_TEMP_DIR"] == str(tmp_path / "ray")
    assert same["PROMETHEUS_MULTIPROC_DIR"] == str(tmp_path / "metrics")
    other = of_host(tmp_path, {"MUSTER_REPLICA_USER": "nobody"})
    told = {"MUSTER_NATS_PASSWORD": "a", "MUSTER_NATS_PASSWORD_FILE": "", "MUSTER_REPLICA_NATS_PASSWORD": "b"}
    settings = read_host_settings(Environment(other | told | {"MUSTER_REPLICA_NATS_PASSWORD_FILE": ""}))
    assert settings.metrics_dir.startswith(settings.own_dir)
    assert str(tmp_path) not in settings.own_dir + settings.ray_temp_dir
    assert (
        other["MUSTER_RAY_TEMP_DIR"]
        != of_host(tmp_path / "b", {"MUSTER_REPLICA_USER": "nobody"})["MUSTER_RAY_TEMP_DIR"]
    )

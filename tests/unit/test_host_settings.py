"""A host's settings, and the environment that Ray gets."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from serve_common.errors import BadField
from serve_common.settings import Environment
from serve_replica_host.adapters.ray_environment import (
    SESSIONS_KEPT,
    TOKEN_FILE,
    prepare_ray_environment,
    remove_old_sessions,
)
from serve_replica_host.settings import SPARE_REPLICAS, read_host_settings

MINIMAL = {"SERVE_NATS_PASSWORD": "h", "SERVE_REPLICA_NATS_PASSWORD": "r", "SERVE_HOST_ID": "host-1"}


def test_defaults_need_only_the_two_passwords() -> None:
    settings = read_host_settings(Environment(MINIMAL))

    assert (settings.bus.user, settings.replica_bus.user) == ("host", "replica")
    assert (settings.bus.password, settings.replica_bus.password) == ("h", "r")
    assert (settings.operations.port, settings.drain_timeout_s) == (9103, 20.0)
    assert settings.num_cpus is None
    assert settings.spare_replicas == SPARE_REPLICAS
    assert settings.ray_address is None
    assert settings.app_root == str(Path.cwd())
    assert settings.metrics_dir.startswith(settings.ray_temp_dir)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SERVE_RAY_TEMP_DIR", "relative/dir"),
        ("SERVE_RAY_TEMP_DIR", "/tmp/" + "x" * 80),
        ("SERVE_NUM_CPUS", "many"),
        ("SERVE_SPARE_REPLICAS", "-1"),
        ("SERVE_HOST_ID", "no spaces"),
        ("SERVE_DRAIN_TIMEOUT_S", "-1"),
    ],
)
def test_a_bad_value_names_its_variable(name: str, value: str) -> None:
    with pytest.raises(BadField, match=name):
        read_host_settings(Environment(MINIMAL | {name: value}))


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_USAGE_STATS_ENABLED"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return monkeypatch


def test_a_local_ray_gets_a_private_token_that_is_kept(
    tmp_path: Path, clean_environment: pytest.MonkeyPatch
) -> None:
    import os

    prepare_ray_environment(tmp_path / "ray", is_local=True)
    token = (tmp_path / "ray" / TOKEN_FILE).read_text()
    assert os.environ["RAY_AUTH_MODE"] == "token"
    assert os.environ["RAY_AUTH_TOKEN_PATH"] == str(tmp_path / "ray" / TOKEN_FILE)
    assert stat.S_IMODE((tmp_path / "ray" / TOKEN_FILE).stat().st_mode) == 0o600
    assert len(token) == 64

    clean_environment.delenv("RAY_AUTH_TOKEN_PATH")
    prepare_ray_environment(tmp_path / "ray", is_local=True)
    assert (tmp_path / "ray" / TOKEN_FILE).read_text() == token


def test_a_token_file_that_others_can_read_is_refused(
    tmp_path: Path, clean_environment: pytest.MonkeyPatch
) -> None:
    (tmp_path / TOKEN_FILE).write_text("known")
    (tmp_path / TOKEN_FILE).chmod(0o644)

    with pytest.raises(BadField, match="not a private file"):
        prepare_ray_environment(tmp_path, is_local=True)


def test_an_existing_cluster_keeps_its_own_authentication(
    tmp_path: Path, clean_environment: pytest.MonkeyPatch
) -> None:
    import os

    prepare_ray_environment(tmp_path, is_local=False)

    assert "RAY_AUTH_MODE" not in os.environ
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"
    assert list(tmp_path.iterdir()) == []


def test_only_the_newest_sessions_of_ray_are_kept(tmp_path: Path) -> None:
    for day in range(1, 8):
        (tmp_path / f"session_2026-01-0{day}_00-00-00_1_1").mkdir()
    (tmp_path / "session_latest").symlink_to(tmp_path / "session_2026-01-01_00-00-00_1_1")

    remove_old_sessions(tmp_path)

    kept = sorted(path.name for path in tmp_path.glob("session_2*"))
    assert len(kept) == SESSIONS_KEPT
    assert kept[-1].startswith("session_2026-01-07")

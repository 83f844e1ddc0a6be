"""A host's settings, and the environment that Ray gets."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

import msgspec
import pytest

from serve_common.errors import BadField
from serve_common.runtime.child_process import ensure_private_directory
from serve_common.runtime.settings import Environment
from serve_replica_host.adapters.ray_protocol import RaySettings
from serve_replica_host.ray_main import prepare_ray_environment
from serve_replica_host.settings import SPARE_REPLICAS, read_host_settings
from tests.unit.serve_replica_host.adapters.test_ray_process import SETTINGS

MINIMAL = {"MUSTER_NATS_PASSWORD": "h", "MUSTER_REPLICA_NATS_PASSWORD": "r", "MUSTER_HOST_ID": "host-1"}


def ray_settings(temp_dir: Path, address: str | None = None) -> RaySettings:
    return msgspec.structs.replace(SETTINGS, temp_dir=str(temp_dir), address=address)


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
        ("MUSTER_RAY_TEMP_DIR", "relative/dir"),
        ("MUSTER_RAY_TEMP_DIR", "/tmp/" + "x" * 80),
        ("MUSTER_NUM_CPUS", "many"),
        ("MUSTER_SPARE_REPLICAS", "-1"),
        ("MUSTER_HOST_ID", "no spaces"),
        ("MUSTER_DRAIN_TIMEOUT_S", "-1"),
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


def test_a_local_ray_gets_a_token_of_this_life_that_no_file_holds_and_a_directory_of_its_own(
    tmp_path: Path, clean_environment: pytest.MonkeyPatch
) -> None:
    prepare_ray_environment(ray_settings(tmp_path / "ray"))
    token = os.environ["RAY_AUTH_TOKEN"]
    assert os.environ["RAY_AUTH_MODE"] == "token"
    assert len(token) == 64
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert stat.S_IMODE((tmp_path / "ray").stat().st_mode) == 0o700
    assert os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0"

    clean_environment.delenv("RAY_AUTH_TOKEN")
    prepare_ray_environment(ray_settings(tmp_path / "ray"))
    assert os.environ["RAY_AUTH_TOKEN"] != token


@pytest.mark.parametrize("what", ["open directory", "file", "symlink", "directory of another user"])
def test_whatever_stands_where_ray_is_to_write_stops_no_start(
    tmp_path: Path, clean_environment: pytest.MonkeyPatch, what: str
) -> None:
    if what == "directory of another user" and os.geteuid() != 0:
        pytest.skip("NOT TESTED: another user's directory; only root can make one")
    ray = tmp_path / "ray"
    for place in (ray, ray / "r"):
        if what == "open directory":
            place.mkdir()
            place.chmod(0o777)
            (place / "auth_token").mkdir()
        elif what == "file":
            place.write_text("left")
        elif what == "symlink":
            place.symlink_to(tmp_path / "elsewhere")
        else:
            place.mkdir()
            (place / "left").write_text("")
            os.chown(place, 65534, 65534)
        ensure_private_directory(ray)  # as the host does, whose runtime does the rest
        prepare_ray_environment(ray_settings(ray))
        for made in (ray, ray / "r"):
            assert stat.S_IMODE(made.lstat().st_mode) == 0o700
            assert made.lstat().st_uid == os.geteuid()
            assert made.is_dir()
            assert not made.is_symlink()
        if place == ray:
            shutil.rmtree(ray / "r")
    assert not (tmp_path / "elsewhere").exists()


def test_a_place_that_cannot_be_ours_alone_is_named(
    tmp_path: Path, clean_environment: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadField, match="cannot be this user's alone"):
        prepare_ray_environment(ray_settings(tmp_path / "file" / "ray"))


def test_an_existing_cluster_keeps_its_own_authentication(
    tmp_path: Path, clean_environment: pytest.MonkeyPatch
) -> None:
    prepare_ray_environment(ray_settings(tmp_path, address="head:6379"))

    assert "RAY_AUTH_MODE" not in os.environ
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"
    assert list(tmp_path.iterdir()) == []

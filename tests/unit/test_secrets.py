"""Passwords must be there, stay the same, and be seen by nobody."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from muster.secrets import NAMES, NATS_INCLUDE, NATS_ROLES, READ_AS_ROOT, SecretUnusable, generate


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_every_secret_is_made_and_no_two_are_equal(tmp_path: Path) -> None:
    made = generate(tmp_path / "secrets")
    values = [made.read(name) for name in NAMES]
    assert len(set(values)) == len(NAMES)
    assert all(len(value) >= 32 for value in values)


def test_only_the_owner_may_read_them(tmp_path: Path) -> None:
    made = generate(tmp_path / "secrets")
    assert mode_of(made.directory) == 0o700
    assert {mode_of(path) for path in made.directory.iterdir()} == {0o600}


def test_for_containers_the_files_open_up_behind_a_closed_directory(tmp_path: Path) -> None:
    made = generate(tmp_path / "secrets", for_containers=True)
    assert mode_of(made.directory) == 0o700
    modes = {path.name: mode_of(path) for path in made.directory.iterdir()}
    assert {name for name, mode in modes.items() if mode == 0o600} == set(READ_AS_ROOT)
    assert {mode for name, mode in modes.items() if name not in READ_AS_ROOT} == {0o644}


def test_a_second_call_keeps_every_value_and_the_very_file_of_the_include(tmp_path: Path) -> None:
    first = generate(tmp_path)
    before = {path.name: (path.read_bytes(), path.stat().st_ino) for path in tmp_path.iterdir()}
    generate(tmp_path)
    assert {path.name: (path.read_bytes(), path.stat().st_ino) for path in tmp_path.iterdir()} == before
    assert first.directory == tmp_path


def test_a_lost_secret_is_made_anew_and_the_include_follows(tmp_path: Path) -> None:
    made = generate(tmp_path)
    kept = made.read("nats_proxy")
    made.path("nats_controller").unlink()
    generate(tmp_path)
    include = made.path(NATS_INCLUDE).read_text()
    assert f'NATS_CONTROLLER_PASSWORD: "{made.read("nats_controller")}"' in include
    assert made.read("nats_proxy") == kept
    assert all(f"NATS_{role.upper()}_PASSWORD" in include for role in NATS_ROLES)


def test_too_wide_modes_are_narrowed(tmp_path: Path) -> None:
    made = generate(tmp_path)
    made.path("nats_admin").chmod(0o666)
    generate(tmp_path)
    assert mode_of(made.path("nats_admin")) == 0o600


def test_an_unfit_value_is_refused_without_being_shown(tmp_path: Path) -> None:
    made = generate(tmp_path)
    made.path("nats_admin").write_text('hunter2" }\n')
    with pytest.raises(SecretUnusable, match="nats_admin") as caught:
        generate(tmp_path)
    assert "hunter2" not in str(caught.value)


def test_showing_the_secrets_shows_no_value(tmp_path: Path) -> None:
    made = generate(tmp_path)
    assert all(made.read(name) not in repr(made) for name in NAMES)


def test_a_file_where_the_directory_belongs_is_named(tmp_path: Path) -> None:
    (tmp_path / "secrets").write_text("")
    with pytest.raises(SecretUnusable, match="secrets"):
        generate(tmp_path / "secrets")

"""Secrets must be there, stay the same, and be seen by nobody."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from muster.identities import OPERATOR_FILE, SERVER_FILE
from muster.secrets import (
    ADMIN_PASSWORD_FILE,
    FILES,
    NAMES,
    NATS_INCLUDE,
    NATS_ROLES,
    PLAIN_NAMES,
    READ_AS_ROOT,
    SecretUnusable,
    generate,
)
from serve_common.errors import BadField
from serve_common.identities.credentials import parse_keys_file
from serve_common.identities.roles import Role


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_every_secret_is_made_and_no_two_passwords_are_equal(tmp_path: Path) -> None:
    made = generate(tmp_path / "secrets", plain=True)
    names = (*NAMES, *PLAIN_NAMES)
    values = [made.read(name) for name in names]
    assert len(set(values)) == len(names)
    assert all(len(value) >= 32 for value in values)
    generate(tmp_path / "secrets")
    assert {path.name for path in made.directory.iterdir()} == {*FILES, *PLAIN_NAMES, NATS_INCLUDE}


def test_only_the_owner_may_read_them(tmp_path: Path) -> None:
    made = generate(tmp_path / "secrets")
    assert mode_of(made.directory) == 0o700
    assert {mode_of(path) for path in made.directory.iterdir()} == {0o600}


def test_for_containers_the_files_open_up_behind_a_closed_directory(tmp_path: Path) -> None:
    made = generate(tmp_path / "secrets", for_containers=True)
    assert mode_of(made.directory) == 0o700
    modes = {path.name: mode_of(path) for path in made.directory.iterdir()}
    closed = {OPERATOR_FILE, ADMIN_PASSWORD_FILE, *READ_AS_ROOT} & set(modes)
    assert {name for name, mode in modes.items() if mode == 0o600} == closed
    assert {mode for name, mode in modes.items() if name not in closed} == {0o644}


@pytest.mark.parametrize("plain", [False, True])
def test_a_second_call_keeps_every_value_and_the_very_files(tmp_path: Path, *, plain: bool) -> None:
    first = generate(tmp_path, plain=plain)
    before = {path.name: (path.read_bytes(), path.stat().st_ino) for path in tmp_path.iterdir()}
    generate(tmp_path, plain=plain)
    assert {path.name: (path.read_bytes(), path.stat().st_ino) for path in tmp_path.iterdir()} == before
    assert first.directory == tmp_path


def test_a_lost_password_is_made_anew_and_the_include_follows(tmp_path: Path) -> None:
    made = generate(tmp_path, plain=True)
    kept = made.read("nats_proxy")
    made.path("nats_controller").unlink()
    generate(tmp_path, plain=True)
    include = made.path(NATS_INCLUDE).read_text()
    assert f'NATS_CONTROLLER_PASSWORD: "{made.read("nats_controller")}"' in include
    assert made.read("nats_proxy") == kept
    assert all(f"NATS_{role.upper()}_PASSWORD" in include for role in NATS_ROLES)


def test_what_follows_from_the_operator_comes_back_as_it_was(tmp_path: Path) -> None:
    made = generate(tmp_path)
    before = made.credentials_file(Role.ADMIN).read_text()
    made.credentials_file(Role.ADMIN).unlink()
    made.keys_file(Role.HOST).write_text("damaged")
    generate(tmp_path)
    assert made.credentials_file(Role.ADMIN).read_text() == before
    parse_keys_file(made.keys_file(Role.HOST).read_text(), Role.REPLICA)


def test_another_prefix_changes_what_names_subjects(tmp_path: Path) -> None:
    made = generate(tmp_path)
    before = made.path(SERVER_FILE).read_text(), made.keys_file(Role.HOST).read_text()
    generate(tmp_path, subject_prefix="other")
    assert made.path(SERVER_FILE).read_text() != before[0]
    assert made.keys_file(Role.HOST).read_text() == before[1]
    with pytest.raises(BadField, match="subject_prefix"):
        generate(tmp_path, subject_prefix="a.b")


def test_an_operator_that_is_damaged_is_refused_without_being_shown(tmp_path: Path) -> None:
    made = generate(tmp_path)
    made.path(OPERATOR_FILE).write_text('{"operator": "hunter2"}')
    with pytest.raises(SecretUnusable, match=OPERATOR_FILE) as caught:
        generate(tmp_path)
    assert "hunter2" not in str(caught.value)


def test_too_wide_modes_are_narrowed(tmp_path: Path) -> None:
    made = generate(tmp_path, plain=True)
    made.path("nats_admin").chmod(0o666)
    generate(tmp_path, plain=True)
    assert mode_of(made.path("nats_admin")) == 0o600


def test_an_unfit_value_is_refused_without_being_shown(tmp_path: Path) -> None:
    made = generate(tmp_path, plain=True)
    made.path("nats_admin").write_text('hunter2" }\n')
    with pytest.raises(SecretUnusable, match="nats_admin") as caught:
        generate(tmp_path, plain=True)
    assert "hunter2" not in str(caught.value)


def test_showing_the_secrets_shows_no_value(tmp_path: Path) -> None:
    made = generate(tmp_path)
    assert all(made.read(name) not in repr(made) for name in NAMES)


def test_a_file_where_the_directory_belongs_is_named(tmp_path: Path) -> None:
    (tmp_path / "secrets").write_text("")
    with pytest.raises(SecretUnusable, match="secrets"):
        generate(tmp_path / "secrets")

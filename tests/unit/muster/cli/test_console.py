"""`muster console user`: who may sign in."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from muster.console_users import read_people
from muster.secrets import Secrets
from serve_common.identities.people import PasswordWrong, open_person
from serve_common.identities.roles import Role

Muster = Callable[..., Result]
PASSWORD = "correct horse"


@pytest.fixture
def made(muster: Muster, tmp_path: Path) -> Secrets:
    assert muster("secrets").exit_code == 0
    (tmp_path / "password").write_text(PASSWORD + "\n")
    return Secrets(tmp_path / "secrets")


def opens(made: Secrets, name: str, password: str) -> bool:
    try:
        return bool(open_person(read_people(made)[name], password))
    except PasswordWrong:
        return False


def test_a_person_is_added_listed_and_removed(muster: Muster, made: Secrets) -> None:
    added = muster("console", "user", "add", "ada@x.org", "--role", "operate", "--password-file", "password")
    assert added.exit_code == 0
    assert PASSWORD not in added.output
    assert opens(made, "ada@x.org", PASSWORD)
    assert read_people(made)["ada@x.org"].role is Role.OPERATE
    listed = muster("console", "user", "list").stdout
    assert "ada@x.org" in listed
    assert "operate" in listed
    people = json.loads(muster("console", "user", "list", "--json").stdout)
    assert [(each["name"], each["role"], each["needs_password"]) for each in people] == [
        ("ada@x.org", "operate", False),
        ("admin", "admin", False),
    ]
    assert all(each["nats_user"].startswith("U") for each in people)
    removed = muster("console", "user", "remove", "ada@x.org")
    assert "--rotate operate" in removed.stdout
    assert set(read_people(made)) == {"admin"}
    assert muster("console", "user", "remove", "ada@x.org").exit_code == 4
    assert json.loads(muster("console", "user", "remove", "admin", "--json").stdout)["removed"] == "admin"


def test_a_generated_password_is_printed_once(muster: Muster, made: Secrets) -> None:
    added = json.loads(
        muster("console", "user", "add", "wall", "--role", "view", "--generate", "--json").stdout
    )
    assert opens(made, "wall", added["password"])
    again = muster("console", "user", "set-password", "wall", "--generate").stdout
    assert opens(made, "wall", again.rpartition("password: ")[2].strip())
    assert not opens(made, "wall", added["password"])


def test_a_password_is_prompted_for_twice_and_not_shown(muster: Muster, made: Secrets) -> None:
    typed = f"{PASSWORD}\n{PASSWORD}\n".encode()
    result = muster("console", "user", "add", "ada", "--role", "view", given=typed)
    assert result.exit_code == 0
    assert PASSWORD not in result.output
    assert opens(made, "ada", PASSWORD)
    refused = muster("console", "user", "set-password", "ada", given=b"")
    assert refused.exit_code == 2
    assert "--password-file" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("add", "a b", "--role", "view", "--generate"), "NAME"),
        (("add", "admin", "--role", "view", "--generate"), "NAME"),
        (("add", "ada", "--role", "host", "--generate"), "--role"),
        (("add", "ada", "--role", "owner", "--generate"), "--role"),
        (("add", "ada", "--role", "view", "--generate", "--password-file", "password"), "--generate"),
        (("add", "ada", "--role", "view", "--password-file", "absent"), "--password-file"),
        (("add", "ada", "--role", "view", "--password-file", "short"), "--password-file"),
        (("add", "ada", "--role", "view", "--generate", "--directory", "absent"), "--directory"),
    ],
)
def test_what_cannot_be_is_refused_by_its_option(
    muster: Muster, made: Secrets, tmp_path: Path, arguments: tuple[str, ...], named: str
) -> None:
    (tmp_path / "short").write_text("1234567")
    before = read_people(made)
    result = muster("console", "user", *arguments)
    assert result.exit_code == 2
    assert named in result.stderr
    assert "1234567" not in result.output
    assert read_people(made) == before


def test_a_rotation_says_who_needs_a_new_password(muster: Muster, made: Secrets) -> None:
    muster("console", "user", "add", "ada", "--role", "operate", "--password-file", "password")
    rotated = muster("secrets", "--rotate", "operate")
    assert "ada needs a new password" in rotated.stdout
    assert json.loads(muster("secrets", "--json").stdout)["need_password"] == ["ada"]
    assert "needs a new password" in muster("console", "user", "list").stdout
    muster("console", "user", "set-password", "ada", "--password-file", "password")
    assert json.loads(muster("secrets", "--json").stdout)["need_password"] == []


def test_the_password_of_the_first_admin_leaves_its_file_when_another_is_set(
    muster: Muster, made: Secrets
) -> None:
    assert muster("console", "user", "set-password", "admin", "--password-file", "password").exit_code == 0
    assert not (made.directory / "console_admin_password").exists()
    assert muster("secrets").exit_code == 0
    assert opens(made, "admin", PASSWORD)

"""The people of a stack: made once, kept, sealed again when their keys change."""

from __future__ import annotations

import base64
import json
import os
import stat
from pathlib import Path

import pytest

from muster.client import StackAddress
from muster.client.people import address_of_person
from muster.console_users import (
    IdentitySource,
    add_person,
    ensure_admin,
    find_outdated,
    find_source,
    read_people,
    remove_person,
    set_person_password,
)
from muster.secrets import ADMIN_PASSWORD_FILE, PEOPLE_FILE, Secrets, SecretUnusable, generate
from serve_common.errors import BadField, NotFound
from serve_common.identities.credentials import UserIdentity, parse_credentials_file
from serve_common.identities.people import (
    CHOSEN_COSTS,
    GENERATED_COSTS,
    PasswordWrong,
    open_person,
    parse_identity,
)
from serve_common.identities.roles import Role

PASSWORD = "correct horse"


def source_of(made: Secrets, *, plain: bool = False) -> IdentitySource:
    return IdentitySource(made, None) if plain else find_source(made)


def admin_password(made: Secrets) -> str:
    return made.path(ADMIN_PASSWORD_FILE).read_text().strip()


def opened(made: Secrets, name: str, password: str) -> str:
    return open_person(read_people(made)[name], password)


@pytest.mark.parametrize("plain", [False, True])
def test_the_first_person_is_an_admin_whose_password_is_in_a_file(tmp_path: Path, *, plain: bool) -> None:
    made = generate(tmp_path, plain=plain)
    (admin,) = read_people(made).values()
    assert (admin.name, admin.role, admin.costs) == ("admin", Role.ADMIN, GENERATED_COSTS)
    identity = opened(made, "admin", admin_password(made))
    if plain:
        assert json.loads(identity) == {"user": "admin", "password": made.read("nats_admin")}
        return
    jwt, _seed = parse_credentials_file(identity)
    body = jwt.split(".")[1]
    claims = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
    assert claims["name"] == "admin"
    assert claims["iss"] == admin.issuer
    assert "exp" not in claims


@pytest.mark.parametrize("plain", [False, True])
def test_a_second_call_keeps_everybody(tmp_path: Path, *, plain: bool) -> None:
    made = generate(tmp_path, plain=plain)
    add_person(source_of(made, plain=plain), "ada", Role.VIEW, PASSWORD)
    before = made.path(PEOPLE_FILE).read_bytes()
    generate(tmp_path, plain=plain)
    assert made.path(PEOPLE_FILE).read_bytes() == before
    assert find_outdated(source_of(made, plain=plain)) == []


def test_rotating_a_role_seals_the_admin_again_and_names_the_others(tmp_path: Path) -> None:
    made = generate(tmp_path)
    for name, role in (("ada", Role.VIEW), ("bob", Role.ADMIN), ("eve", Role.OPERATE)):
        add_person(find_source(made), name, role, PASSWORD)
    before = read_people(made)
    password = admin_password(made)
    generate(tmp_path, rotate=Role.ADMIN)
    after = read_people(made)
    assert admin_password(made) == password
    assert {name for name in before if before[name] != after[name]} == {"admin"}
    assert opened(made, "admin", password)
    assert find_outdated(find_source(made)) == ["bob"]
    generate(tmp_path, rotate=Role.HOST)
    assert find_outdated(find_source(made)) == ["bob"]
    set_person_password(find_source(made), "bob", PASSWORD)
    assert find_outdated(find_source(made)) == []


def test_a_password_that_was_written_into_the_file_is_the_admins(tmp_path: Path) -> None:
    made = generate(tmp_path)
    made.path(ADMIN_PASSWORD_FILE).write_text("a better one\n")
    generate(tmp_path)
    assert opened(made, "admin", "a better one")
    assert read_people(made)["admin"].costs == CHOSEN_COSTS
    made.path(ADMIN_PASSWORD_FILE).write_text("hunter2\n")
    with pytest.raises(SecretUnusable, match=ADMIN_PASSWORD_FILE) as caught:
        generate(tmp_path)
    assert "hunter2" not in str(caught.value)


def test_a_plain_users_new_password_is_sealed_for_the_admin(tmp_path: Path) -> None:
    made = generate(tmp_path, plain=True)
    made.path("nats_admin").write_text("another_password\n")
    generate(tmp_path, plain=True)
    assert json.loads(opened(made, "admin", admin_password(made)))["password"] == "another_password"


def test_a_stack_that_gets_identities_seals_them(tmp_path: Path) -> None:
    made = generate(tmp_path, plain=True)
    add_person(source_of(made, plain=True), "ada", Role.VIEW, PASSWORD)
    generate(tmp_path)
    assert find_outdated(find_source(made)) == ["ada"]
    assert isinstance(parse_identity(opened(made, "admin", admin_password(made))), UserIdentity)


def test_a_password_that_was_set_is_not_that_of_the_file_any_more(tmp_path: Path) -> None:
    made = generate(tmp_path)
    former = admin_password(made)
    set_person_password(find_source(made), "admin", PASSWORD)
    assert not made.path(ADMIN_PASSWORD_FILE).exists()
    generate(tmp_path)
    assert opened(made, "admin", PASSWORD)
    with pytest.raises(PasswordWrong):
        opened(made, "admin", former)
    assert not made.path(ADMIN_PASSWORD_FILE).exists()


def test_an_admin_who_was_removed_comes_back_only_where_there_is_no_other(tmp_path: Path) -> None:
    made = generate(tmp_path)
    add_person(find_source(made), "ada", Role.ADMIN, PASSWORD)
    remove_person(find_source(made), "admin")
    generate(tmp_path)
    assert set(read_people(made)) == {"ada"}
    remove_person(find_source(made), "ada")
    generate(tmp_path)
    assert set(read_people(made)) == {"admin"}
    assert opened(made, "admin", admin_password(made))


def test_a_change_writes_the_very_file_that_a_container_mounts(tmp_path: Path) -> None:
    made = generate(tmp_path, for_containers=True)
    path = made.path(PEOPLE_FILE)
    before = path.stat()
    add_person(find_source(made), "ada", Role.VIEW, PASSWORD)
    remove_person(find_source(made), "ada")
    after = path.stat()
    assert (after.st_ino, stat.S_IMODE(after.st_mode)) == (before.st_ino, 0o644)
    assert set(read_people(made)) == {"admin"}


def test_people_who_cannot_be_are_refused(tmp_path: Path) -> None:
    made = generate(tmp_path)
    source = find_source(made)
    for name, role, password, field in (
        ("admin", Role.VIEW, PASSWORD, "NAME"),
        ("a b", Role.VIEW, PASSWORD, "NAME"),
        ("ada", Role.PROXY, PASSWORD, "--role"),
        ("ada", Role.VIEW, "short", "password"),
    ):
        with pytest.raises(BadField) as caught:
            add_person(source, name, role, password)
        assert caught.value.field == field
    for change in (
        lambda: remove_person(source, "ada"),
        lambda: set_person_password(source, "ada", PASSWORD),
    ):
        with pytest.raises(NotFound, match="ada"):
            change()
    with pytest.raises(BadField, match="--directory"):
        add_person(find_source(Secrets(tmp_path / "absent")), "ada", Role.VIEW, PASSWORD)


@pytest.mark.parametrize("text", [b"{}", b"\xff", b""])
def test_a_file_of_people_that_is_damaged_is_named_and_kept(tmp_path: Path, text: bytes) -> None:
    made = generate(tmp_path)
    made.path(PEOPLE_FILE).write_bytes(text)
    for use in (
        lambda: generate(tmp_path),
        lambda: add_person(find_source(made), "ada", Role.VIEW, PASSWORD),
    ):
        with pytest.raises(SecretUnusable, match=PEOPLE_FILE):
            use()
    assert made.path(PEOPLE_FILE).read_bytes() == text


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write every file")
def test_a_file_of_people_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    made = generate(tmp_path)
    made.path(PEOPLE_FILE).chmod(0o400)
    with pytest.raises(SecretUnusable, match=PEOPLE_FILE):
        add_person(find_source(made), "ada", Role.VIEW, PASSWORD)


def test_the_modes_are_set_again(tmp_path: Path) -> None:
    made = generate(tmp_path)
    for name in (PEOPLE_FILE, ADMIN_PASSWORD_FILE):
        made.path(name).chmod(0o666)
    ensure_admin(find_source(made), 0o644)
    assert stat.S_IMODE(made.path(PEOPLE_FILE).stat().st_mode) == 0o644
    assert stat.S_IMODE(made.path(ADMIN_PASSWORD_FILE).stat().st_mode) == 0o600


# -- as whom the console reaches a stack --


def test_a_person_reaches_the_stack_with_their_own_identity_and_inbox(tmp_path: Path) -> None:
    made = generate(tmp_path)
    add_person(find_source(made), "ada", Role.VIEW, PASSWORD)
    base = StackAddress(urls=("nats://x:4222",), credentials_file="admin.creds", subject_prefix="other")
    address = address_of_person(base, "ada", Role.VIEW, opened(made, "ada", PASSWORD))
    settings = address.bus_settings("_INBOX_view")
    assert settings.credentials == address.identity
    assert (settings.user, settings.password, settings.subject_prefix) == ("ada", "", "other")
    assert address.role is Role.VIEW
    assert not address.is_plain
    assert not settings.is_plain
    assert address.shown_identity == "the user 'ada'"
    assert address.identity is not None
    assert address.identity.seed not in repr(address)


def test_a_person_of_plain_users_reaches_it_as_the_user_of_the_role(tmp_path: Path) -> None:
    made = generate(tmp_path, plain=True)
    add_person(source_of(made, plain=True), "ada", Role.OPERATE, PASSWORD)
    address = address_of_person(StackAddress(), "ada", Role.OPERATE, opened(made, "ada", PASSWORD))
    assert (address.user, address.password) == ("operate", made.read("nats_operate"))
    assert address.bus_settings("_INBOX_operate").is_plain

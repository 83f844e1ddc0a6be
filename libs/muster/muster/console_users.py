"""The file of the people who may sign in to the console, in the directory of a stack's secrets."""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path
from typing import Final

import msgspec

from muster import identities
from muster.secrets import (
    ADMIN_PASSWORD_FILE,
    FIRST_PERSON,
    PEOPLE_FILE,
    Secrets,
    SecretUnusable,
    read_operator,
    write_secret,
)
from serve_common.errors import BadField, NotFound
from serve_common.identities.people import (
    CHOSEN_COSTS,
    GENERATED_COSTS,
    NONCE_BYTES,
    SALT_BYTES,
    PasswordWrong,
    PeopleUnusable,
    Person,
    PlainUser,
    check_password,
    check_person_name,
    check_person_role,
    decode_people,
    encode_people,
    encode_plain_user,
    open_person,
    seal_person,
)
from serve_common.identities.roles import Role

_ENTROPY_BYTES: Final = 24
_GENERATED: Final = re.compile(r"[0-9a-f]{48}")


class IdentitySource(msgspec.Struct, frozen=True):
    """Makes identities of NATS for people, of the operator's keys or of the passwords of plain users."""

    secrets: Secrets
    keys: identities.OperatorKeys | None
    """None: NATS has plain users."""

    def get_issuer(self, role: Role) -> str:
        """What `Person.issuer` is for identities that are valid now."""
        return "" if self.keys is None else identities.get_issuer(self.keys, role)

    def make_identity(self, role: Role, name: str) -> str:
        """The text of an identity for a person; plain users of a role are one. Raises `SecretUnusable`."""
        if self.keys is None:
            password = self.secrets.read(f"nats_{role.value}")
            return encode_plain_user(PlainUser(user=role.value, password=password))
        return identities.mint_person(self.keys, role, name, random_bytes=secrets.token_bytes)

    def is_current(self, person: Person) -> bool:
        """Whether the key that made the person's identity was not rotated."""
        return person.issuer == self.get_issuer(person.role)


def find_source(stack_secrets: Secrets) -> IdentitySource:
    """The source for the NATS of this stack: with identities if it has an operator. Raises `SecretUnusable`."""
    return IdentitySource(stack_secrets, read_operator(stack_secrets))


def read_people(stack_secrets: Secrets) -> dict[str, Person]:
    """The people by name; none where there is no file. Raises `SecretUnusable`."""
    path = stack_secrets.path(PEOPLE_FILE)
    try:
        return decode_people(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise SecretUnusable(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SecretUnusable(f"{path} is not text") from error
    except PeopleUnusable as error:
        raise SecretUnusable(f"{path} {error}") from error


def add_person(source: IdentitySource, name: str, role: Role, password: str) -> None:
    """Add a person. Raises `BadField`, also when there is one of that name, and `SecretUnusable`."""
    people = _read_existing(source.secrets)
    check_person_name(name, "NAME")
    check_person_role(role, "--role")
    if name in people:
        raise BadField("NAME", f"{name} is there already; set another password, or remove the person first")
    _save(source.secrets, {**people, name: _seal(source, name, role, password)})


def set_person_password(source: IdentitySource, name: str, password: str) -> Person:
    """Give a person another password, and with it a new identity.

    Raises `NotFound` for an unknown name, `BadField` for the password, and `SecretUnusable`.
    """
    people = _read_existing(source.secrets)
    person = _seal(source, name, _find_person(people, name).role, password)
    _forget_generated(source.secrets, name)
    _save(source.secrets, {**people, name: person})
    return person


def remove_person(source: IdentitySource, name: str) -> Person:
    """Remove a person, and return it. Raises `NotFound` for an unknown name, `BadField` and `SecretUnusable`."""
    people = _read_existing(source.secrets)
    person = _find_person(people, name)
    _forget_generated(source.secrets, name)
    _save(source.secrets, {each: other for each, other in people.items() if each != name})
    return person


def find_outdated(source: IdentitySource) -> list[str]:
    """Names of people who cannot reach NATS until they get a new password, as the key of their role was rotated."""
    return sorted(
        person.name for person in read_people(source.secrets).values() if not source.is_current(person)
    )


def ensure_admin(source: IdentitySource, mode: int) -> None:
    """Make the first person where no person is an admin, seal it again where its password or key changed.

    All others stay. Sets the modes: ``mode`` is that of the file of people. Raises `SecretUnusable`, and OSError.
    """
    path = source.secrets.path(ADMIN_PASSWORD_FILE)
    people = read_people(source.secrets)
    person = people.get(FIRST_PERSON)
    if person is None and not any(other.role is Role.ADMIN for other in people.values()):
        if not path.exists():
            write_secret(path, f"{secrets.token_hex(_ENTROPY_BYTES)}\n")
        role = Role.ADMIN
    elif person is not None and path.exists():
        role = person.role
    else:
        role = None
    if role is not None:
        password = _read_password(path)
        if person is None or not _is_sealed_by(source, person, password):
            people[FIRST_PERSON] = _seal(source, FIRST_PERSON, role, password)
            _save(source.secrets, people)
        path.chmod(0o600)
    source.secrets.path(PEOPLE_FILE).chmod(mode)


def _is_sealed_by(source: IdentitySource, person: Person, password: str) -> bool:
    """Whether nothing of it changed."""
    if not source.is_current(person):
        return False
    try:
        opened = open_person(person, password)
    except PasswordWrong:
        return False
    return source.keys is not None or opened == source.make_identity(person.role, person.name)


def _seal(source: IdentitySource, name: str, role: Role, password: str) -> Person:
    return seal_person(
        name,
        role,
        password,
        source.make_identity(role, name),
        salt=secrets.token_bytes(SALT_BYTES),
        nonce=secrets.token_bytes(NONCE_BYTES),
        costs=GENERATED_COSTS if _GENERATED.fullmatch(password) else CHOSEN_COSTS,
    )


def _read_password(path: Path) -> str:
    try:
        return check_password(path.read_text(encoding="utf-8").strip("\r\n"))
    except UnicodeDecodeError as error:
        raise SecretUnusable(f"{path} is not text") from error
    except BadField as error:
        raise SecretUnusable(f"{path} {error.reason}") from error


def _read_existing(stack_secrets: Secrets) -> dict[str, Person]:
    path = stack_secrets.path(PEOPLE_FILE)
    if not path.exists():
        raise BadField("--directory", f"has no {PEOPLE_FILE}; 'muster secrets' makes it")
    return read_people(stack_secrets)


def _find_person(people: dict[str, Person], name: str) -> Person:
    if name not in people:
        raise NotFound(f"there is no person named {name!r}; 'muster console user list' lists all")
    return people[name]


def _forget_generated(stack_secrets: Secrets, name: str) -> None:
    """Remove the first person's former password, with which `ensure_admin` would seal it again."""
    if name == FIRST_PERSON:
        stack_secrets.path(ADMIN_PASSWORD_FILE).unlink(missing_ok=True)


def _save(stack_secrets: Secrets, people: dict[str, Person]) -> None:
    """Write the file, in place where there is one: the console's container mounts the inode, and reads it again.

    A reader may meet a part of it; the text is whole as soon as it decodes. Raises `SecretUnusable`.
    """
    path = stack_secrets.path(PEOPLE_FILE)
    text = encode_people(people.values())
    try:
        if not path.exists():
            write_secret(path, text)
            return
        with path.open("r+", encoding="utf-8") as file:
            file.write(text)
            file.truncate()
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise SecretUnusable(f"{path} cannot be written: {error.strerror}") from error

"""People who sign in to the console: each with a role, and an identity of NATS that only their password opens.

Why sealed: a process that serves people then acts for none who is not signed in. The key is made of the password by
Argon2id, and AES-256-GCM's tag proves it; there is no other verifier of a password.

Why pure: salts and nonces are inputs.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
from collections.abc import Iterable
from typing import Annotated, Any, Final

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.argon2 import Argon2id
from msgspec import Meta

from serve_common.errors import BadField, PermanentError
from serve_common.identities.credentials import CredentialsUnusable, UserIdentity, parse_credentials_file
from serve_common.identities.roles import VERBS_OF, Role

PEOPLE_ROLES: Final = tuple(VERBS_OF)
"""Roles that people may have."""
NAME_LENGTH_MAX: Final = 64
PASSWORD_LENGTH_MIN: Final = 8
PASSWORD_LENGTH_MAX: Final = 200
SALT_BYTES: Final = 16
NONCE_BYTES: Final = 12
PEOPLE_MAX: Final = 10_000
"""Most people in a file."""
_KEY_BYTES: Final = 32
_SEALED_LENGTH_MAX: Final = 16_384
_NAME: Final = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._@-]{{0,{NAME_LENGTH_MAX - 1}}}")

_Base64 = Annotated[str, Meta(pattern=r"^[A-Za-z0-9+/]*={0,2}$", max_length=_SEALED_LENGTH_MAX)]


class PeopleUnusable(PermanentError):
    """A file of people is not valid; the message shows none of its content."""

    error_code = "people_unusable"


class PasswordWrong(PermanentError):
    """The password does not open the person's identity, or the person's entry was tampered with."""

    error_code = "password_wrong"


class PasswordCosts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What Argon2id costs for each try of a password; bounded, as each try makes the console pay it."""

    memory_kib: Annotated[int, Meta(ge=1024, le=1024 * 1024)] = 64 * 1024
    iterations: Annotated[int, Meta(ge=1, le=64)] = 3
    lanes: Annotated[int, Meta(ge=1, le=16)] = 1


CHOSEN_COSTS: Final = PasswordCosts()
"""For passwords that people choose."""
GENERATED_COSTS: Final = PasswordCosts(memory_kib=8 * 1024, iterations=1)
"""For passwords of 128 random bits and more, which cannot be guessed at any cost: so starting a stack stays quick."""


class Person(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One person who may sign in."""

    name: Annotated[str, Meta(max_length=NAME_LENGTH_MAX)]
    role: Role
    salt: _Base64
    nonce: _Base64
    sealed: _Base64
    """The identity, encrypted, with the name and the role as associated data."""
    costs: PasswordCosts = CHOSEN_COSTS
    issuer: Annotated[str, Meta(max_length=128)] = ""
    """Public key of the signing key that made the identity, to find who needs another after a rotation; empty for a
    plain user."""
    nats_user: Annotated[str, Meta(max_length=128)] = ""
    """What NATS logs of the person: the identity's public key, or the plain user."""

    def __repr__(self) -> str:
        return f"Person(name={self.name!r}, role={self.role.value!r}, sealed=…)"


class PlainUser(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A user of a NATS with plain users, as a person's identity."""

    user: str
    password: str

    def __repr__(self) -> str:
        return f"PlainUser(user={self.user!r}, password=…)"


def check_person_name(name: str, field: str = "name") -> str:
    """Return ``name``; raises `BadField` when it is not one of a person."""
    if _NAME.fullmatch(name) is None:
        raise BadField(
            field,
            f"must be 1 to {NAME_LENGTH_MAX} letters, digits, '.', '_', '@' or '-', with a letter or digit first",
        )
    return name


def check_password(password: str, field: str = "password") -> str:
    """Return ``password``; raises `BadField`, which does not show it, when it is too short or too long."""
    if not PASSWORD_LENGTH_MIN <= len(password) <= PASSWORD_LENGTH_MAX:
        raise BadField(field, f"must have {PASSWORD_LENGTH_MIN} to {PASSWORD_LENGTH_MAX} characters")
    if any(ord(character) < ord(" ") or "\ud800" <= character <= "\udfff" for character in password):
        raise BadField(field, "must have no control characters and be valid text")
    return password


def check_person_role(role: Role, field: str = "role") -> Role:
    """Return ``role``; raises `BadField` when it is not one of people."""
    if role not in PEOPLE_ROLES:
        raise BadField(field, f"must be one of {', '.join(each.value for each in PEOPLE_ROLES)}")
    return role


def seal_person(
    name: str,
    role: Role,
    password: str,
    identity_text: str,
    *,
    salt: bytes,
    nonce: bytes,
    costs: PasswordCosts = CHOSEN_COSTS,
) -> Person:
    """Seal the identity by the password. ``salt`` and ``nonce`` are random, `SALT_BYTES` and `NONCE_BYTES` long.

    ``identity_text`` is a credentials file, or a plain user as `encode_plain_user` writes it. Raises `BadField` for
    the name, role or password, and `CredentialsUnusable` for the identity.
    """
    check_person_name(name)
    check_person_role(role)
    check_password(password)
    issuer, nats_user = _find_keys(identity_text)
    sealed = AESGCM(_derive_key(password, salt, costs)).encrypt(
        nonce, identity_text.encode(), _associated_data(name, role)
    )
    return Person(
        name=name,
        role=role,
        salt=base64.b64encode(salt).decode(),
        nonce=base64.b64encode(nonce).decode(),
        sealed=base64.b64encode(sealed).decode(),
        costs=costs,
        issuer=issuer,
        nats_user=nats_user,
    )


def open_person(person: Person, password: str) -> str:
    """The identity's text. Takes as long as ``person.costs`` say. Raises `PasswordWrong`."""
    wrong = "the password is wrong"
    if len(password) > PASSWORD_LENGTH_MAX:
        raise PasswordWrong(wrong)
    try:
        key = _derive_key(password, base64.b64decode(person.salt), person.costs)
        opened = AESGCM(key).decrypt(
            base64.b64decode(person.nonce),
            base64.b64decode(person.sealed),
            _associated_data(person.name, person.role),
        )
        return opened.decode()
    except (InvalidTag, ValueError) as error:
        # Chained to nothing: the cause of a password that is no text shows it.
        raise PasswordWrong(wrong) from (error if isinstance(error, InvalidTag) else None)


def encode_plain_user(user: PlainUser) -> str:
    """The identity's text of a plain user."""
    return msgspec.json.encode(user).decode()


def parse_identity(text: str) -> UserIdentity | PlainUser:
    """The identity of an opened person. Raises `CredentialsUnusable`."""
    if text.lstrip().startswith("{"):
        try:
            return msgspec.json.decode(text, type=PlainUser)
        except msgspec.DecodeError:
            # Chained to nothing: the cause could show the password.
            raise CredentialsUnusable("is no plain user of NATS") from None
    jwt, seed = parse_credentials_file(text)
    expires_at = _parse_claims(jwt).get("exp")
    return UserIdentity(
        jwt=jwt, seed=seed, expires_at=float(expires_at) if isinstance(expires_at, int) else math.inf
    )


def encode_people(people: Iterable[Person]) -> str:
    """The content of a file of people, in the order of their names."""
    entries = {person.name: person for person in sorted(people, key=lambda person: person.name)}
    return msgspec.json.format(msgspec.json.encode(list(entries.values())), indent=2).decode() + "\n"


def decode_people(text: str) -> dict[str, Person]:
    """Decode what `encode_people` returned: the people by name. Raises `PeopleUnusable`."""
    try:
        people = msgspec.json.decode(text, type=Annotated[list[Person], Meta(max_length=PEOPLE_MAX)])
        for person in people:
            _check_person(person)
    except (msgspec.DecodeError, UnicodeError, RecursionError, binascii.Error) as error:
        raise PeopleUnusable(f"is not a file of people: {_shorten(error)}") from None
    found = {person.name: person for person in people}
    if len(found) != len(people):
        raise PeopleUnusable("is not a file of people: two have the same name")
    return found


def _check_person(person: Person) -> None:
    """Raise `PeopleUnusable` or binascii.Error for what `seal_person` cannot have made."""
    if _NAME.fullmatch(person.name) is None:
        raise PeopleUnusable("is not a file of people: a name has characters that no name has")
    if person.role not in PEOPLE_ROLES:
        raise PeopleUnusable(f"is not a file of people: {person.name} has the role {person.role.value}")
    for field, value, length in (("salt", person.salt, SALT_BYTES), ("nonce", person.nonce, NONCE_BYTES)):
        if len(base64.b64decode(value, validate=True)) != length:
            raise PeopleUnusable(f"is not a file of people: the {field} of {person.name} has another length")
    base64.b64decode(person.sealed, validate=True)


def _shorten(error: Exception) -> str:
    """What is wrong and where, without a value of the file."""
    match error:
        case msgspec.ValidationError():
            return str(error).partition("\n")[0][:200]
        case msgspec.DecodeError():
            return "it is not JSON"
        case _:
            return "it is damaged"


def _associated_data(name: str, role: Role) -> bytes:
    return msgspec.json.encode([name, role.value])


def _derive_key(password: str, salt: bytes, costs: PasswordCosts) -> bytes:
    return Argon2id(
        salt=salt,
        length=_KEY_BYTES,
        iterations=costs.iterations,
        lanes=costs.lanes,
        memory_cost=costs.memory_kib,
    ).derive(password.encode())


def _find_keys(identity_text: str) -> tuple[str, str]:
    """The public keys of the identity's issuer and of itself; for a plain user nothing, and its name."""
    identity = parse_identity(identity_text)
    if isinstance(identity, PlainUser):
        return "", identity.user
    claims = _parse_claims(identity.jwt)
    return str(claims.get("iss", "")), str(claims.get("sub", ""))


def _parse_claims(jwt: str) -> dict[str, Any]:
    """The claims of a token, whose signature NATS checks."""
    try:
        body = jwt.split(".")[1]
        return msgspec.json.decode(
            base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)), type=dict[str, Any]
        )
    except (IndexError, ValueError, msgspec.DecodeError):
        raise CredentialsUnusable("holds no token of a NATS user") from None

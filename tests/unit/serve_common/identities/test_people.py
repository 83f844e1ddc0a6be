"""People: what their passwords open, and what of a file of people is refused."""

from __future__ import annotations

import json
import math
import os
from typing import Any

import msgspec
import pytest

from serve_common.errors import BadField
from serve_common.identities.credentials import (
    SEED_BYTES,
    CredentialsUnusable,
    KeyKind,
    NatsKey,
    UserIdentity,
    encode_credentials_file,
    encode_user,
)
from serve_common.identities.people import (
    CHOSEN_COSTS,
    NONCE_BYTES,
    SALT_BYTES,
    PasswordCosts,
    PasswordWrong,
    PeopleUnusable,
    Person,
    PlainUser,
    decode_people,
    encode_people,
    encode_plain_user,
    open_person,
    parse_identity,
    seal_person,
)
from serve_common.identities.roles import Role

QUICK = PasswordCosts(memory_kib=1024, iterations=1)
PASSWORD = "correct horse"
SIGNER = NatsKey(KeyKind.ACCOUNT, bytes(SEED_BYTES))
USER = NatsKey(KeyKind.USER, b"\x01" * SEED_BYTES)
TOKEN = encode_user(SIGNER, account=SIGNER.public, subject=USER.public, name="ada", now=1000)
IDENTITY = encode_credentials_file(TOKEN, USER.seed)
PLAIN = encode_plain_user(PlainUser(user="view", password="hunter2hunter2"))


def sealed(name: str = "ada", role: Role = Role.OPERATE, password: str = PASSWORD, **more: Any) -> Person:
    text = more.pop("text", IDENTITY)
    return seal_person(
        name, role, password, text,
        **{"salt": bytes(SALT_BYTES), "nonce": bytes(NONCE_BYTES), "costs": QUICK, **more},
    )  # fmt: skip


def test_the_password_opens_the_identity_and_no_other_does() -> None:
    person = sealed()
    assert open_person(person, PASSWORD) == IDENTITY
    assert (person.issuer, person.nats_user) == (SIGNER.public, USER.public)
    for wrong in ("correct hors", PASSWORD + " ", "", "\ud800", "x" * 10_000_000):
        with pytest.raises(PasswordWrong) as caught:
            open_person(person, wrong)
        assert not wrong or wrong not in str(caught.value)


def test_what_is_sealed_is_shown_nowhere() -> None:
    person = sealed(text=PLAIN)
    assert (person.issuer, person.nats_user) == ("", "view")
    assert "hunter2" not in encode_people([person])
    assert person.sealed not in repr(person)
    assert "hunter2" not in repr(parse_identity(PLAIN))
    assert PASSWORD not in encode_people([sealed()])
    assert USER.seed not in encode_people([sealed()])


@pytest.mark.parametrize(
    "change",
    [
        {"role": Role.ADMIN},
        {"name": "eve"},
        {"salt": "AAAAAAAAAAAAAAAAAAAAAQ=="},
        {"nonce": "AAAAAAAAAAAAAAAB"},
        {"costs": PasswordCosts(memory_kib=2048, iterations=1)},
        {"sealed": sealed(name="eve").sealed},
        {"sealed": "AAAA"},
        {"sealed": ""},
    ],
)
def test_an_entry_that_was_tampered_with_opens_for_nobody(change: dict[str, Any]) -> None:
    person = msgspec.structs.replace(sealed(), **change)
    with pytest.raises(PasswordWrong):
        open_person(decode_people(encode_people([person]))[person.name], PASSWORD)


def test_a_new_salt_or_nonce_seals_otherwise() -> None:
    assert sealed(salt=os.urandom(SALT_BYTES)).sealed != sealed().sealed
    assert sealed(nonce=os.urandom(NONCE_BYTES)).sealed != sealed().sealed
    assert sealed() == sealed()


def test_passwords_that_people_choose_cost_what_is_recommended() -> None:
    assert (CHOSEN_COSTS.memory_kib, CHOSEN_COSTS.iterations, CHOSEN_COSTS.lanes) == (65_536, 3, 1)
    person = seal_person(
        "ada", Role.VIEW, PASSWORD, IDENTITY, salt=bytes(SALT_BYTES), nonce=bytes(NONCE_BYTES)
    )
    assert person.costs == CHOSEN_COSTS
    assert open_person(person, PASSWORD) == IDENTITY


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"name": ""}, "name"),
        ({"name": "a" * 65}, "name"),
        ({"name": "a b"}, "name"),
        ({"name": "a\n"}, "name"),
        ({"name": "../a"}, "name"),
        ({"name": "-a"}, "name"),
        ({"name": "ä"}, "name"),
        ({"role": Role.HOST}, "role"),
        ({"role": Role.SYSTEM}, "role"),
        ({"password": "1234567"}, "password"),
        ({"password": "x" * 201}, "password"),
        ({"password": "12345678\n"}, "password"),
        ({"password": "1234567\ud800"}, "password"),
    ],
)
def test_what_is_no_person_is_refused_by_its_field(arguments: dict[str, Any], field: str) -> None:
    with pytest.raises(BadField) as caught:
        sealed(**arguments)
    assert caught.value.field == field
    if field == "password":
        assert arguments["password"] not in str(caught.value)


def test_names_and_passwords_at_their_bounds_are_good() -> None:
    for name in ("a", "A.b_c@d-e.org", "9" * 64):
        assert sealed(name=name).name == name
    for password in ("12345678", "ü" * 200, "with spaces in it"):
        assert open_person(sealed(password=password), password) == IDENTITY


@pytest.mark.parametrize("text", ["", "{}", '{"user": "view"}', "x", encode_credentials_file("abc", "SU")])
def test_what_is_no_identity_is_not_sealed(text: str) -> None:
    with pytest.raises(CredentialsUnusable):
        sealed(text=text)


def test_an_identity_is_of_a_token_or_of_a_plain_user() -> None:
    assert parse_identity(PLAIN) == PlainUser(user="view", password="hunter2hunter2")
    assert parse_identity(IDENTITY) == UserIdentity(jwt=TOKEN, seed=USER.seed, expires_at=math.inf)
    token = encode_user(SIGNER, account=SIGNER.public, subject=USER.public, name="ada", now=1, expires_at=99)
    ending = parse_identity(encode_credentials_file(token, USER.seed))
    assert isinstance(ending, UserIdentity)
    assert ending.expires_at == 99.0


def test_a_file_of_people_comes_back_as_it_was_in_the_order_of_names() -> None:
    people = [sealed("eve"), sealed("ada", Role.VIEW), sealed("admin", Role.ADMIN)]
    text = encode_people(people)
    read = decode_people(text)
    assert list(read) == ["ada", "admin", "eve"]
    assert encode_people(read.values()) == text
    assert decode_people(encode_people([])) == {}


def entry(**changes: Any) -> str:
    """A file of one person with some fields changed; None leaves a field out."""
    found = json.loads(encode_people([sealed()]))[0] | changes
    return json.dumps([{key: value for key, value in found.items() if value is not None}])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "not JSON"),
        ("[", "not JSON"),
        ("[" * 100_000, "not a file of people"),
        ("{}", "Expected `array`"),
        (entry(role="owner"), "role"),
        (entry(role="host"), "ada has the role host"),
        (entry(name="a b"), "name"),
        (entry(name="ada\n"), "name"),
        (entry(salt=None), "salt"),
        (entry(salt="AAAA"), "the salt of ada"),
        (entry(nonce="AAAA"), "the nonce of ada"),
        (entry(sealed="AAAAA"), "damaged"),
        (entry(sealed="hunter2!"), "sealed"),
        (entry(password="hunter2"), "password"),
        (entry(costs={"memory_kib": 1 << 40}), "memory_kib"),
        (entry(costs={"iterations": 0}), "iterations"),
        (json.dumps(json.loads(entry()) * 2), "same name"),
    ],
)
def test_what_is_no_file_of_people_is_refused_and_not_shown(text: str, problem: str) -> None:
    with pytest.raises(PeopleUnusable, match=problem) as caught:
        decode_people(text)
    assert "hunter2" not in str(caught.value)

"""NATS' keys and tokens, what is held of them, and the table of roles."""

from __future__ import annotations

import base64
import json
import os
from typing import Any

import msgspec
import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from muster import identities
from serve_common.api.queries import QUERIES, VERBS
from serve_common.config.backend import allows, check_may_call
from serve_common.errors import BadField
from serve_common.identities.__main__ import plain_config, plain_subjects
from serve_common.identities.credentials import (
    SEED_BYTES,
    CredentialsUnusable,
    KeyKind,
    KeyUnusable,
    NatsKey,
    SigningKey,
    encode_credentials_file,
    encode_keys_file,
    mint_user,
    parse_credentials_file,
    parse_keys_file,
    sign_nonce,
)
from serve_common.identities.roles import (
    ACCOUNT_LIMITS,
    CONNECTIONS_MAX,
    NAME,
    VERBS_OF,
    AccountName,
    Role,
    call_tags,
    crossings,
    get_rights,
)
from tests.support.paths import ROOT

# Of the documentation of NATS' own nkeys.
KNOWN_SEED = "SUACSSL3UAHUDXKFSNVUZRF5UHPMWZ6BFDTJ7M6USDXIEDNPPQYYYCU3VY"
KNOWN_PUBLIC = "UDXU4RCSJNZOIQHZNWXHXORDPRTGNJAHAHFRGZNEEJCPQTT2M7NLCNF4"


def claims_of(jwt: str) -> dict[str, Any]:
    """What a token says, if its signature is its issuer's."""
    head, body, signature = jwt.split(".")
    claims: dict[str, Any] = json.loads(_decode(body))
    issuer = base64.b32decode(claims["iss"] + "=" * (-len(claims["iss"]) % 8))[1:-2]
    Ed25519PublicKey.from_public_bytes(issuer).verify(_decode(signature), f"{head}.{body}".encode())
    assert json.loads(_decode(head)) == {"typ": "JWT", "alg": "ed25519-nkey"}
    return claims


def _decode(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


def test_a_key_is_written_as_nats_writes_it() -> None:
    key = NatsKey.from_seed(KNOWN_SEED, KeyKind.USER)
    assert (key.public, key.seed) == (KNOWN_PUBLIC, KNOWN_SEED)
    assert [NatsKey(kind, bytes(SEED_BYTES)).public[0] for kind in KeyKind] == ["O", "A", "U"]
    assert [NatsKey(kind, bytes(SEED_BYTES)).seed[:2] for kind in KeyKind] == ["SO", "SA", "SU"]
    assert KNOWN_SEED not in repr(key)


@pytest.mark.parametrize(
    "seed",
    ["", "nonsense!", KNOWN_SEED[:-1], KNOWN_SEED[:-1] + "A", KNOWN_PUBLIC, "ünïx", KNOWN_SEED.lower()],
)
def test_what_is_no_seed_is_refused_without_being_shown(seed: str) -> None:
    with pytest.raises(KeyUnusable) as caught:
        NatsKey.from_seed(seed, KeyKind.USER)
    assert not seed or seed not in str(caught.value)


def test_a_seed_of_another_kind_is_refused() -> None:
    with pytest.raises(KeyUnusable, match="account"):
        NatsKey.from_seed(KNOWN_SEED, KeyKind.ACCOUNT)


def test_a_minted_user_has_its_name_its_tags_and_an_end_and_no_permission_of_its_own() -> None:
    signer = NatsKey(KeyKind.ACCOUNT, b"s" * SEED_BYTES)
    key = SigningKey(Role.REPLICA, "A-ACCOUNT", signer.seed)
    minted, again = (
        mint_user(
            key, "shop.digits.3", tags=("replicas:shop.>",), now=1000.5, lifetime_s=60, random_bytes=b"r" * 32
        )
        for _ in range(2)
    )
    assert minted == again
    claims = claims_of(minted.jwt)
    assert claims["iss"] == signer.public
    assert claims["sub"] == NatsKey.from_seed(minted.seed, KeyKind.USER).public
    assert (claims["name"], claims["exp"], minted.expires_at) == ("shop.digits.3", 1060, 1060)
    # What NATS demands of a scoped key's users: everything else is in the scope.
    assert claims["nats"] == {
        "type": "user",
        "issuer_account": "A-ACCOUNT",
        "tags": ["replicas:shop.>"],
        "version": 2,
    }
    assert claims["iat"] < 1000
    assert minted.jwt not in repr(minted)
    assert minted.seed not in repr(minted)
    assert signer.seed not in repr(key)
    signature = _decode(sign_nonce(minted.seed, "nonce"))
    public = base64.b32decode(claims["sub"] + "=" * (-len(claims["sub"]) % 8))[1:-2]
    Ed25519PublicKey.from_public_bytes(public).verify(signature, b"nonce")
    with pytest.raises(InvalidSignature):
        Ed25519PublicKey.from_public_bytes(public).verify(signature, b"another")


def test_files_of_credentials_and_keys_are_read_as_they_are_written() -> None:
    assert parse_credentials_file(encode_credentials_file("a.b.c", KNOWN_SEED)) == ("a.b.c", KNOWN_SEED)
    text = encode_keys_file({Role.HOST: ("A1", "S1"), Role.REPLICA: ("A2", "S2")})
    assert parse_keys_file(text, Role.REPLICA, "x") == SigningKey(Role.REPLICA, "A2", "S2", "x")
    with pytest.raises(CredentialsUnusable, match="proxy"):
        parse_keys_file(text, Role.PROXY)
    for other in ("", "[]", "hunter2"):
        with pytest.raises(CredentialsUnusable) as caught:
            parse_keys_file(other, Role.HOST)
        assert "hunter2" not in str(caught.value)
        with pytest.raises(CredentialsUnusable):
            parse_credentials_file(other)


def counting() -> Any:
    count = iter(range(256))
    return lambda length: bytes((next(count),)) * length


def operator() -> identities.OperatorKeys:
    return identities.make_operator("serve", now=1000.0, random_bytes=counting())


def test_equal_keys_give_equal_files_and_no_service_gets_a_secret_of_another() -> None:
    keys = operator()
    files = identities.derive_files(keys)
    assert files == identities.derive_files(
        identities.decode_operator_keys(identities.encode_operator_keys(keys), random_bytes=os.urandom)
    )
    assert set(files) == set(identities.FILES)
    seeds = {*keys.accounts.values(), *keys.signing_keys.values(), *keys.users.values(), keys.operator}
    held = {name: {seed for seed in seeds if seed in text} for name, text in files.items()}
    assert held[identities.SERVER_FILE] == set()
    assert held["host.keys"] == {keys.signing_keys[Role.HOST], keys.signing_keys[Role.REPLICA]}
    assert held["proxy.keys"] == {keys.signing_keys[Role.PROXY]}
    assert all(len(held[name]) == 1 for name in identities.CREDENTIALS.values())
    assert all(seed not in repr(keys) for seed in seeds)


def test_the_server_knows_each_role_by_its_scope() -> None:
    keys = operator()
    text = identities.derive_files(keys)[identities.SERVER_FILE]
    accounts = {}
    for line in text.splitlines():
        subject, _, jwt = line.strip().partition(": ")
        if subject.startswith("A") and jwt.count(".") == 2:
            accounts[subject] = claims_of(jwt)
    by_name = {claims["name"]: claims for claims in accounts.values()}
    assert set(by_name) == {account.value for account in AccountName}
    for role in Role:
        rights = get_rights(role, "serve")
        scopes = by_name[rights.account.value]["nats"]["signing_keys"]
        (scope,) = [scope for scope in scopes if scope["role"] == role.value]
        assert scope["template"]["pub"]["allow"] == list(rights.permissions.publish)
        assert scope["template"]["sub"]["allow"] == list(rights.permissions.subscribe)
    for account, claims in by_name.items():
        has_jetstream = claims["nats"]["limits"]["disk_storage"] != 0
        assert has_jetstream is (account == AccountName.CONTROL.value)
        for imported in claims["nats"]["imports"]:
            exports = accounts[imported["account"]]["nats"]["exports"]
            assert imported["subject"] in {export["subject"] for export in exports}


def test_rotating_a_role_changes_what_proves_it_and_nothing_else() -> None:
    keys = operator()
    before = identities.derive_files(keys)
    for role, file in ((Role.REPLICA, "host.keys"), (Role.ADMIN, "admin.creds")):
        after = identities.derive_files(
            identities.rotate_role(keys, role, random_bytes=lambda length: b"\xff" * length)
        )
        assert {name for name in before if before[name] != after[name]} == {file, identities.SERVER_FILE}


@pytest.mark.parametrize("text", ["", "{}", "null", '{"operator": "SO"}'])
def test_what_is_no_operator_is_refused(text: str) -> None:
    with pytest.raises(identities.OperatorUnusable):
        identities.decode_operator_keys(text, random_bytes=os.urandom)


def test_every_subject_has_the_prefix_that_was_asked_for() -> None:
    for role in Role:
        if role is Role.SYSTEM:
            continue
        for subject in (
            *get_rights(role, "other").permissions.publish,
            *get_rights(role, "other").permissions.subscribe,
        ):
            assert subject.startswith(("other.", "$", "_INBOX", "_R_")), subject
            assert "serve" not in subject
    assert not [crossing for crossing in crossings("other") if "serve" in crossing.share.subject]


def test_templates_are_whole_tokens_as_nats_wants_them() -> None:
    for role in Role:
        rights = get_rights(role, "serve")
        for subject in (*rights.permissions.publish, *rights.permissions.subscribe):
            for token in subject.split("."):
                assert "{{" not in token or (token.startswith("{{") and token.endswith("}}"))


def test_nobody_but_the_controller_and_admins_may_make_a_consumer_or_command() -> None:
    for role in (Role.HOST, Role.PROXY, Role.REPLICA, Role.CLIENT):
        publish = get_rights(role, "serve").permissions.publish
        assert not [subject for subject in publish if "CONSUMER" in subject or "serve.admin" in subject]
        assert "$JS.API.INFO" not in publish


def test_commands_and_jetstream_are_in_an_account_that_users_code_is_not_in() -> None:
    assert {get_rights(role, "serve").account for role in (Role.PROXY, Role.REPLICA)} == {AccountName.DATA}
    led_in = [c.share for c in crossings("serve") if AccountName.CONTROL in c.importers]
    assert {share.subject for share in led_in if not share.is_service} == {
        "serve.report.proxy.*", "serve.wake.>", "serve.capture.>", "serve.log.>", "serve.log-recall", "serve.admin.>",
    }  # fmt: skip
    assert {share.subject for share in led_in if share.is_service} == {"serve.call.>"}


def test_people_who_may_not_deploy_are_in_an_account_that_requests_nothing_of_a_service() -> None:
    """What a service responds goes wherever a request says: for an admin's account that is no gain, here it were."""
    shares = [(c, c.share) for c in crossings("serve") if AccountName.PEOPLE in {c.exporter, *c.importers}]
    assert not [share.subject for _, share in shares if share.is_service]
    assert {share.subject for c, share in shares if c.exporter is AccountName.PEOPLE} == {
        "serve.admin.>", "serve.log-recall", "serve.call.>",
    }  # fmt: skip
    in_it = {role for role in Role if get_rights(role, "serve").account is AccountName.PEOPLE}
    assert in_it == {Role.VIEW, Role.OPERATE}


def test_who_views_may_query_and_who_operates_may_send_what_deploys_nothing() -> None:
    assert VERBS_OF[Role.VIEW] == set(QUERIES) - {"get_backup"}
    assert VERBS_OF[Role.OPERATE] - VERBS_OF[Role.VIEW] == {
        "scale", "set_traffic", "shadow_traffic", "rollback", "pause_autoscaling", "resume_autoscaling",
        "control_rollout", "drain_host", "undrain_host",
    }  # fmt: skip
    assert VERBS_OF[Role.ADMIN] == set(VERBS)
    for role in (Role.VIEW, Role.OPERATE):
        publish = get_rights(role, "serve").permissions.publish
        assert {s.removeprefix("serve.admin.") for s in publish if ".admin." in s} == VERBS_OF[role]


def test_an_operator_of_before_there_were_people_gets_their_keys_and_keeps_its_own() -> None:
    keys = operator()
    new = {Role.VIEW, Role.OPERATE}
    old = msgspec.structs.replace(
        keys,
        accounts={name: seed for name, seed in keys.accounts.items() if name is not AccountName.PEOPLE},
        signing_keys={role: seed for role, seed in keys.signing_keys.items() if role not in new},
        users={role: seed for role, seed in keys.users.items() if role not in new},
    )
    text = identities.encode_operator_keys(old)
    read = identities.decode_operator_keys(text, random_bytes=os.urandom)
    assert old.accounts.items() <= read.accounts.items()
    assert old.signing_keys.items() <= read.signing_keys.items()
    assert old.users.items() <= read.users.items()
    before, after = identities.derive_files(keys), identities.derive_files(read)
    assert {name for name in after if after[name] != before[name]} == {
        "view.creds", "operate.creds", identities.SERVER_FILE,
    }  # fmt: skip


def test_the_accounts_together_may_use_the_server_up_and_none_alone() -> None:
    connections = [limits.connections for limits in ACCOUNT_LIMITS.values()]
    assert sum(connections) == CONNECTIONS_MAX
    config = (ROOT / "deploy/nats/nats.conf").read_text()
    assert f"max_connections: {CONNECTIONS_MAX}\n" in config


# -- plain users --


def test_plain_conf_is_what_the_table_gives() -> None:
    assert (ROOT / "deploy/nats/plain.conf").read_text() == plain_config("serve"), "make plain-conf"


def test_plain_users_may_what_any_name_of_their_role_may() -> None:
    subjects = [f"a.{NAME}.goal", f"a.{NAME}", f"b.{NAME}.>", "c.{{tag(replicas)}}", "_R_.>", "d.>"]
    assert plain_subjects(subjects) == ["a.*.goal", "a.>", "b.>", "c.>", "d.>"]
    assert "{{" not in plain_config("serve")


# -- who may be called --


@pytest.mark.parametrize(
    ("may_call", "called", "is_allowed"),
    [
        (None, "shop/digits", True),
        (None, "bank/x", False),
        ((), "shop/digits", False),
        (("bank",), "bank/x", True),
        (("bank",), "shop/digits", False),
        (("bank/x",), "bank/x", True),
        (("bank/x",), "bank/y", False),
        (("ban",), "bank/x", False),
        (("*",), "bank/x", True),
    ],
)
def test_who_may_be_called(may_call: tuple[str, ...] | None, called: str, is_allowed: bool) -> None:
    assert allows(may_call, "shop/front", called) is is_allowed
    app, _, name = called.partition("/")
    tags = call_tags("shop/front", may_call)
    replicas = {f"replicas:{app}.>", f"replicas:{app}.{name}.*", "replicas:>"}
    endpoints = {f"endpoints:{app}.>", f"endpoints:{app}.{name}", "endpoints:>"}
    assert bool(replicas & set(tags)) is bool(endpoints & set(tags)) is is_allowed


@pytest.mark.parametrize("called", ["", "a/b/c", "a.b", "a/*", ">", "a b", "/"])
def test_what_nobody_can_be_called_is_refused(called: str) -> None:
    with pytest.raises(BadField, match="may_call"):
        check_may_call([called], "may_call")
    with pytest.raises(BadField, match="at most"):
        check_may_call(["a"] * 101, "may_call")


def test_keys_that_were_made_before_a_role_existed_get_its_keys_and_lose_none() -> None:
    keys = identities.make_operator("serve", now=1_000.0, random_bytes=os.urandom)
    old = msgspec.to_builtins(keys)
    for seeds in (old["signing_keys"], old["users"]):
        del seeds["caller"]
    read = identities.decode_operator_keys(json.dumps(old), random_bytes=os.urandom)
    assert "caller.creds" in identities.derive_files(read)
    without = {
        name: {role: seed for role, seed in getattr(read, name).items() if role is not Role.CALLER}
        for name in ("signing_keys", "users")
    }
    assert msgspec.structs.replace(read, **without) == msgspec.convert(old, identities.OperatorKeys)

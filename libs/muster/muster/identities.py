"""The operator, accounts and keys of one stack: one secret file, from which every other identity file is derived.

Why one: all others can be generated again from it, byte for byte, so that generating is idempotent; and it is the only
one that no service needs, so it can be stored elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from serve_common.errors import PermanentError
from serve_common.identities.credentials import (
    SEED_BYTES,
    Import,
    KeyKind,
    KeyUnusable,
    NatsKey,
    Scope,
    encode_account,
    encode_credentials_file,
    encode_keys_file,
    encode_operator,
    encode_user,
)
from serve_common.identities.roles import ACCOUNT_LIMITS, AccountName, Role, crossings, get_rights

OPERATOR_FILE: Final = "nats_operator.json"
SERVER_FILE: Final = "nats_identities.conf"
"""The file that nats.conf includes as ``identities.conf``. Holds public keys and signed tokens, no secret."""
CREDENTIALS: Final = {
    role: f"{role.value}.creds"
    for role in (Role.CONTROLLER, Role.ADMIN, Role.CLIENT, Role.CALLER, Role.VIEW, Role.OPERATE, Role.SYSTEM)
}
"""Credentials files in NATS' own format, for roles that are one user."""
KEYS: Final = {Role.HOST: ("host.keys", (Role.HOST, Role.REPLICA)), Role.PROXY: ("proxy.keys", (Role.PROXY,))}
"""Files of signing keys, for services that create users, with the roles whose keys they hold."""
FILES: Final = (SERVER_FILE, *CREDENTIALS.values(), *(name for name, _ in KEYS.values()))
"""All files that `derive_files` returns."""


class OperatorUnusable(PermanentError):
    """The operator's file is not valid; the message shows none of its content."""

    error_code = "operator_unusable"


class OperatorKeys(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The seeds from which all other files are derived."""

    subject_prefix: str
    created_at: int
    """Issue time of all tokens, in seconds since 1970; fixed, so that equal keys give equal files."""
    operator: str
    accounts: dict[AccountName, str]
    signing_keys: dict[Role, str]
    users: dict[Role, str]
    """Seeds of the users of the roles in `CREDENTIALS`."""

    def __repr__(self) -> str:
        return f"OperatorKeys(subject_prefix={self.subject_prefix!r}, …)"


def make_operator(subject_prefix: str, *, now: float, random_bytes: Callable[[int], bytes]) -> OperatorKeys:
    """Generate all keys of a new stack."""

    def seed(kind: KeyKind) -> str:
        return NatsKey(kind, random_bytes(SEED_BYTES)).seed

    return OperatorKeys(
        subject_prefix=subject_prefix,
        created_at=int(now),
        operator=seed(KeyKind.OPERATOR),
        accounts={account: seed(KeyKind.ACCOUNT) for account in AccountName},
        signing_keys={role: seed(KeyKind.ACCOUNT) for role in Role},
        users={role: seed(KeyKind.USER) for role in CREDENTIALS},
    )


def rotate_role(keys: OperatorKeys, role: Role, *, random_bytes: Callable[[int], bytes]) -> OperatorKeys:
    """Replace the signing key of ``role``: NATS then refuses every user that the old key signed."""
    fresh = NatsKey(KeyKind.ACCOUNT, random_bytes(SEED_BYTES)).seed
    users = keys.users
    if role in users:
        users = {**users, role: NatsKey(KeyKind.USER, random_bytes(SEED_BYTES)).seed}
    return msgspec.structs.replace(keys, signing_keys={**keys.signing_keys, role: fresh}, users=users)


def add_new_roles(keys: OperatorKeys, *, random_bytes: Callable[[int], bytes]) -> OperatorKeys:
    """Add keys for roles and accounts that did not exist when ``keys`` were made; all others stay as they are."""
    fresh = make_operator(keys.subject_prefix, now=keys.created_at, random_bytes=random_bytes)
    return msgspec.structs.replace(
        keys,
        accounts={**fresh.accounts, **keys.accounts},
        signing_keys={**fresh.signing_keys, **keys.signing_keys},
        users={**fresh.users, **keys.users},
    )


def encode_operator_keys(keys: OperatorKeys) -> str:
    """The content of `OPERATOR_FILE`."""
    return msgspec.json.format(msgspec.json.encode(keys), indent=2).decode() + "\n"


def decode_operator_keys(text: str, *, random_bytes: Callable[[int], bytes]) -> OperatorKeys:
    """Decode what `encode_operator_keys` returned, with keys for new roles. Raises `OperatorUnusable`."""
    try:
        keys = add_new_roles(msgspec.json.decode(text, type=OperatorKeys), random_bytes=random_bytes)
        derive_files(keys)
    except (msgspec.DecodeError, KeyUnusable, KeyError) as error:
        raise OperatorUnusable("is not a file of an operator's keys, or not a whole one") from error
    return keys


def derive_files(keys: OperatorKeys) -> Mapping[str, str]:
    """The content of each of `FILES`."""
    accounts = {name: NatsKey.from_seed(seed, KeyKind.ACCOUNT) for name, seed in keys.accounts.items()}
    signers = {role: NatsKey.from_seed(seed, KeyKind.ACCOUNT) for role, seed in keys.signing_keys.items()}
    account_of = {role: accounts[get_rights(role, keys.subject_prefix).account].public for role in Role}
    files = {SERVER_FILE: _server_file(keys, accounts, signers)}
    for role, name in CREDENTIALS.items():
        user = NatsKey.from_seed(keys.users[role], KeyKind.USER)
        token = encode_user(
            signers[role],
            account=account_of[role],
            subject=user.public,
            name=role.value,
            now=keys.created_at,
        )
        files[name] = encode_credentials_file(token, user.seed)
    for name, roles in KEYS.values():
        files[name] = encode_keys_file({role: (account_of[role], signers[role].seed) for role in roles})
    return files


def get_issuer(keys: OperatorKeys, role: Role) -> str:
    """The public half of the signing key of ``role``, by which NATS knows its users. Raises `KeyUnusable`."""
    return NatsKey.from_seed(keys.signing_keys[role], KeyKind.ACCOUNT).public


def mint_person(keys: OperatorKeys, role: Role, name: str, *, random_bytes: Callable[[int], bytes]) -> str:
    """A credentials file for a user ``name`` of ``role``, valid until the role's key is rotated."""
    account = keys.accounts[get_rights(role, keys.subject_prefix).account]
    user = NatsKey(KeyKind.USER, random_bytes(SEED_BYTES))
    token = encode_user(
        NatsKey.from_seed(keys.signing_keys[role], KeyKind.ACCOUNT),
        account=NatsKey.from_seed(account, KeyKind.ACCOUNT).public,
        subject=user.public,
        name=name,
        now=keys.created_at,
    )
    return encode_credentials_file(token, user.seed)


def _server_file(
    keys: OperatorKeys, accounts: Mapping[AccountName, NatsKey], signers: Mapping[Role, NatsKey]
) -> str:
    operator = NatsKey.from_seed(keys.operator, KeyKind.OPERATOR)
    system = accounts[AccountName.SYSTEM].public
    lines = [
        "# Made by `muster secrets`. Public keys and signed tokens; no secret.",
        f"operator: {encode_operator(operator, name='muster', system_account=system, now=keys.created_at)}",
        f"system_account: {system}",
        "resolver: MEMORY",
        "resolver_preload: {",
        *(
            f"  {accounts[name].public}: {_account(name, keys, operator, accounts, signers)}"
            for name in AccountName
        ),
        "}",
        "",
    ]
    return "\n".join(lines)


def _account(
    name: AccountName,
    keys: OperatorKeys,
    operator: NatsKey,
    accounts: Mapping[AccountName, NatsKey],
    signers: Mapping[Role, NatsKey],
) -> str:
    prefix = keys.subject_prefix
    all_crossings = list(crossings(prefix))
    scopes = []
    for role in Role:
        rights = get_rights(role, prefix)
        if rights.account is name:
            scopes.append(
                Scope(
                    key=signers[role].public,
                    role=role.value,
                    permissions=rights.permissions,
                    limits=rights.limits,
                )
            )
    return encode_account(
        operator,
        subject=accounts[name].public,
        name=name.value,
        limits=ACCOUNT_LIMITS[name],
        scopes=scopes,
        exports=[crossing.share for crossing in all_crossings if crossing.exporter is name],
        imports=[
            Import(share=crossing.share, account=accounts[crossing.exporter].public)
            for crossing in all_crossings
            if name in crossing.importers
        ],
        now=keys.created_at,
    )

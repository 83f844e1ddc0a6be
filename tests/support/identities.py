"""Identities and plain users for servers that tests start by themselves."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

from muster.client.requests import StackAddress
from muster.embedded import RunRecord
from muster.identities import CREDENTIALS, SERVER_FILE
from muster.secrets import NATS_INCLUDE, Secrets
from serve_common.identities.credentials import Credentials, CredentialsFile, SigningKey, parse_keys_file
from serve_common.identities.roles import Role, inbox_prefix
from serve_common.nats.login import mint_now
from serve_common.runtime.settings import BusSettings
from tests.support.paths import ROOT

DEPLOY: Final = ROOT / "deploy/nats"
NAMES: Final = {Role.HOST: "host-1", Role.PROXY: "proxy-1", Role.REPLICA: "shop.digits.3"}
"""Of users whose tests have no use for another."""
LIFETIME_S: Final = 3600.0


def lay_out_nats(directory: Path, secrets: Secrets, *, plain: bool = False) -> Path:
    """Put nats.conf and what it includes into ``directory``; returned is where it lies."""
    shutil.copy(DEPLOY / "nats.conf", directory / "nats.conf")
    if plain:
        shutil.copy(DEPLOY / "plain.conf", directory / "identities.conf")
        shutil.copy(secrets.path(NATS_INCLUDE), directory / "passwords.conf")
    else:
        shutil.copy(secrets.path(SERVER_FILE), directory / "identities.conf")
    return directory / "nats.conf"


def signing_key(secrets: Secrets, role: Role, name: str = "") -> SigningKey:
    """As a host or a proxy holds it."""
    holder = Role.HOST if role is Role.REPLICA else role
    return parse_keys_file(secrets.keys_file(holder).read_text(), role, name)


def bus_settings(
    secrets: Secrets,
    url: str,
    role: Role,
    *,
    name: str | None = None,
    tags: tuple[str, ...] = (),
    plain: bool = False,
) -> BusSettings:
    """How a process of ``role`` comes; ``name`` and ``tags`` are its token's."""
    name = NAMES.get(role, "") if name is None else name
    credentials: Credentials | None = None
    if not plain:
        if role in CREDENTIALS:
            credentials = CredentialsFile(str(secrets.credentials_file(role)))
        else:
            credentials = signing_key(secrets, role, name)
        if role is Role.REPLICA:
            assert isinstance(credentials, SigningKey)
            credentials = mint_now(credentials, name, tags=tags, lifetime_s=LIFETIME_S)
    return BusSettings(
        servers=[url],
        user=role.value,
        password=secrets.read(f"nats_{role.value}") if plain else "",
        credentials=credentials,
        inbox_prefix=inbox_prefix(role, name),
        subject_prefix="serve",
    )


def admin_address(record: RunRecord) -> StackAddress:
    """How an admin reaches the embedded stack of that record."""
    file = str(Secrets(Path(record.secrets)).credentials_file(Role.ADMIN))
    return StackAddress(urls=(record.nats_url,), credentials_file=file)

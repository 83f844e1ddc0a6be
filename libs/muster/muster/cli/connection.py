"""Finds the stack that a person means, mostly without being told.

In this order: what is given (``--nats`` or MUSTER_NATS_URL); the embedded stack that runs from ``.muster`` here or
above; the stack of compose whose ``secrets`` directory lies here or above. Credentials that are not given are taken
from the stack that the address belongs to, and never used with any other machine.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec

from muster.client.address import DEFAULT_URL, DEFAULT_USER, StackAddress, parse_urls
from muster.embedded.options import DEFAULT_STATE_DIR
from muster.embedded.run_record import RunRecord, running_stack
from muster.secrets import Secrets
from serve_common.errors import BadField, BusUnavailable
from serve_common.identities.roles import Role
from serve_common.settings import Environment

SECRETS_DIRECTORY: Final = "secrets"
_OWN_USERS: Final = frozenset({DEFAULT_USER, "client"})
"""Whose credentials lie with a stack for those who find it: people's, and deployment handles' outside of replicas."""
_LOOPBACK: Final = frozenset({"127.0.0.1", "localhost", "::1"})


class StackChoice(msgspec.Struct, frozen=True):
    """What the command line says about the stack; None: nothing."""

    nats: str | None = None
    creds: Path | None = None
    user: str | None = None
    password_file: Path | None = None

    def over(self, other: StackChoice) -> StackChoice:
        """These, and ``other``'s where these say nothing."""
        return StackChoice(
            nats=self.nats or other.nats,
            creds=self.creds or other.creds,
            user=self.user or other.user,
            password_file=self.password_file or other.password_file,
        )


def find_stack(options: StackChoice, variables: Mapping[str, str], directory: Path) -> StackAddress:
    """The address of the stack that is meant, seen from ``directory``.

    Raises `BusUnavailable` when none is given and none is found, `BadField` for what cannot be, and `SecretUnusable`
    for a password file of a found stack that cannot be read.
    """
    environment = Environment(variables)
    field = "--nats" if options.nats else "MUSTER_NATS_URL"
    given = options.nats or environment.optional("MUSTER_NATS_URL")
    embedded = running_embedded(variables, directory)
    if given is None and embedded is not None:
        given = embedded.nats_url
    password = _given_password(options, environment)
    credentials = _given_credentials(options, environment, directory)
    composed = _secrets_of_compose(directory)
    if given is None and (composed is not None or password is not None or credentials is not None):
        given = DEFAULT_URL
    if given is None:
        raise BusUnavailable(
            "no stack was found; start one with 'muster up', or say where one is with --nats or MUSTER_NATS_URL"
        )
    parsed = parse_urls(given, field)
    user = options.user or parsed.user or environment.text("MUSTER_NATS_USER", DEFAULT_USER)
    if options.password_file is None and parsed.password is not None:
        password = parsed.password
        credentials = None if options.creds is None else credentials
    if password is None and credentials is None and user in _OWN_USERS:
        credentials, password = _own(user, parsed.urls, embedded, composed)
    return StackAddress(
        urls=parsed.urls,
        credentials_file=credentials,
        user=user,
        password=password,
        subject_prefix=environment.text("MUSTER_SUBJECT_PREFIX", "serve"),
        tls_ca_file=_readable(environment.optional("MUSTER_NATS_TLS_CA_FILE"), "MUSTER_NATS_TLS_CA_FILE"),
    )


def _given_credentials(options: StackChoice, environment: Environment, directory: Path) -> str | None:
    """A password that is given on the command line goes before credentials of the environment."""
    if options.creds is not None:
        return _readable(str(directory / options.creds), "--creds")
    if options.password_file is not None or options.user is not None:
        return None
    named = environment.optional("MUSTER_NATS_CREDS")
    return None if named is None else _readable(str(directory / named), "MUSTER_NATS_CREDS")


def _given_password(options: StackChoice, environment: Environment) -> str | None:
    if options.password_file is not None:
        variables = {"given_FILE": str(options.password_file)}
        try:
            return Environment(variables).secret("given")
        except BadField as error:
            raise BadField("--password-file", error.reason) from error
    if environment.optional("MUSTER_NATS_PASSWORD") or environment.optional("MUSTER_NATS_PASSWORD_FILE"):
        return environment.secret("MUSTER_NATS_PASSWORD")
    return None


def _own(
    user: str, urls: tuple[str, ...], embedded: RunRecord | None, composed: Path | None
) -> tuple[str | None, str | None]:
    """The file of credentials, or else the password, that lies with the stack."""
    secrets = None
    if embedded is not None and urls == parse_urls(embedded.nats_url, "run.json").urls:
        secrets = Secrets(Path(embedded.secrets))
    elif composed is not None and _hosts(urls) <= _LOOPBACK:
        secrets = Secrets(composed)
    if secrets is None:
        return None, None
    file = secrets.credentials_file(Role(user))
    return (str(file), None) if file.is_file() else (None, secrets.read(f"nats_{user}"))


def _hosts(urls: tuple[str, ...]) -> set[str]:
    return {url.partition("://")[2].rpartition(":")[0].strip("[]") for url in urls}


def running_embedded(variables: Mapping[str, str], directory: Path) -> RunRecord | None:
    """The stack that `muster up` runs from ``directory`` or above; None when there is none."""
    named = Environment(variables).optional("MUSTER_STATE_DIR")
    places = [directory / named] if named else [place / DEFAULT_STATE_DIR for place in _upwards(directory)]
    return next(filter(None, map(running_stack, places)), None)


def _secrets_of_compose(directory: Path) -> Path | None:
    for place in _upwards(directory):
        candidate = place / SECRETS_DIRECTORY
        found = Secrets(candidate)
        if found.credentials_file(Role.ADMIN).is_file() or found.nats_password_file("admin").is_file():
            return candidate
    return None


def _upwards(directory: Path) -> Iterator[Path]:
    yield directory
    yield from directory.parents


def _readable(path: str | None, field: str) -> str | None:
    if path is not None and not os.access(path, os.R_OK):
        raise BadField(field, f"{path} cannot be read")
    return path

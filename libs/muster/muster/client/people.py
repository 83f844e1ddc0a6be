"""The address of a stack as a person reaches it who signed in."""

from __future__ import annotations

import msgspec

from muster.client.requests import StackAddress
from serve_common.identities.people import PlainUser, parse_identity
from serve_common.identities.roles import Role


def address_of_person(base: StackAddress, name: str, role: Role, identity_text: str) -> StackAddress:
    """The stack of ``base``, reached as the person ``name`` whose identity `people.open_person` returned.

    Raises `CredentialsUnusable`.
    """
    identity = parse_identity(identity_text)
    if isinstance(identity, PlainUser):
        return msgspec.structs.replace(
            base,
            credentials_file=None,
            identity=None,
            user=identity.user,
            password=identity.password,
            role=role,
        )
    return msgspec.structs.replace(
        base, credentials_file=None, identity=identity, user=name, password=None, role=role
    )

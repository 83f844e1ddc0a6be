"""``python -m serve_common.identities``: prints plain.conf, the table of roles for a NATS whose users are plain.

There is one account, and one user and password for all of a role.

What is lost: users of a role have no names, so each may publish and receive what any other of its role may; and
JetStream, which responds on any reply subject of a request, is in the same account as the commands.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Final

from serve_common.identities.roles import (
    CALLED_ENDPOINTS,
    CALLED_REPLICAS,
    NAME,
    AccountName,
    Role,
    get_rights,
)
from serve_common.names import check_name

_HEAD: Final = """\
# Plain users for one instance of Muster, in place of identities: what a NATS that is there already can take.
# Written by `make plain-conf` from serve_common/identities/roles.py; for another subject prefix than {prefix!r}:
#   python -m serve_common.identities --subject-prefix NAME
# Beside it lies passwords.conf (`muster secrets --plain` writes it as nats_passwords.conf), which defines the variables
# $NATS_<ROLE>_PASSWORD.
#
# All users of a role are one here: a replica may read what others are sent, a host may report for others, and through
# JetStream, which is in the same account, more than these lists say is within reach. Use identities where you can.

include "passwords.conf"

system_account: SYS
"""


_OWN_ENDING: Final = re.compile(
    rf"({'|'.join(map(re.escape, (NAME, CALLED_REPLICAS, CALLED_ENDPOINTS)))})(\.>)?$"
)


def plain_config(prefix: str) -> str:
    """The content of deploy/nats/plain.conf."""
    return "\n".join((_HEAD.format(prefix=prefix), *_accounts(prefix), ""))


def plain_subjects(subjects: Iterable[str]) -> list[str]:
    """Replace a user's own name in ``subjects`` by a wildcard: all users of a role share its permissions."""
    # Those of `_R_` are responses to another account.
    return [
        _OWN_ENDING.sub(">", subject).replace(NAME, "*")
        for subject in subjects
        if not subject.startswith("_R_.")
    ]


def _accounts(prefix: str) -> Iterator[str]:
    yield "accounts {"
    yield "  SYS {"
    yield "    users: [{ user: system, password: $NATS_SYSTEM_PASSWORD }]"
    yield "  }"
    yield "  MUSTER {"
    yield "    jetstream: { max_mem: 64MB, max_file: 2GB, max_streams: 16, max_consumers: 1024 }"
    yield "    users: ["
    for role in Role:
        rights = get_rights(role, prefix)
        if rights.account is AccountName.SYSTEM:
            continue
        yield "      {"
        yield f"        user: {role.value}"
        yield f"        password: $NATS_{role.value.upper()}_PASSWORD"
        yield "        permissions {"
        yield from _allowed("publish", rights.permissions.publish)
        yield from _allowed("subscribe", rights.permissions.subscribe)
        if rights.permissions.response_s:
            yield f'          allow_responses: {{ max: 1, expires: "{rights.permissions.response_s}s" }}'
        yield "        }"
        yield "      }"
    yield "    ]"
    yield "  }"
    yield "}"


def _allowed(verb: str, subjects: Iterable[str]) -> Iterator[str]:
    yield f"          {verb} {{"
    yield "            allow: ["
    yield from (f'              "{subject}"' for subject in plain_subjects(subjects))
    yield "            ]"
    yield "          }"


def main() -> None:
    """Print the configuration."""
    parser = argparse.ArgumentParser(description="Print plain users for a NATS without identities.")
    parser.add_argument("--subject-prefix", default="serve", help="First token of all subjects.")
    prefix = check_name(parser.parse_args().subject_prefix, "--subject-prefix")
    sys.stdout.write(plain_config(prefix))


if __name__ == "__main__":
    main()

"""What is asked of every system: each load by name, and with which system its figure is compared.

Why a table: a load that a system cannot serve is left out there and nowhere else, and all are measured in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Final

import msgspec

BARE, FLOOR_A, FLOOR_B, MUSTER = "bare", "floor A", "floor B", "Muster"
KIB, MIB = 1024, 1024 * 1024


class Served(Enum):
    """What a system serves; a system has a URL for each that it does."""

    NOOP = "noop"
    ECHO = "echo"
    UPLOAD = "upload"
    TOKENS = "tokens"
    CHAIN = "chain"
    UNCOUNTED = "uncounted"
    """The no-op, without metrics."""


class Kind(Enum):
    """How a load is made and what its rate counts."""

    REQUESTS = "req/s"
    """By wrk."""
    TRANSFER = "MiB/s"
    """One body at a time, as fast as it is taken."""
    TOKENS = "tokens/s"


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the plan."""

    name: str
    path: Served
    kind: Kind = Kind.REQUESTS
    connections: int = 1
    body_bytes: int = 0
    tokens: int = 0
    """In each answer."""
    reference: str = BARE
    """The system that ratios are taken of."""


NOOP_CONNECTIONS: Final = (1, 16, 64, 256)


def noop_loads(connections: Sequence[int]) -> list[Load]:
    """The least that can be served."""
    return [
        Load(name=f"no-op c={count}", path=Served.NOOP, connections=count, reference=FLOOR_B)
        for count in connections
    ]


OTHER_LOADS: Final = [
    Load(name="echo 1 KiB c=16", path=Served.ECHO, connections=16, body_bytes=KIB),
    Load(name="echo 1 MiB c=4", path=Served.ECHO, connections=4, body_bytes=MIB),
    Load(name="echo 100 MiB", path=Served.ECHO, kind=Kind.TRANSFER, body_bytes=100 * MIB),
    Load(name="upload 100 MiB", path=Served.UPLOAD, kind=Kind.TRANSFER, body_bytes=100 * MIB),
    Load(name="tokens, 1 client", path=Served.TOKENS, kind=Kind.TOKENS, tokens=20_000),
    Load(name="tokens, 50 clients", path=Served.TOKENS, kind=Kind.TOKENS, connections=50, tokens=2_000),
    Load(name="chain of two c=1", path=Served.CHAIN, connections=1, reference=MUSTER),
    Load(name="chain of two c=16", path=Served.CHAIN, connections=16, reference=MUSTER),
]
PROCESSES_SHOWN_FOR: Final = ("no-op c=64", "upload 100 MiB")
"""Loads whose cost is told by process; everything is in the JSON."""

"""What a message is at its other end: the bus carries bytes, and whoever reads them refuses what is out of bounds."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

M = TypeVar("M")


def carried(message: M) -> M:
    """``message`` as it is read from the bus. Raises `msgspec.ValidationError` for one that its reader refuses."""
    decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(type(message))
    return decoder.decode(msgspec.json.encode(message))

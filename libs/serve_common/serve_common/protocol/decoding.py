"""How large the parts of a message may be, and what decoding raises when it is not what it should be."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

Count = Annotated[int, Meta(ge=0, le=2**53)]
"""A number that counts, numbers or names something; exact in every JSON reader."""
Amount = Annotated[float, Meta(ge=0, le=2.0**53)]
"""How much there is of something."""
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
"""How long something lasts: up to thirty years."""
Moment = Annotated[float, Meta(ge=0, le=1e11)]
"""Seconds since 1970, by whatever clock."""
Share = Annotated[float, Meta(ge=0, le=1)]
"""A part of a whole."""
Label = Annotated[str, Meta(max_length=256)]
"""A name, a tag or an id; longer than any valid one, for what is invalid has an error of its own."""
Address = Annotated[str, Meta(max_length=2_048)]
"""A URL or ``host:port``."""
Text = Annotated[str, Meta(max_length=64 * 1024)]
"""What people are told."""


UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

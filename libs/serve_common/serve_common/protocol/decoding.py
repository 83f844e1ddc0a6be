"""Limits of the parts of a message, and the errors that decoding raises.

Why limits at decoding: a client that may publish on a subject may publish anything there, and a number that no process
means (an amount of 1e308, a count of a hundred digits) must be refused before anything is computed from it. The limits
are far above what a healthy process sends.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

Count = Annotated[int, Meta(ge=0, le=2**53)]
"""A count, a sequence number or a numeric id; exact in every JSON reader."""
Amount = Annotated[float, Meta(ge=0, le=2.0**53)]
"""A non-negative quantity."""
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
"""A duration in seconds: up to thirty years."""
Moment = Annotated[float, Meta(ge=0, le=1e11)]
"""A time in seconds since 1970, by any clock."""
Share = Annotated[float, Meta(ge=0, le=1)]
"""A fraction, from 0 to 1."""
Label = Annotated[str, Meta(max_length=256)]
"""A name, a tag or an id; longer than any valid one, for what is invalid has an error of its own."""
Address = Annotated[str, Meta(max_length=2_048)]
"""A URL or ``host:port``."""
Text = Annotated[str, Meta(max_length=64 * 1024)]
"""Text for people."""


UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What decoding raises for a message that is not as it should be.

Input may be invalid UTF-8, or nested deeper than the decoder goes, and neither error is a `msgspec.DecodeError`.
Catching only some of these would let a sender end a task that should log the message and go on.
"""

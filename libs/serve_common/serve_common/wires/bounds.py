"""How large the numbers, texts and lists of a message may be.

Why on decoding: whoever may publish on a subject may publish anything there, and a number that no process means (an
amount of 1e308, a count of a hundred digits) must be refused before anything is computed from it. The bounds are far
above what a sound process says, so only the unsound meet them.
"""

from __future__ import annotations

from typing import Annotated

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

"""The held-out images as they are sent, and one to look at.

Why PNGs made here: the data set has bare numbers, and what a caller sends is a file.
"""

from __future__ import annotations

import io
import itertools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image
from split import held_out_part

SAMPLE_INDEX = 131  # a 7 of which the model is sure, yet less than 99 %
SAMPLE_SCALE = 16


@dataclass(frozen=True)
class Case:
    """One held-out image, ready to send, and the digit it shows."""

    png: bytes
    label: int


def encode_png(pixels: np.ndarray, scale: int = 1) -> bytes:
    """64 brightnesses as a grayscale PNG, light ink on a dark ground, `scale` screen pixels to each."""
    levels = np.rint(pixels.reshape(8, 8) * (255 / 16)).astype(np.uint8)
    out = io.BytesIO()
    Image.fromarray(levels.repeat(scale, axis=0).repeat(scale, axis=1)).save(out, format="PNG", optimize=True)
    return out.getvalue()


def held_out_cases(limit: int | None = None) -> list[Case]:
    """The held-out images, or the first `limit` of them."""
    part = held_out_part()
    pairs = zip(part.pixels, part.labels, strict=True)
    return [Case(encode_png(pixels), int(label)) for pixels, label in itertools.islice(pairs, limit)]


def write_sample(path: Path) -> int:
    """Writes one held-out image, large enough to look at; returns the digit it shows."""
    part = held_out_part()
    path.write_bytes(encode_png(part.pixels[SAMPLE_INDEX], scale=SAMPLE_SCALE))
    return int(part.labels[SAMPLE_INDEX])

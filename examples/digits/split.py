"""One rule for which digits are trained on and which are kept back.

The model and its evaluation run in different processes, perhaps with different versions of scikit-learn.
Were the split drawn by a library's random generator, a new version could move trained images into the
held-out part and the accuracy would quietly become a lie. So the rule is arithmetic on the position.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from sklearn.datasets import load_digits

# The data set repeats 0..9 in order for long stretches: 3 has no factor in common with 10, so that every
# digit is held out about equally often.
HELD_OUT_EVERY = 3


@dataclass(frozen=True)
class Part:
    """Images as rows of 64 brightnesses (0 ground, 16 full ink) and the digit that each shows."""

    pixels: np.ndarray
    labels: np.ndarray


def training_part() -> Part:
    """What a model may learn from: 1198 images."""
    return _part(held_out=False)


def held_out_part() -> Part:
    """What no model has seen, in a fixed order: 599 images."""
    return _part(held_out=True)


def _part(*, held_out: bool) -> Part:
    pixels, labels = load_digits(return_X_y=True)
    chosen = (np.arange(len(labels)) % HELD_OUT_EVERY == 0) == held_out
    return Part(pixels=pixels[chosen], labels=labels[chosen])

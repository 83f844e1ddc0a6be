"""What the model has learned, and how it answers with it: numbers and nothing that could run.

A kernel machine: how alike an image is to each of some hundred training images (a Gaussian of their distance) decides,
by one matrix, for each digit; softmax makes probabilities of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

INPUTS, DIGITS = 64, 10


@dataclass(frozen=True)
class Weights:
    """Shapes: examples (N, 64), matrix (N, 10), bias (10,)."""

    examples: np.ndarray
    matrix: np.ndarray
    bias: np.ndarray
    gamma: float

    def __post_init__(self) -> None:
        """Raises ValueError for shapes that do not fit together or numbers that are none."""
        count = len(self.examples)
        found = (self.examples.shape, self.matrix.shape, self.bias.shape)
        if found != ((count, INPUTS), (count, DIGITS), (DIGITS,)):
            raise ValueError(f"weights of the shapes {found} are not of {INPUTS} inputs and {DIGITS} digits")
        if not all(np.isfinite(part).all() for part in (self.matrix, self.bias, np.array(self.gamma))):
            raise ValueError("weights must be finite numbers")

    def save(self, path: Path) -> None:
        """Write a file that `load` reads."""
        np.savez_compressed(
            path, examples=self.examples, matrix=self.matrix, bias=self.bias, gamma=self.gamma
        )

    def probabilities(self, pixels: np.ndarray) -> np.ndarray:
        """The probability of each digit for 64 brightnesses of 0..16; the sum is 1."""
        distances = ((self.examples - pixels) ** 2).sum(axis=1)
        scores = np.exp(-self.gamma * distances) @ self.matrix + self.bias
        powers = np.exp(scores - scores.max())
        return powers / powers.sum()


def load(path: Path) -> Weights:
    """Read a file that `Weights.save` wrote; it holds numbers only, so also a foreign one cannot run anything.

    Raises OSError for a file that cannot be read and ValueError for one that holds something else.
    """
    try:
        with np.load(path, allow_pickle=False) as held:
            parts = {name: held[name] for name in ("examples", "matrix", "bias", "gamma")}
    except (BadZipFile, KeyError, ValueError, EOFError, AttributeError, TypeError) as error:
        raise ValueError(f"{path} holds no weights: {error}") from error
    return Weights(
        examples=parts["examples"].astype(float),
        matrix=parts["matrix"].astype(float),
        bias=parts["bias"].astype(float),
        gamma=float(parts["gamma"]),
    )

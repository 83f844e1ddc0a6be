"""A real model to try Muster with: it reads handwritten digits, needs no download, and is ready in a moment.

Nothing here imports Muster: the class has the shape that Ray Serve made common (`__call__`, `reconfigure`,
`check_health`), which is all that a deployment needs.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from pixels import SIDE, BadInputError, pixels_from_body
from starlette.requests import Request
from starlette.responses import JSONResponse
from weights import load

UNSURE = "unsure"
DEFAULT_THRESHOLD = 0.0

USAGE = {
    "model": "handwritten digits, 8 x 8 pixels, scikit-learn's bundled data set",
    "send": {
        "image/png": "POST a PNG of one digit, light ink on a dark ground, at most 1024 x 1024 pixels",
        "application/json": 'POST {"pixels": [64 numbers, or 8 rows of 8, each 0 (ground) to 16 (ink)]}',
    },
    "answer": {"digit": "0..9 or 'unsure'", "confidence": "0..1", "probabilities": "per digit, sum 1"},
}


class Digits:
    """Answers which digit an image shows, or "unsure" below a confidence threshold."""

    def __init__(self, model_path: str | None = None, every: int = 1) -> None:
        """Loads the weights that `training.py` wrote: those beside this file, or those at ``model_path``.

        ``model_path="train"`` learns them anew, which takes some seconds and needs scikit-learn; with ``every`` from
        one image in so many. Raises OSError for a file that cannot be read and ValueError for one that holds
        something else.
        """
        self._threshold = DEFAULT_THRESHOLD
        if model_path == "train":
            from training import train  # noqa: PLC0415 - seconds of CPU, which loading need not spend

            self._weights = train(every)
        else:
            self._weights = load(Path(model_path) if model_path else Path(__file__).with_name("weights.npz"))
        self.check_health()

    def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Takes `{"threshold": 0..1}`; what is left out gets its default.

        Raises ValueError naming the field, and then changes nothing.
        """
        if not isinstance(user_config, dict):
            kind = type(user_config).__name__
            raise ValueError(f"user_config: must be an object, not {kind}")  # noqa: TRY004 - one type for all
        for key in user_config:
            if key != "threshold":
                raise ValueError(f"user_config.{key}: unknown field; the only field is threshold")
        threshold = user_config.get("threshold", DEFAULT_THRESHOLD)
        if isinstance(threshold, bool) or not isinstance(threshold, int | float):
            kind = type(threshold).__name__
            raise ValueError(f"user_config.threshold: must be a number, not {kind}")  # noqa: TRY004 - as above
        if not 0 <= threshold <= 1:
            raise ValueError(f"user_config.threshold: {threshold} is outside 0..1")
        self._threshold = float(threshold)

    def check_health(self) -> None:
        """Raises RuntimeError when the model no longer gives probabilities."""
        probabilities = self._weights.probabilities(np.zeros(SIDE * SIDE))
        if not math.isclose(probabilities.sum(), 1.0, abs_tol=1e-6):
            raise RuntimeError(f"the model's probabilities sum to {probabilities.sum()}, not 1")

    async def __call__(self, request: Request) -> dict[str, Any] | JSONResponse:
        """POST an image; GET explains how."""
        if request.method in {"GET", "HEAD"}:
            return USAGE
        if request.method != "POST":
            message = f"method: {request.method} is not served; POST an image"
            return _refusal(405, "method_not_allowed", message, headers={"Allow": "GET, HEAD, POST"})
        try:
            pixels = pixels_from_body(await request.body(), request.headers.get("content-type", ""))
        except BadInputError as error:
            return _refusal(400, error.code, error.message)
        return self.classify(pixels)

    def classify(self, pixels: np.ndarray) -> dict[str, Any]:
        """The answer for 64 brightnesses of 0..16."""
        probabilities = {
            str(digit): round(float(probability), 6)
            for digit, probability in enumerate(self._weights.probabilities(pixels))
        }
        best, confidence = max(probabilities.items(), key=lambda item: item[1])
        digit = int(best) if confidence >= self._threshold else UNSURE
        return {"digit": digit, "confidence": confidence, "probabilities": probabilities}


def _refusal(status: int, code: str, message: str, headers: dict[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"error": {"code": code, "message": message}}, status_code=status, headers=headers)

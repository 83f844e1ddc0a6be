"""A real model to try Muster with: it reads handwritten digits, needs no download, and is ready in a second.

Nothing here imports Muster: the class has the shape that Ray Serve made common (`__call__`, `reconfigure`,
`check_health`), which is all that a deployment needs.
"""

from __future__ import annotations

import math
from typing import Any

import joblib
import numpy as np
import sklearn
from pixels import SIDE, BadInputError, pixels_from_body
from sklearn.kernel_approximation import Nystroem
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import Pipeline, make_pipeline
from split import training_part
from starlette.requests import Request
from starlette.responses import JSONResponse
from threadpoolctl import threadpool_limits

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


def train() -> Pipeline:
    """A classifier with about 98 % accuracy on the held-out part, fitted in a fraction of a second."""
    part = training_part()
    model = make_pipeline(
        Nystroem(gamma=0.0005, n_components=600, random_state=0),
        LogisticRegression(C=300, max_iter=1000),
    )
    return model.fit(part.pixels, part.labels)


class Digits:
    """Answers which digit an image shows, or "unsure" below a confidence threshold."""

    def __init__(self, model_path: str | None = None) -> None:
        """Trains, or loads what `joblib.dump(train(), path)` wrote (trusted files only: they can run code).

        Raises OSError for a file that cannot be read and ValueError for a model of something else.
        """
        # One request uses one core: several replicas on a machine would otherwise fight over all of them.
        threadpool_limits(limits=1)
        self._threshold = DEFAULT_THRESHOLD
        self._model = train() if model_path is None else load(model_path)
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
        probabilities = self._probabilities(np.zeros(SIDE * SIDE))
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
            for digit, probability in zip(self._model.classes_, self._probabilities(pixels), strict=True)
        }
        best, confidence = max(probabilities.items(), key=lambda item: item[1])
        digit = int(best) if confidence >= self._threshold else UNSURE
        return {"digit": digit, "confidence": confidence, "probabilities": probabilities}

    def _probabilities(self, pixels: np.ndarray) -> np.ndarray:
        # The input was checked already; checking it again in each step is a third of the time of a request.
        with sklearn.config_context(assume_finite=True, skip_parameter_validation=True):
            return self._model.predict_proba(pixels.reshape(1, -1))[0]


def load(model_path: str) -> Any:
    """A saved classifier of 64 numbers into the digits 0..9."""
    model = joblib.load(model_path)
    if not hasattr(model, "predict_proba"):
        raise ValueError(f"model_path: {model_path} holds a {type(model).__name__}, not a classifier")
    inputs, classes = getattr(model, "n_features_in_", None), list(getattr(model, "classes_", []))
    if inputs != SIDE * SIDE or classes != list(range(10)):
        raise ValueError(
            f"model_path: {model_path} maps {inputs} numbers to {classes}, not {SIDE * SIDE} to 0..9"
        )
    return model


def _refusal(status: int, code: str, message: str, headers: dict[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"error": {"code": code, "message": message}}, status_code=status, headers=headers)

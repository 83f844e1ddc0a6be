"""What the pictures of the console show: models that work, log, and one whose weights are missing."""

from __future__ import annotations

import asyncio
import logging
import random

from fastapi import FastAPI
from pydantic import BaseModel, Field
from starlette.requests import Request

import muster as serve

log = logging.getLogger("sentiment")
api = FastAPI(title="Rent")


class Greeter:
    """Responds after a while; a share of the requests fails."""

    def __init__(self, seconds: float = 0.0, errors: float = 0.0) -> None:
        self._seconds, self._errors = seconds, errors

    async def __call__(self, _request: Request) -> str:
        """A greeting."""
        await asyncio.sleep(self._seconds)
        if random.random() < self._errors:  # noqa: S311 - no secret
            raise RuntimeError("the model gave no score")
        return "hello"


class Sentiment(Greeter):
    """Logs what it does."""

    async def __call__(self, request: Request) -> str:
        """A score."""
        log.info("scored a review of %d words: %.2f", random.randint(8, 240), random.random())  # noqa: S311
        if random.random() < 0.05:  # noqa: S311
            log.warning("the review is in a language that the model does not know well")
        return await super().__call__(request)


class Ranker:
    """Never starts."""

    def __init__(self) -> None:
        raise FileNotFoundError("weights/ranker-2026-11-28.npz")


class Flat(BaseModel):
    """What a prediction needs."""

    area_m2: float = Field(gt=0, le=1000)
    rooms: int = Field(ge=1, le=20)


@serve.ingress(api)
class Rent:
    """A FastAPI application."""

    @api.post("/predict")
    async def predict(self, flat: Flat) -> dict[str, float]:
        """The monthly rent of a flat."""
        return {"rent": round(flat.area_m2 * 11.5 + flat.rooms * 40.0, 2)}

"""What the tests of the console serve: models that work, wait, or fail at the start or at requests."""

from __future__ import annotations

import asyncio
import random

from fastapi import FastAPI
from pydantic import BaseModel, Field
from starlette.requests import Request

import muster as serve

api = FastAPI(title="Rent")


class Steady:
    """Answers its text after a while; a share of the requests fails."""

    def __init__(self, text: str = "steady", seconds: float = 0.0, errors: float = 0.0) -> None:
        self._text, self._seconds, self._errors = text, seconds, errors

    async def __call__(self, _request: Request) -> str:
        await asyncio.sleep(self._seconds)
        if random.random() < self._errors:
            raise RuntimeError("planted")
        return self._text


class Broken:
    """Never starts."""

    def __init__(self) -> None:
        raise RuntimeError("the weights <b>are</b> missing (raised on purpose)")


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

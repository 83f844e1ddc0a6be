"""FastAPI in front of a model: bodies are checked against a Pydantic model, and what is wrong is a 422 that names it.

python examples/fastapi_validation.py
curl -s -H 'Content-Type: application/json' --data-binary '{"area_m2": 70, "rooms": 3}' http://127.0.0.1:8000/rent/predict
"""

from __future__ import annotations

from fastapi import FastAPI
from pydantic import BaseModel, Field

import muster as serve

api = FastAPI(title="Rent")


class Flat(BaseModel):
    """What a prediction needs."""

    area_m2: float = Field(gt=0, le=1000)
    rooms: int = Field(ge=1, le=20)


@serve.deployment(ray_actor_options={"num_cpus": 0.1})
@serve.ingress(api)
class Rent:
    """A linear model."""

    def __init__(self, per_m2: float, per_room: float) -> None:
        self.per_m2 = per_m2
        self.per_room = per_room

    @api.post("/predict")
    async def predict(self, flat: Flat) -> dict[str, float]:
        """The monthly rent of a flat."""
        return {"rent": round(flat.area_m2 * self.per_m2 + flat.rooms * self.per_room, 2)}


app = Rent.bind(per_m2=11.5, per_room=40.0)

if __name__ == "__main__":
    serve.run(app, name="rent", route_prefix="/rent")

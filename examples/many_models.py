"""Twenty models behind one deployment: each replica keeps a few, and requests go where their model is loaded.

python examples/many_models.py
curl -s -H 'serve_multiplexed_model_id: city-7' 'http://127.0.0.1:8000/models?x=3'
"""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import JSONResponse

import muster as serve

MODELS = {f"city-{number}": float(number) for number in range(20)}
"""Slopes by model; in earnest they would lie in a bucket."""


@serve.deployment(num_replicas=2, ray_actor_options={"num_cpus": 0.1})
class Models:
    """Linear models, loaded when they are asked for."""

    def __init__(self) -> None:
        self.num_loads = 0

    @serve.multiplexed(max_num_models_per_replica=12)
    async def load(self, model_id: str) -> float:
        """Called for a model that this replica does not have; the one unused for longest makes way."""
        await asyncio.sleep(0.05)
        self.num_loads += 1
        return MODELS[model_id]

    async def __call__(self, request: Request) -> JSONResponse | dict[str, object]:
        """The prediction of the model that the request's header names."""
        model_id = serve.get_multiplexed_model_id()
        if model_id not in MODELS:
            return JSONResponse({"error": f"there is no model {model_id!r}"}, status_code=404)
        slope = await self.load(model_id)
        return {
            "model": model_id,
            "y": slope * float(request.query_params.get("x", "1")),
            "replica": serve.get_replica_context().replica_id,
            "loads": self.num_loads,
        }


app = Models.bind()

if __name__ == "__main__":
    serve.run(app, name="models", route_prefix="/models")

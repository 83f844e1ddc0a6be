"""What batching gains: the same requests to the same model, one by one and in batches.

The model is a large matrix. Reading it from memory costs more than computing with it, so 32 rows cost
little more than one.

python examples/batching.py http://127.0.0.1:8000
"""

from __future__ import annotations

import json
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from starlette.requests import Request

import muster as serve

SIZE = 4096
REQUESTS = 200


@serve.deployment(max_ongoing_requests=64, ray_actor_options={"num_cpus": 0.1})
class Model:
    """Sums the numbers 0 to n - 1, in a roundabout way."""

    def __init__(self) -> None:
        self.weights = np.ones((SIZE, SIZE), dtype=np.float32)

    def compute(self, numbers: list[int]) -> list[int]:
        """One pass over the weights for all ``numbers``."""
        rows = np.zeros((len(numbers), SIZE), dtype=np.float32)
        for row, number in zip(rows, numbers, strict=True):
            row[:number] = np.arange(number)
        return [int(value) for value in (rows @ self.weights)[:, 0]]

    @serve.batch(max_batch_size=32, batch_wait_timeout_s=0.01)
    async def compute_batch(self, numbers: list[int]) -> list[tuple[int, int]]:
        """Called with one number; gets those of all calls that wait."""
        return [(value, len(numbers)) for value in self.compute(numbers)]

    async def __call__(self, request: Request) -> dict[str, int]:
        """The sum, and how many requests shared the pass."""
        number = int(request.query_params["n"])
        if request.query_params["batched"] == "yes":
            value, size = await self.compute_batch(number)
        else:
            [value], size = self.compute([number]), 1
        return {"n": number, "sum": value, "batch": size}


app = Model.bind()


def measure(url: str, batched: str) -> tuple[float, list[dict[str, Any]]]:
    """Requests per second of 32 clients, and the responses."""

    def call(number: int) -> dict[str, Any]:
        with urllib.request.urlopen(f"{url}?batched={batched}&n={number}", timeout=60) as response:  # noqa: S310 - http
            found: dict[str, Any] = json.load(response)
            return found

    with ThreadPoolExecutor(32) as clients:
        started = time.perf_counter()
        responses = list(clients.map(call, [number % 100 for number in range(REQUESTS)]))
        return REQUESTS / (time.perf_counter() - started), responses


if __name__ == "__main__":
    serve.run(app, name="batching", route_prefix="/batching")
    address = f"{sys.argv[1] if len(sys.argv) > 1 else 'http://127.0.0.1:8000'}/batching"
    alone, single = measure(address, "no")
    together, shared = measure(address, "yes")
    assert [each["sum"] for each in single] == [each["sum"] for each in shared]
    largest = max(each["batch"] for each in shared)
    print(f"one by one: {alone:.0f} requests/s; in batches of up to {largest}: {together:.0f} requests/s")
    print(f"gain: {together / alone:.1f} times")

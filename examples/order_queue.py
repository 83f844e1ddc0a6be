"""Packers whose number follows the orders that wait: a number of one's own, by a PromQL of one's own.

python examples/order_queue.py
muster update orders/Packer --autoscaling-config ... (as in the README beside this file)
curl -s --data-binary 60 http://127.0.0.1:8000/orders
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse

import muster as serve
from muster.handle import DeploymentHandle
from muster.metrics import Gauge

ORDERS_MAX = 1000
PACKERS_MAX = 3
PACK_S = 0.5


@serve.deployment(max_ongoing_requests=1, ray_actor_options={"num_cpus": 0.1})
class Packer:
    """Packs one order at a time."""

    async def pack(self, order: int) -> int:
        """Returns the order once it is packed."""
        await asyncio.sleep(PACK_S)
        return order


@serve.deployment(ray_actor_options={"num_cpus": 0.1})
class Orders:
    """Takes orders, and has as many packed at once as there may be packers."""

    async def __init__(self, packer: DeploymentHandle) -> None:
        self._packer = packer
        self._waiting: asyncio.Queue[int] = asyncio.Queue(ORDERS_MAX)
        self._gauge = Gauge("orders_waiting", "Orders that no packer has yet.")
        self._taken = self._packed = 0
        self._work = [
            asyncio.create_task(self._have_packed())  # noqa: TID251 - user code, which knows no owner but itself
            for _ in range(PACKERS_MAX)
        ]

    async def _have_packed(self) -> None:
        while True:
            order = await self._waiting.get()
            self._gauge.set(self._waiting.qsize())
            try:
                await self._packer.pack.remote(order)
                self._packed += 1
            except serve.exceptions.RayServeException as error:
                print(f"order {order} was not packed: {error}", file=sys.stderr)

    async def __call__(self, request: Request) -> JSONResponse | dict[str, Any]:
        """A POST of a number takes so many orders; any request tells how many wait and were packed."""
        if request.method == "POST":
            text = (await request.body()).decode()
            number = int(text) if text.isdecimal() and len(text) < 6 else 0
            if not 0 < number <= ORDERS_MAX - self._waiting.qsize():
                return JSONResponse(
                    {"error": "send a number of orders for which there is room"}, status_code=422
                )
            for _ in range(number):
                self._taken += 1
                self._waiting.put_nowait(self._taken)
            self._gauge.set(self._waiting.qsize())
        return {"waiting": self._waiting.qsize(), "packed": self._packed}


app = Orders.bind(Packer.bind())

if __name__ == "__main__":
    serve.run(app, name="orders", route_prefix="/orders")

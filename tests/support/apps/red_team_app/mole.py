"""User code that tells its attacker all it can find, and tries what it is told to; and its victim beside it."""

from __future__ import annotations

import json
import os

import msgspec

import muster as serve
from serve_common.runtime.request_context import current_replica


class Till:
    """The victim: its callers must hear nothing but this."""

    async def __call__(self, request):
        return {"till": request.query_params.get("n", "")}

    def take(self, amount):
        return amount


class Mole:
    """Does what the body says, and answers what came of it."""

    async def __call__(self, request):
        order = json.loads(await request.body())
        try:
            return {"done": await getattr(self, f"_{order['do']}")(**order.get("with", {}))}
        except Exception as error:
            return {"refused": f"{type(error).__name__}: {error}"}

    async def _identity(self):
        """All that is needed to be this replica elsewhere."""
        replica = current_replica()
        return msgspec.to_builtins(replica.bus)

    async def _call(self, name):
        return await serve.get_deployment_handle(name).take.remote(1)

    async def _environment(self):
        return dict(os.environ)

"""The rate limit at a proxy's edge: 429 with the time after which it is worth to ask again."""

from __future__ import annotations

import math
import time
from typing import final

from aiohttp import web

from serve_proxy.adapters.middlewares import Handler
from serve_proxy.core.problems import Problem
from serve_proxy.middlewares.exchange import API_KEY_NAME, client_host, refusal
from serve_proxy.middlewares.rate_rules import RateRules
from serve_proxy.middlewares.token_buckets import TokenBuckets


@final
class RateCheck:
    """A middleware."""

    def __init__(self, rules: RateRules) -> None:
        self._rules = rules
        self._buckets = TokenBuckets(rate_per_s=rules.rate_per_s, burst=rules.burst, keys_max=rules.keys_max)

    async def __call__(self, request: web.BaseRequest, handler: Handler) -> web.StreamResponse:
        """Hand the request on, or refuse it."""
        rules = self._rules
        key = rules.key(
            api_key_name=request.get(API_KEY_NAME, ""),
            header_value=request.headers.get(rules.header, "") if rules.header else "",
            client=client_host(request),
        )
        wait_s = self._buckets.take(key, time.monotonic())
        if not wait_s:
            return await handler(request)
        problem = Problem(
            status=429,
            code="rate_limited",
            message=f"more than {rules.rate_per_s:g} requests a second",
            headers=(("Retry-After", str(math.ceil(wait_s))),),
        )
        return refusal(request, problem)

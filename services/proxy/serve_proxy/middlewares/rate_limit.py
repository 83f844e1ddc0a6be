"""``serve_proxy.middlewares.rate_limit:rate_limit``: at most so many requests a second from each caller.

| variable | default | meaning |
| --- | --- | --- |
| ``SERVE_RATE_LIMIT_PER_S`` | required | requests a second that a caller may make for ever; 0.2 is one in 5 s |
| ``SERVE_RATE_LIMIT_BURST`` | the rate, at least 1 | how many at once after a quiet time |
| ``SERVE_RATE_LIMIT_BY`` | key | ``key``: name of the API key (put ``api_keys`` before this one); ``address``; ``header:<name>`` |
| ``SERVE_RATE_LIMIT_KEYS_MAX`` | 10000 | callers that are remembered |

What has no key or header is counted by its address (IPv6: by its /64 network), which load balancers in front tell as far
as ``SERVE_FORWARDED_HOPS`` has them believed. Each proxy process counts for itself:
with three of them a caller may do up to three times as much.
"""  # noqa: E501 - a table

from __future__ import annotations

from typing import Final

from serve_common.settings import Environment
from serve_proxy.middlewares.rate_check import RateCheck
from serve_proxy.middlewares.rate_rules import read_rate_rules

rate_limit: Final = RateCheck(read_rate_rules(Environment()))

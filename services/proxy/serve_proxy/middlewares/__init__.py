"""Ready-made middlewares: CORS, API keys and a rate limit per key.

Why configured by the environment: a proxy's options name middlewares by import path, and a path has no arguments. The
variables are read when the path is imported; what is missing or wrong refuses the import, and with it the change of
options, naming the variable.

| path | does | variables |
| --- | --- | --- |
| ``serve_proxy.middlewares.cors:cors`` | lets pages of other origins call | ``MUSTER_CORS_…``, see `cors` |
| ``serve_proxy.middlewares.api_keys:api_keys`` | asks for a key | ``MUSTER_API_KEYS_FILE``, see `api_keys` |
| ``serve_proxy.middlewares.rate_limit:rate_limit`` | 429 above a rate | ``MUSTER_RATE_LIMIT_…``, see `rate_limit` |

In this order: a browser sends no key with a preflight, and the limit counts by the key's name. For each of them there
are a pure part and one that knows aiohttp; the module that the path names only reads the environment.
"""

from __future__ import annotations

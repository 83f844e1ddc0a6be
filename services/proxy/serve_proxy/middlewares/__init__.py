"""Ready-made middlewares: CORS, API keys and a rate limit per key.

Why configured by the environment: a proxy's options name middlewares by import path, and a path has no arguments. The
variables are read when the path is imported; what is missing or wrong refuses the import, and with it the change of
options, naming the variable.

| path | does | variables |
| --- | --- | --- |
| ``serve_proxy.middlewares.cors:cors`` | allows calls by pages of other origins | ``MUSTER_CORS_…``, see `cors` |
| ``serve_proxy.middlewares.api_keys:api_keys`` | requires an API key | ``MUSTER_API_KEYS_FILE``, see `api_keys` |
| ``serve_proxy.middlewares.rate_limit:rate_limit`` | 429 above a rate | ``MUSTER_RATE_LIMIT_…``, see `rate_limit` |

Use them in this order: a browser sends no key with a preflight, and the limit counts by the key's name. Each consists
of pure code and a part that uses aiohttp; importing the path only reads the environment.
"""

from __future__ import annotations

"""``serve_proxy.middlewares.cors:cors``: lets pages of other origins call from browsers.

| variable | default | meaning |
| --- | --- | --- |
| ``SERVE_CORS_ALLOW_ORIGINS`` | required | ``https://app.example.com,http://localhost:3000``; ``https://*.example.com`` for all hosts below; ``*`` for any |
| ``SERVE_CORS_ALLOW_METHODS`` | GET,HEAD,POST,PUT,PATCH,DELETE | ``*`` for any |
| ``SERVE_CORS_ALLOW_HEADERS`` | ``*`` | what a page may send |
| ``SERVE_CORS_EXPOSE_HEADERS`` | X-Request-ID,Retry-After | what a page may read beyond the usual |
| ``SERVE_CORS_ALLOW_CREDENTIALS`` | false | ``true`` lets browsers send cookies; not with origin ``*`` |
| ``SERVE_CORS_MAX_AGE_S`` | 600 | how long a browser keeps the answer to a preflight |

A preflight never reaches a replica: 204, or 403 saying what is not allowed. What the application itself says about
cross-origin calls is replaced.
"""  # noqa: E501 - a table

from __future__ import annotations

from typing import Final

from serve_common.settings import Environment
from serve_proxy.middlewares.cors_check import CorsCheck
from serve_proxy.middlewares.cors_rules import read_cors_rules

cors: Final = CorsCheck(read_cors_rules(Environment()))

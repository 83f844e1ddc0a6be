"""``serve_proxy.middlewares.api_keys:api_keys``: only who bears a key may call.

``SERVE_API_KEYS_FILE`` names a file with a name and a key on each line; ``#`` begins a comment::

    # name      key, or sha256: and the digest of it (printf %s "$KEY" | sha256sum)
    shop        s3cr3t-of-at-least-16-characters
    analytics   sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08

A name may have several keys. The file is read again when it changes, within about a second of the next request.
Callers send ``Authorization: Bearer <key>`` or ``X-API-Key: <key>``; the application gets the name of the key in
``X-API-Key-Name`` and never the key, and no log has it.
"""

from __future__ import annotations

from typing import Final

from serve_common.settings import Environment
from serve_proxy.middlewares.api_key_check import ApiKeyCheck
from serve_proxy.middlewares.key_file import KeyFile

_VARIABLE: Final = "SERVE_API_KEYS_FILE"

api_keys: Final = ApiKeyCheck(KeyFile(Environment().text(_VARIABLE), _VARIABLE))

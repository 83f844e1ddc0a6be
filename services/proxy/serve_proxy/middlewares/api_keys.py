"""``serve_proxy.middlewares.api_keys:api_keys``: requests must have a valid API key.

``MUSTER_API_KEYS_FILE`` names a file with a name and a key on each line; ``#`` starts a comment::

    # name      key, or sha256: and the key's digest (printf %s "$KEY" | sha256sum)
    shop        s3cr3t-of-at-least-16-characters
    analytics   sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08

A name may have several keys. The file is reloaded when it changes, within about a second of the next request. Callers
send ``Authorization: Bearer <key>`` or ``X-API-Key: <key>``; the application gets the key's name in ``X-API-Key-Name``
and never the key, and no log contains it.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import time
from pathlib import Path
from typing import Final, final

import structlog
from aiohttp import web

from serve_common.errors import BadField
from serve_common.names import check_name
from serve_common.runtime.settings import Environment
from serve_proxy.core.problems import Problem
from serve_proxy.http.middlewares import Handler
from serve_proxy.middlewares.exchange import API_KEY_NAME, refusal, with_headers

KEYS_MAX: Final = 10_000
KEY_LENGTH_MIN: Final = 16
KEY_LENGTH_MAX: Final = 512
_DIGEST_PREFIX: Final = "sha256:"


@final
class KeyList:
    """API keys and their names.

    Why digests: neither this process' memory nor, if its owner prefers, the file contains the keys themselves.
    """

    __slots__ = ("_names", "_secret")

    def __init__(self, digests: dict[bytes, str]) -> None:
        """``digests`` maps the SHA-256 of each key to its name."""
        self._secret = secrets.token_bytes(32)
        self._names = {self._keyed_digest(digest): (digest, name) for digest, name in digests.items()}

    def __len__(self) -> int:
        return len(self._names)

    def get_name(self, key: bytes) -> str | None:
        """The name of ``key``; None when it is unknown.

        Looked up by a digest keyed with a secret of this process, so that the time to refuse a key does not depend on
        how close it is to a valid one.
        """
        if len(key) > KEY_LENGTH_MAX:
            return None
        digest = hashlib.sha256(key).digest()
        known, name = self._names.get(self._keyed_digest(digest), (b"", ""))
        return name if hmac.compare_digest(known, digest) else None

    def _keyed_digest(self, digest: bytes) -> bytes:
        return hashlib.blake2b(digest, key=self._secret, digest_size=32).digest()


def parse_keys(text: str, field: str) -> KeyList:
    """Parse a file of keys: a name and a key per line, separated by white space; ``#`` starts a comment.

    A key may be given as ``sha256:`` and 64 hexadecimal digits. One name may have several keys, so that keys can be
    rotated without downtime. Raises `BadField` naming ``field`` and the line, never a key.
    """
    digests: dict[bytes, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        tokens = line.partition("#")[0].split()
        if not tokens:
            continue
        where = f"{field}: line {number}"
        if len(tokens) != 2:
            raise BadField(where, f"has {len(tokens)} words; write a name and a key")
        digest = _digest(tokens[1], where)
        if digest in digests:
            raise BadField(where, f"has the key that {digests[digest]} has too")
        digests[digest] = check_name(tokens[0], where)
        if len(digests) > KEYS_MAX:
            raise BadField(field, f"has more than {KEYS_MAX} keys")
    if not digests:
        raise BadField(field, "has no key, so nobody could call")
    return KeyList(digests)


def _digest(key: str, where: str) -> bytes:
    if key.startswith(_DIGEST_PREFIX):
        try:
            digest = bytes.fromhex(key.removeprefix(_DIGEST_PREFIX))
        except ValueError:
            digest = b""
        if len(digest) != 32:
            raise BadField(where, f"{_DIGEST_PREFIX} must be followed by 64 hexadecimal digits")
        return digest
    if not KEY_LENGTH_MIN <= len(key) <= KEY_LENGTH_MAX:
        raise BadField(
            where, f"has a key of {len(key)} characters; {KEY_LENGTH_MIN} to {KEY_LENGTH_MAX} are needed"
        )
    return hashlib.sha256(key.encode()).digest()


_log = structlog.get_logger(__name__)

KEY_FILE_CHECK_PERIOD_S: Final = 1.0
READ_TIMEOUT_S: Final = 2.0
FILE_BYTES_MAX: Final = 8 * 1024 * 1024

_Version = tuple[int, int, int]


@final
class KeyFile:
    """The keys of a file, reloaded when it changes.

    Why at run time: a leaked key must stop working without a restart. The file is checked when a request arrives, at
    most once a second; while it cannot be read, the last keys stay valid, and that is logged.
    """

    def __init__(self, path: str, field: str) -> None:
        """Reads the file. Raises `BadField` naming ``field`` when that fails."""
        self._path = Path(path)
        self._field = field
        self._version: _Version | None = None
        self._is_reloading = False
        self._reload_at = time.monotonic() + KEY_FILE_CHECK_PERIOD_S
        self._error = ""
        try:
            self._version = self._stat()
            self._keys = self._read()
        except (OSError, UnicodeError) as error:
            raise BadField(field, f"{path} cannot be read: {error}") from error

    async def keys(self) -> KeyList:
        """The valid keys; one request per second waits until the file was checked for changes."""
        now = time.monotonic()
        if now >= self._reload_at and not self._is_reloading:
            self._reload_at = now + KEY_FILE_CHECK_PERIOD_S
            self._is_reloading = True
            reloading = asyncio.get_running_loop().run_in_executor(None, self._reload_if_changed)
            reloading.add_done_callback(self._on_reloaded)
            # The waiting request may be cancelled; the reload continues.
            _, late = await asyncio.wait([reloading], timeout=READ_TIMEOUT_S)
            if late:
                self._log_error(f"{self._path} could not be read in {READ_TIMEOUT_S:g} s")
        return self._keys

    def _reload_if_changed(self) -> None:
        try:
            version = self._stat()
            if version == self._version:
                return
            self._version = version  # an invalid file is not read again and again
            self._keys = self._read()
            self._error = ""
            _log.info("api_keys_read", keys=len(self._keys))
        except (BadField, OSError, UnicodeError) as error:
            self._log_error(str(error))

    def _on_reloaded(self, _: asyncio.Future[None]) -> None:
        self._is_reloading = False

    def _log_error(self, reason: str) -> None:
        if reason != self._error:
            self._error = reason
            _log.error("api_keys_not_read", reason=reason, effect="the keys that were read last count")

    def _stat(self) -> _Version:
        stat = self._path.stat()
        return stat.st_mtime_ns, stat.st_size, stat.st_ino

    def _read(self) -> KeyList:
        with self._path.open("rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
        if len(content) > FILE_BYTES_MAX:
            raise BadField(self._field, f"{self._path} has more than {FILE_BYTES_MAX} bytes")
        return parse_keys(content.decode(), self._field)


NAME_HEADER: Final = b"X-API-Key-Name"
_NAME: Final = NAME_HEADER.lower()
_AUTHORIZATION: Final = b"authorization"
_API_KEY: Final = b"x-api-key"
_BEARER: Final = b"bearer "
KEYS_PRESENTED_MAX: Final = 4
_CHALLENGE: Final = 'Bearer realm="muster"'


@final
class ApiKeyCheck:
    """The middleware that checks API keys."""

    def __init__(self, file: KeyFile) -> None:
        self._file = file

    async def __call__(self, request: web.BaseRequest, handler: Handler) -> web.StreamResponse:
        """Pass the request on with its key's name instead of the key, or respond 401."""
        presented = _presented_keys(request)
        if not presented:
            return _refuse(
                request, "an API key is needed: Authorization: Bearer <key>, or X-API-Key", _CHALLENGE
            )
        keys = await self._file.keys()
        known = ((header, name) for header, key in presented if (name := keys.get_name(key)) is not None)
        found = next(known, None)
        if found is None:
            return _refuse(request, "the API key is not known", f'{_CHALLENGE}, error="invalid_token"')
        header, name = found
        # A client cannot choose the name itself, and the application need not see the key.
        checked = with_headers(request, frozenset((header, _NAME)), ((NAME_HEADER, name.encode()),))
        checked[API_KEY_NAME] = name
        return await handler(checked)


def _presented_keys(request: web.BaseRequest) -> list[tuple[bytes, bytes]]:
    """Possible keys with the lower-case names of their headers. One of them may be meant for the application."""
    found: list[tuple[bytes, bytes]] = []
    for raw_name, value in request.raw_headers:
        name = raw_name.lower()
        if name == _API_KEY:
            found.append((name, value.strip()))
        elif name == _AUTHORIZATION and value[: len(_BEARER)].lower() == _BEARER:
            found.append((name, value[len(_BEARER) :].strip()))
    return found[:KEYS_PRESENTED_MAX]


def _refuse(request: web.BaseRequest, message: str, challenge: str) -> web.Response:
    headers = (("WWW-Authenticate", challenge),)
    return refusal(request, Problem(status=401, code="unauthorized", message=message, headers=headers))


_VARIABLE: Final = "MUSTER_API_KEYS_FILE"


def __getattr__(name: str) -> ApiKeyCheck:
    """Create `api_keys` on access: only then are its settings required."""
    if name != "api_keys":
        raise AttributeError(name)
    return ApiKeyCheck(KeyFile(Environment().text(_VARIABLE), _VARIABLE))

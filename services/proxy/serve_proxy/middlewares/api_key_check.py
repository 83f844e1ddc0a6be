"""API keys at a proxy's edge: who bears none that counts gets 401, and the key itself goes no further."""

from __future__ import annotations

from typing import Final, final

from aiohttp import web

from serve_proxy.adapters.middlewares import Handler
from serve_proxy.core.problems import Problem
from serve_proxy.middlewares.exchange import API_KEY_NAME, refusal, with_headers
from serve_proxy.middlewares.key_file import KeyFile

NAME_HEADER: Final = b"X-API-Key-Name"
_NAME: Final = NAME_HEADER.lower()
_AUTHORIZATION: Final = b"authorization"
_API_KEY: Final = b"x-api-key"
_BEARER: Final = b"bearer "
KEYS_PRESENTED_MAX: Final = 4
_CHALLENGE: Final = 'Bearer realm="muster"'


@final
class ApiKeyCheck:
    """A middleware."""

    def __init__(self, file: KeyFile) -> None:
        self._file = file

    async def __call__(self, request: web.BaseRequest, handler: Handler) -> web.StreamResponse:
        """Hand the request on with its key's name instead of the key, or refuse it."""
        presented = _presented_keys(request)
        if not presented:
            return _refuse(
                request, "an API key is needed: Authorization: Bearer <key>, or X-API-Key", _CHALLENGE
            )
        keys = await self._file.keys()
        known = ((header, name) for header, key in presented if (name := keys.name_of(key)) is not None)
        found = next(known, None)
        if found is None:
            return _refuse(request, "the API key is not known", f'{_CHALLENGE}, error="invalid_token"')
        header, name = found
        # A client cannot choose the name itself, and the application need not see the key.
        checked = with_headers(request, frozenset((header, _NAME)), ((NAME_HEADER, name.encode()),))
        checked[API_KEY_NAME] = name
        return await handler(checked)


def _presented_keys(request: web.BaseRequest) -> list[tuple[bytes, bytes]]:
    """What may be keys, each with the header that has it, in lower case. One of them may be the application's own."""
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

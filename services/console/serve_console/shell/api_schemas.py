"""The OpenAPI schemas that applications serve, read when a person opens a form."""

from __future__ import annotations

import asyncio
from typing import Final, final

import msgspec
import structlog

from muster.client.admin import Caller
from muster.client.requests import parse_error
from serve_common.api.views import EndpointView
from serve_common.clock import Clock
from serve_common.errors import ServeError, TransientError
from serve_console.core.openapi_forms import ApiSchema, parse_api_schema

_log = structlog.get_logger(__name__)

_SCHEMAS_MAX: Final = 50
_FRESH_S: Final = 20.0
_NONE_FRESH_S: Final = 600.0
"""Seconds until the next query of an application without a schema: it may count each as a failed request."""
_FAILED_FRESH_S: Final = 5.0
_WITHIN_S: Final = 3.0


class _Found(msgspec.Struct, frozen=True):
    schema: ApiSchema | None
    fresh_until: float


@final
class ApiSchemas:
    """Schemas by endpoint, for all sessions that may call."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._found: dict[tuple[str, str], _Found] = {}

    async def get(
        self, caller: Caller, endpoint: EndpointView, version: str, *, may_call: bool
    ) -> ApiSchema | None:
        """The schema; None where the application serves none, or does not respond within seconds.

        ``version`` changes with the application. Without ``may_call`` only what was read before is returned: a model
        that is no FastAPI application would take the query for a request. Endpoints that do not take GET are not
        called.
        """
        if "GET" not in endpoint.methods:
            return None
        key = (endpoint.endpoint_tag, version)
        found = self._found.get(key)
        if not may_call:
            return None if found is None else found.schema
        if found is None or self._clock.now() >= found.fresh_until:
            found = await self._read(caller, endpoint.endpoint_tag)
            self._found.pop(key, None)
            self._found[key] = found
            while len(self._found) > _SCHEMAS_MAX:
                del self._found[next(iter(self._found))]
        return found.schema

    async def _read(self, caller: Caller, name: str) -> _Found:
        headers = {
            "X-Serve-Method": "GET", "X-Serve-Path": "/openapi.json", "Accept": "application/json",
            "x-request-timeout-seconds": f"{_WITHIN_S:g}",
        }  # fmt: skip
        try:
            reply = await caller.exchange(name, b"", headers=headers, timeout_s=_WITHIN_S)
        except ServeError as error:
            _log.info("no_api_schema", endpoint=name, reason=str(error))
            return _Found(None, self._clock.now() + _FAILED_FRESH_S)
        failure = parse_error(reply)
        if isinstance(failure, TransientError):
            return _Found(None, self._clock.now() + _FAILED_FRESH_S)
        # In a thread, as a large schema takes a while.
        schema = None if failure is not None else await asyncio.to_thread(parse_api_schema, reply.body)
        return _Found(schema, self._clock.now() + (_NONE_FRESH_S if schema is None else _FRESH_S))

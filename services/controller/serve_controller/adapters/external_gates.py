"""Asks external gates: Prometheus, webhooks over HTTP, and responders on NATS."""

from __future__ import annotations

from typing import Final, final

import aiohttp
import msgspec
from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.errors import NoRespondersError
from yarl import URL

from serve_common.clock import Clock
from serve_common.config.external_gates import ExternalGate
from serve_common.errors import BadField
from serve_common.names import BackendTag
from serve_common.protocol.gates import RESPONSE_BYTES_MAX, GateRequest, GateResponse, decode_gate_response
from serve_common.protocol.subjects import Subjects
from serve_common.values import truncate
from serve_controller.adapters.prometheus_api import (
    PrometheusApi,
    PrometheusUnavailable,
    QueryRefused,
    with_placeholders,
)
from serve_controller.ports import GateSilent

TIMEOUT_S: Final = 8.0
WINDOW_MAX_S: Final = 300.0
_OK: Final = 200
_REASON_LENGTH_MAX: Final = 200


@final
class ExternalGates:
    """A `GateSource`."""

    def __init__(
        self, client: Client, subjects: Subjects, prometheus: PrometheusApi | None, clock: Clock
    ) -> None:
        """``prometheus`` None: queries get no answer. Does not connect yet."""
        self._client = client
        self._subjects = subjects
        self._prometheus = prometheus
        self._clock = clock
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Close connections to webhooks."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def read(self, gate: ExternalGate, request: GateRequest) -> GateResponse:
        """The answer about a step. Raises `GateSilent` with the reason where there is none."""
        try:
            if gate.promql:
                return await self._query(gate, request)
            body = msgspec.json.encode(request)
            return decode_gate_response(
                await (
                    self._post(gate.webhook, body) if gate.webhook else self._request(gate.responder, body)
                )
            )
        except BadField as error:
            raise GateSilent(str(error)) from error

    async def _query(self, gate: ExternalGate, request: GateRequest) -> GateResponse:
        if self._prometheus is None:
            raise GateSilent("this controller has no Prometheus (MUSTER_PROMETHEUS_URL)")
        window_s = min(max(request.lasted_s, gate.every_s), WINDOW_MAX_S)
        value = await self._number(gate.promql, request.canary, window_s)
        base = await self._number(gate.promql, request.baseline, window_s) if gate.has_ratio else None
        return GateResponse(value=value, baseline_value=base)

    async def _number(self, promql: str, tag: BackendTag, window_s: float) -> float:
        assert self._prometheus is not None
        try:
            return await self._prometheus.number(with_placeholders(promql, tag, window_s), self._clock.now())
        except (PrometheusUnavailable, QueryRefused) as error:
            raise GateSilent(f"{error} (for {tag})") from error

    async def _post(self, url: str, body: bytes) -> bytes:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=TIMEOUT_S), trust_env=False
            )
        shown = str(URL(url).with_user(None).with_query(None))
        try:
            async with self._session.post(
                url, data=body, headers={"Content-Type": "application/json"}, allow_redirects=False
            ) as response:
                if response.status != _OK:
                    raise GateSilent(f"{shown} answers with status {response.status}")
                data = bytearray()
                async for piece in response.content.iter_any():
                    data += piece
                    if len(data) > RESPONSE_BYTES_MAX:
                        break  # what decodes it says that it is too long
                return bytes(data)
        except TimeoutError as error:
            raise GateSilent(f"{shown} does not answer within {TIMEOUT_S:g} s") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            reason = truncate(str(error) or type(error).__name__, _REASON_LENGTH_MAX)
            raise GateSilent(f"{shown}: {reason}") from error

    async def _request(self, responder: str, body: bytes) -> bytes:
        subject = self._subjects.gate(responder)
        try:
            message = await self._client.request(subject, body, timeout=TIMEOUT_S)
        except NoRespondersError as error:
            raise GateSilent(f"nobody answers on {subject}") from error
        except (NatsError, OSError) as error:
            reason = str(error) or type(error).__name__
            raise GateSilent(f"{subject}: {truncate(reason, _REASON_LENGTH_MAX)}") from error
        return message.data

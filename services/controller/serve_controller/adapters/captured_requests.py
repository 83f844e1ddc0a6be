"""Reads captured requests from their stream by direct gets, and sends them to the proxies' gateway."""

from __future__ import annotations

import asyncio
from typing import Final

import msgspec
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.errors import NoRespondersError

from serve_common.errors import BusUnavailable
from serve_common.names import EndpointTag
from serve_common.protocol.captures import CapturedPair
from serve_common.protocol.subjects import UNREADABLE, Subjects
from serve_common.replay.captured_requests import build_replay_headers
from serve_controller.ports import CapturedRequest

_TIMEOUT_S: Final = 5.0
_SEQUENCE: Final = "Nats-Sequence"


class NatsCapturedRequests:
    """Implements `serve_controller.ports.CapturedRequests`."""

    def __init__(self, client: Client, subjects: Subjects) -> None:
        self._client = client
        self._subjects = subjects

    async def find(self, endpoint_tag: EndpointTag, sequence: int) -> CapturedRequest | None:
        """The first captured request of the endpoint at or after ``sequence``; None when there is none."""
        wanted = {"seq": sequence, "next_by_subj": self._subjects.capture(endpoint_tag)}
        subject = f"$JS.API.DIRECT.GET.{self._subjects.capture_stream}"
        try:
            reply = await self._request(subject, msgspec.json.encode(wanted), {}, _TIMEOUT_S)
        except NoRespondersError:
            return None  # there is no stream: nothing was ever captured
        number = (reply.headers or {}).get(_SEQUENCE, "")
        if not number.isdigit():
            return None
        try:
            pair = msgspec.json.decode(reply.data, type=CapturedPair)
        except UNREADABLE:
            pair = None
        return CapturedRequest(sequence=int(number), pair=pair)

    async def send(self, endpoint_tag: EndpointTag, pair: CapturedPair, timeout_s: float) -> None:
        """Send it to the endpoint as a caller would, and wait for whatever comes back."""
        try:
            await self._request(
                self._subjects.call(endpoint_tag), pair.request.body, build_replay_headers(pair), timeout_s
            )
        except NoRespondersError as error:
            raise BusUnavailable("no proxy takes calls") from error

    async def _request(self, subject: str, body: bytes, headers: dict[str, str], timeout_s: float) -> Msg:
        try:
            async with asyncio.timeout(timeout_s):
                return await self._client.request(subject, body, timeout=timeout_s, headers=headers or None)
        except NoRespondersError:
            raise
        except (NatsError, OSError, TimeoutError, ValueError) as error:
            raise BusUnavailable(f"{subject} does not answer: {error!r}") from error

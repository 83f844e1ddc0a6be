"""Reads captured requests from their stream, with direct gets: one role may do that, and no consumer is left behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec

from muster.client.requests import AdminReply, NoListeners, Requests
from serve_common.errors import ServeError
from serve_common.names import EndpointTag
from serve_common.protocol.captures import CapturedPair
from serve_common.protocol.subjects import UNREADABLE, Subjects

_TIMEOUT_S: Final = 5.0
_SEQUENCE: Final = "Nats-Sequence"
_PENDING: Final = "Nats-Num-Pending"


class _Found(NamedTuple):
    body: bytes
    sequence: int
    num_later: int
    """Captured requests of the endpoint after it."""


class CaptureReader:
    """Reads the captured requests of one endpoint."""

    def __init__(self, requests: Requests, subjects: Subjects, endpoint_tag: EndpointTag) -> None:
        self._requests = requests
        self._subject = subjects.capture(endpoint_tag)
        self._get = f"$JS.API.DIRECT.GET.{subjects.capture_stream}"
        self.unreadable = 0
        """Messages that were skipped: of another version, for instance."""

    async def read(
        self, limit: int, is_wanted: Callable[[CapturedPair], bool] = lambda _pair: True
    ) -> list[CapturedPair]:
        """The newest ``limit`` captured requests, the oldest first, as far as they are wanted.

        Empty when nothing was captured. Raises `BusAuthorizationFailed` without the permission, and `BusUnavailable`.
        """
        try:
            found = await self._find(await self._first_sequence(limit))
            pairs: list[CapturedPair] = []
            while found is not None:
                try:
                    pair = msgspec.json.decode(found.body, type=CapturedPair)
                except UNREADABLE:
                    self.unreadable += 1
                else:
                    if is_wanted(pair):
                        pairs.append(pair)
                found = await self._find(found.sequence + 1) if found.num_later else None
        except NoListeners:
            return []  # no controller has led since NATS lost its streams
        return pairs

    async def _first_sequence(self, limit: int) -> int:
        """Sequence from which on there are ``limit`` messages: by bisection, as other endpoints' lie between them."""
        first = await self._find(1)
        if first is None or first.num_later < limit:
            return 1
        last = _parse(await self._request({"last_by_subj": self._subject}))
        low, high = first.sequence, first.sequence if last is None else last.sequence
        while low < high:
            middle = (low + high) // 2
            found = await self._find(middle)
            if found is None or found.num_later < limit:
                high = middle
            else:
                low = middle + 1
        return low

    async def _find(self, sequence: int) -> _Found | None:
        """The first message of the endpoint at or after ``sequence``."""
        request = {"seq": sequence, "next_by_subj": self._subject, "batch": 1}
        return _parse(await self._request(request))

    async def _request(self, request: dict[str, object]) -> AdminReply:
        return await self._requests.request(self._get, msgspec.json.encode(request), timeout_s=_TIMEOUT_S)


def _parse(reply: AdminReply) -> _Found | None:
    sequence = reply.headers.get(_SEQUENCE)
    if sequence is None:
        return None  # NATS found none
    if not sequence.isdigit() or not reply.headers.get(_PENDING, "0").isdigit():
        raise ServeError(f"NATS gave a sequence that is no number: {sequence[:40]!r}")
    return _Found(reply.body, int(sequence), int(reply.headers.get(_PENDING, "0")))

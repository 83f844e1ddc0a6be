"""What a router says that it has received over the bus, and when it gives up a link that brings nothing."""

from __future__ import annotations

import asyncio

import pytest

from serve_common.dispatch import receipts
from serve_common.protocol.frames import (
    BodyHead,
    CancelHead,
    ReceivedHead,
    encode_frame,
)
from tests.support.proxy_world import World

PIECE = bytes(256 * 1024)
EIGHT = [BodyHead(number, False) for number in range(1, 9)]
"""Two MiB, which are reported twice."""


def size_of(*heads: BodyHead) -> int:
    return sum(len(encode_frame(head, PIECE)) for head in heads)


def take_totals(world: World) -> list[int]:
    """What the replica was told since the last call."""
    totals = [head.total_bytes for _, _, head, _ in world.bus.sent if isinstance(head, ReceivedHead)]
    world.bus.sent.clear()
    return totals


async def test_what_comes_is_told_to_its_replica_now_and_then() -> None:
    world = World(limit=10)
    reply, _, _ = await world.stream()
    for head in EIGHT:
        world.answer(reply, head, PIECE)
    assert take_totals(world) == [size_of(*EIGHT[:4]), size_of(*EIGHT)]


async def test_what_comes_after_a_cancel_is_counted_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receipts, "_LATE_MAX", 1)
    world = World(limit=10)
    streams = [await world.stream() for _ in range(2)]
    for reply, call, _ in streams:
        world.dispatcher.abandon(call)
        assert world.take(CancelHead)[1] == reply
    for head in EIGHT[:4]:
        for reply, _, _ in streams:
            world.answer(reply, head, PIECE)
    assert take_totals(world) == [size_of(*EIGHT[:4])], "the second is one too many"

    world.bus.receivers[b"1"][0](encode_frame(EIGHT[0], PIECE * 16), b".", None)  # over a link
    assert take_totals(world) == []

    world.now += receipts._LATE_S + 1
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not world.outgoing.receipts.late
    assert not world.bus.receivers


class SilentLink:
    """A link that takes everything, and brings nothing."""

    def __init__(self, now: float) -> None:
        self.last_received_at = now
        self.sent = 0
        self.is_closed = False

    def send(self, *_: object, **__: object) -> bool:
        self.sent += 1
        return True

    def close(self) -> None:
        self.is_closed = True


async def test_a_link_that_stands_still_in_spite_of_probes_is_ended() -> None:
    world = World(limit=10)
    await world.ask()
    (call,) = world.dispatcher.calls.values()
    link = SilentLink(world.now)
    assert call.attempt is not None
    call.attempt.link, call.attempt.reply = link, b"_INBOX.p." + b"0" * 16  # type: ignore[assignment]
    for _ in range(8):
        world.now += 1
        world.outgoing.probe(call)
    assert (link.sent, link.is_closed) == (8, False)
    world.now += 1
    world.outgoing.probe(call)
    assert (link.sent, link.is_closed) == (8, True)

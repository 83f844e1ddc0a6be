"""The two ends of a stream over wires that lose, double and reorder frames: everything arrives, once and in order.

The wires are those of a data plane whose connections are cut: what was on its way is lost, in either direction. Credit
comes late, twice or never. Only what the ends ask of each other (`received`, `limit`) brings them together again.
"""

from __future__ import annotations

import random
from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st

from serve_common.dispatch.request_body import RequestBody, UploadMemory
from serve_common.protocol.frames import (
    FRAME_BODY_BYTES_MAX,
    BodyHead,
    CloseHead,
    CreditHead,
    MessageHead,
)
from serve_common.protocol.streams import (
    BodyPieces,
    FrameSource,
    IncomingStream,
    MessageQueue,
    OutgoingStream,
    RetainedBytes,
    SequenceCheck,
    StreamFrame,
    WholeBody,
)

WINDOWS = st.integers(1, 20)


class Pair:
    """A sender and a receiver, and the wires between them."""

    def __init__(
        self, source: FrameSource[bytes | memoryview], window: int, first: int, chance: random.Random
    ) -> None:
        self.chance = chance
        self.out = OutgoingStream(source, window, first=first)
        self.into = IncomingStream(window, first=first)
        self.window = window
        self.there: deque[StreamFrame] = deque()
        self.back: deque[CreditHead] = deque()
        self.received: list[StreamFrame] = []
        self.unprocessed = 1 - first
        self.is_closed, self.end = False, 0
        if not first:
            opening = self.out.opening()
            self.received.append((BodyHead(0, self.out.is_ended), opening))

    def send(self) -> None:
        """The sender sends what it may."""
        while self.chance.random() < 0.8 and (frame := self.out.next_frame()) is not None:
            self.there.append(frame)
        assert self.out.sent <= self.into.limit + 1, "beyond what the receiver allows"

    def arrive(self) -> None:
        """Some frames arrive; a few are doubled or overtaken."""
        while self.there and self.chance.random() < 0.8:
            if len(self.there) > 1 and self.chance.random() < 0.1:
                self.there.rotate(-1)
            frame = self.there[0] if self.chance.random() < 0.1 else self.there.popleft()
            self.take(frame)

    def take(self, frame: StreamFrame) -> None:
        head = frame[0]
        if isinstance(head, CloseHead):
            if head.sequence == self.into.next_sequence and not self.is_closed:
                self.is_closed = True
                self.end = head.sequence + 1
                self.received.append(frame)
            return
        order = self.into.take(head.sequence)
        assert order is not SequenceCheck.TOO_MANY
        if order is SequenceCheck.NEXT:
            self.received.append(frame)
            self.unprocessed += 1

    def process(self) -> None:
        frames = self.chance.randrange(self.unprocessed + 1)
        self.unprocessed -= frames
        if self.into.process(frames):
            self.back.append(self.into.credit())

    def credit(self) -> None:
        while self.back and self.chance.random() < 0.8:
            credit = self.back[0] if self.chance.random() < 0.1 else self.back.popleft()
            self.out.allow(credit.frames, credit.limit)

    def cut(self) -> None:
        """Everything on its way is lost, and later the ends say how far they are."""
        self.there.clear()
        self.back.clear()
        if self.chance.random() < 0.3:
            self.out.pause()
        if self.chance.random() < 0.5:
            self.tell()

    def tell(self) -> None:
        assert self.out.resume(self.into.next_sequence), "what was not processed is held"
        self.out.allow(0, self.into.limit)

    def finish(self) -> None:
        """No more faults: everything arrives."""
        for _ in range(10_000):
            if self.out.is_sent and not self.there and self.unprocessed == 0 and self.is_whole:
                break
            self.tell()
            while (frame := self.out.next_frame()) is not None:
                self.there.append(frame)
            while self.there:
                self.take(self.there.popleft())
            self.into.process(self.unprocessed)
            self.unprocessed = 0
        acknowledgement = self.into.acknowledge(self.end)
        self.out.allow(acknowledgement.frames, acknowledgement.limit)

    @property
    def is_whole(self) -> bool:
        head = self.received[-1][0] if self.received else None
        return self.is_closed or (isinstance(head, BodyHead) and head.last)

    def run(self, steps: int, write: object) -> None:
        moves = [self.send, self.arrive, self.process, self.credit, self.cut, self.tell, write]
        for _ in range(steps):
            move = self.chance.choices(moves, [6, 6, 4, 4, 1, 1, 4])[0]
            move()  # type: ignore[operator] - all of them are functions


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 2**32), WINDOWS, st.integers(0, 12 * FRAME_BODY_BYTES_MAX))
def test_a_whole_body_arrives_over_any_cuts(seed: int, window: int, size: int) -> None:
    body = random.Random(seed).randbytes(64) * (size // 64 + 1)
    pair = Pair(WholeBody(body), window, 0, random.Random(seed))
    pair.run(40, lambda: None)
    pair.finish()
    assert b"".join(bytes(piece) for _, piece in pair.received) == body
    assert pair.out.is_acknowledged


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 2**32), WINDOWS)
def test_a_written_body_arrives_over_any_cuts_and_nothing_is_held_then(seed: int, window: int) -> None:
    chance, held = random.Random(seed), RetainedBytes()
    pieces, written = BodyPieces(held), bytearray()
    pair = Pair(pieces, window, 0, chance)

    def write() -> None:
        data = chance.randbytes(chance.choice([0, 1, 10, 1000, FRAME_BODY_BYTES_MAX + 7]))
        written.extend(data)
        pieces.add(data, last=False)

    pair.run(60, write)
    pieces.add(b"", last=True)
    pair.finish()
    assert b"".join(bytes(piece) for _, piece in pair.received) == written
    assert held.retained_bytes == 0


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 2**32), WINDOWS)
def test_an_upload_arrives_over_any_cuts(seed: int, window: int) -> None:
    chance, memory = random.Random(seed), UploadMemory()
    first = chance.randbytes(10)
    body, written = RequestBody(first, memory), bytearray(first)
    pair = Pair(body, window, 0, chance)

    def write() -> None:
        data = chance.randbytes(chance.choice([1, 10, FRAME_BODY_BYTES_MAX - 3, 3 * FRAME_BODY_BYTES_MAX]))
        written.extend(data)
        body.add(data)

    pair.run(60, write)
    body.end()
    pair.finish()
    assert b"".join(bytes(piece) for _, piece in pair.received) == written
    body.close()
    assert memory.buffered_bytes == 0


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 2**32), WINDOWS)
def test_messages_arrive_once_and_whole_and_the_close_comes_last(seed: int, window: int) -> None:
    chance, held = random.Random(seed), RetainedBytes()
    messages = MessageQueue(held)
    written: list[tuple[bytes, bool]] = []
    pair = Pair(messages, window, 1, chance)

    def write() -> None:
        data = chance.randbytes(chance.choice([0, 1, 100, FRAME_BODY_BYTES_MAX + 1]))
        written.append((data, chance.random() < 0.5))
        messages.add(data, is_text=written[-1][1])

    pair.run(60, write)
    messages.close_socket(1000, "bye")
    pair.finish()
    *frames, (close, _) = pair.received
    assert isinstance(close, CloseHead)
    whole: list[tuple[bytes, bool]] = []
    partial = b""
    for head, piece in frames:
        assert isinstance(head, MessageHead)
        partial += piece
        if head.last:
            whole.append((partial, head.is_text))
            partial = b""
    assert whole == written
    assert pair.out.is_acknowledged
    assert held.retained_bytes == 0


def test_beyond_its_budget_a_stream_sends_on_and_says_that_it_cannot_send_again() -> None:
    held = RetainedBytes(bytes_max=3 * FRAME_BODY_BYTES_MAX)
    pieces = BodyPieces(held)
    stream = OutgoingStream(pieces, 24)
    stream.opening()
    for _ in range(10):
        pieces.add(bytes(FRAME_BODY_BYTES_MAX), last=False)
    while stream.next_frame() is not None:
        pass
    assert stream.sent == 11
    assert held.retained_bytes <= held.bytes_max + FRAME_BODY_BYTES_MAX
    assert not stream.resume(2)
    assert stream.resume(pieces.first)
    pieces.close()
    assert held.retained_bytes == 0


def test_a_peer_that_gives_no_number_is_counted_as_before() -> None:
    stream = OutgoingStream(WholeBody(bytes(30 * FRAME_BODY_BYTES_MAX)), 4)
    stream.opening()
    sent = []
    for frames in (0, 2, -5, 1):
        stream.allow(frames)
        while (frame := stream.next_frame()) is not None:
            sent.append(frame[0])
    assert [head.sequence for head in sent if isinstance(head, BodyHead)] == [
        1,
        2,
        3,
        4,
    ]  # half of what is allowed, as they are large

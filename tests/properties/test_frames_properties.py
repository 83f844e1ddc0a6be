"""The codec of the data plane: what goes in comes out, and rubbish is refused cleanly."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_common.protocol.frames import (
    FRAME_BODY_BYTES_MAX,
    HEAD_BYTES_MAX,
    UNKNOWN_BYTES,
    AliveHead,
    BodyHead,
    CallHead,
    CancelHead,
    CloseHead,
    CreditHead,
    ErrorHead,
    FrameUnreadable,
    MessageHead,
    ProbeHead,
    RefusedHead,
    RequestHead,
    RequestKind,
    ResponseHead,
    decode_frame,
    encode_frame,
    split_body,
)

text = st.text(st.characters(codec="utf-8"), max_size=40)
raw = st.binary(max_size=40)
headers = st.lists(st.tuples(raw, raw), max_size=5)
counts = st.integers(0, 2**40)
statuses = st.integers(100, 999)
heads = st.one_of(
    st.builds(
        RequestHead,
        kind=st.sampled_from(RequestKind),
        method=text,
        path=text,
        route=text,
        query=text,
        headers=headers,
        timeout_s=st.floats(0, 1e6),
        body_bytes=counts | st.just(UNKNOWN_BYTES),
        endpoint_tag=text,
        request_id=text,
        traceparent=text,
        client=text,
        scheme=text,
        call=st.none() | st.builds(CallHead, method_name=text, model_id=text, stream=st.booleans()),
    ),
    st.builds(BodyHead, sequence=counts, last=st.booleans()),
    st.builds(CreditHead, frames=counts),
    st.just(AliveHead()),
    st.just(CancelHead()),
    st.just(ProbeHead()),
    st.builds(ResponseHead, status=statuses, headers=headers, last=st.booleans(), in_flight=counts),
    st.builds(RefusedHead, reason=text, in_flight=counts),
    st.builds(MessageHead, sequence=counts, is_text=st.booleans(), last=st.booleans()),
    st.builds(CloseHead, code=st.integers(0, 65_535), reason=text),
    st.builds(ErrorHead, error_code=text, status=statuses, message=text, in_flight=counts),
)


@given(heads, st.binary(max_size=200))
def test_what_is_encoded_is_decoded(head, body) -> None:
    decoded, rest = decode_frame(encode_frame(head, body))
    assert decoded == head
    assert type(decoded) is type(head)
    assert bytes(rest) == body


@given(st.binary(max_size=300))
def test_any_bytes_are_a_frame_or_refused(data) -> None:
    refused: FrameUnreadable | None = None
    try:
        head, body = decode_frame(data)
        encoded = encode_frame(head, body)
        assert encode_frame(*decode_frame(encoded)) == encoded
    except FrameUnreadable as error:
        refused = error
    assert refused is None or str(refused)


@given(heads, st.binary(max_size=50), st.data())
def test_a_cut_or_damaged_frame_is_a_frame_or_refused(head, body, data) -> None:
    frame = bytearray(encode_frame(head, body))
    at = data.draw(st.integers(0, len(frame) - 1))
    frame[at] ^= data.draw(st.integers(1, 255))
    cut = data.draw(st.integers(0, len(frame)))
    for damaged in (bytes(frame), bytes(frame[:cut])):
        with contextlib.suppress(FrameUnreadable):  # and nothing else
            decode_frame(damaged)


@pytest.mark.parametrize(
    "size",
    [
        0,
        1,
        FRAME_BODY_BYTES_MAX - 1,
        FRAME_BODY_BYTES_MAX,
        FRAME_BODY_BYTES_MAX + 1,
        3 * FRAME_BODY_BYTES_MAX,
    ],
)
def test_the_pieces_of_a_body_make_the_body(size: int) -> None:
    body = bytes(i % 251 for i in range(size))
    pieces = split_body(body)
    assert b"".join(pieces) == body
    assert all(len(piece) <= FRAME_BODY_BYTES_MAX for piece in pieces)
    assert len(pieces) == max(1, -(-size // FRAME_BODY_BYTES_MAX))


def test_a_head_that_is_too_large_is_refused_when_it_is_made() -> None:
    with pytest.raises(FrameUnreadable, match="headers too large"):
        encode_frame(ErrorHead("x", 500, "m" * (HEAD_BYTES_MAX + 1), 0))

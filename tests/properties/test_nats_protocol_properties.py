from __future__ import annotations

import contextlib
import itertools

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from serve_common.nats.options import NatsProtocolError
from serve_common.nats.protocol import (
    Greeting,
    Message,
    Parser,
    ServerError,
    ServerOp,
    Signal,
    encode_headers,
    encode_hpub_line,
    encode_pub_line,
    parse_headers,
)

_tokens = st.text("abz019-_", min_size=1, max_size=6)
_subjects = st.lists(_tokens, min_size=1, max_size=4).map(lambda tokens: ".".join(tokens).encode())
_bodies = st.binary(max_size=40) | st.sampled_from([b"\r\n", b"\r", b"\n", b"PING\r\n", b"x" * 5000])
_messages = st.builds(
    Message,
    subject=_subjects,
    sid=st.integers(0, 10**9),
    reply=st.just(b"") | _subjects,
    payload=_bodies,
    headers=st.none() | _bodies,
)
_ops = st.one_of(
    _messages,
    st.sampled_from(Signal),
    st.builds(
        ServerError, st.sampled_from(["Stale Connection", 'Permissions Violation for Publish to "a.b"'])
    ),
    st.builds(
        Greeting, server_id=st.text(max_size=20), max_payload=st.integers(0, 2**26), lame_duck=st.booleans()
    ),
)


def _as_the_server_writes(op: ServerOp) -> bytes:
    match op:
        case Message(subject, sid, reply, payload, None):
            return b" ".join(filter(None, (b"MSG", subject, b"%d" % sid, reply, b"%d" % len(payload)))) + (
                b"\r\n" + payload + b"\r\n"
            )
        case Message(subject, sid, reply, payload, bytes() as headers):
            sizes = b"%d %d" % (len(headers), len(headers) + len(payload))
            return b" ".join(filter(None, (b"HMSG", subject, b"%d" % sid, reply, sizes))) + (
                b"\r\n" + headers + payload + b"\r\n"
            )
        case ServerError(text):
            return b"-ERR '" + text.encode() + b"'\r\n"
        case Signal():
            return op.value.encode() + b"\r\n"
        case Greeting():
            return b"INFO " + msgspec.json.encode(op) + b"\r\n"
        case _:
            raise AssertionError(op)


def _pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[begin:end] for begin, end in itertools.pairwise(edges)]


@given(st.lists(_ops, max_size=6), st.lists(st.integers(0, 10**6), max_size=12))
def test_what_the_server_writes_is_read_however_it_is_cut(ops: list[ServerOp], cuts: list[int]) -> None:
    data = b"".join(map(_as_the_server_writes, ops))
    parser = Parser()
    assert [op for piece in _pieces(data, cuts) for op in parser.feed(piece)] == ops


@given(st.lists(_ops, min_size=1, max_size=3).filter(lambda ops: all(len(str(op)) < 3000 for op in ops)))
def test_one_byte_at_a_time_gives_the_same_values(ops: list[ServerOp]) -> None:
    data = b"".join(map(_as_the_server_writes, ops))
    parser = Parser()
    assert [op for at in range(len(data)) for op in parser.feed(data[at : at + 1])] == ops


_noise = st.lists(
    st.binary(max_size=12)
    | st.sampled_from(
        [b"MSG ", b"HMSG ", b"INFO ", b"-ERR ", b"PING", b"\r\n", b" ", b"s 1 ", b"3", b"12", b"{}"]
    ),
    max_size=20,
).map(b"".join)


@given(_noise, st.lists(st.integers(0, 10**6), max_size=6))
def test_noise_ends_in_the_same_values_or_in_an_error_however_it_is_cut(data: bytes, cuts: list[int]) -> None:
    def outcome(pieces: list[bytes]) -> tuple[list[ServerOp], bool]:
        parser, ops = Parser(payload_bytes_max=64), list[ServerOp]()
        for piece in pieces:
            try:
                ops += parser.feed(piece)
            except NatsProtocolError:
                return ops, True
        return ops, False

    whole_ops, whole_failed = outcome([data])
    cut_ops, cut_failed = outcome(_pieces(data, cuts))
    assert whole_failed == cut_failed
    if not whole_failed:
        assert whole_ops == cut_ops


@given(_messages)
def test_a_published_message_comes_back_as_it_was_when_the_server_repeats_it(message: Message) -> None:
    if message.headers is None:
        line = encode_pub_line(message.subject, message.reply, len(message.payload))
    else:
        line = encode_hpub_line(message.subject, message.reply, len(message.headers), len(message.payload))
    verb, subject, rest = line.split(b" ", 2)
    as_sent = (verb.replace(b"PUB", b"MSG"), subject, b"%d" % message.sid, rest)
    [back] = Parser().feed(b" ".join(as_sent) + (message.headers or b"") + message.payload + b"\r\n")
    assert back == message


_header_values = st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]))


@given(st.lists(st.tuples(_tokens, _header_values.map(lambda value: value.strip(" "))), max_size=5))
def test_headers_come_back_as_they_were(headers: list[tuple[str, str]]) -> None:
    assert parse_headers(encode_headers(headers)) == headers


@given(st.binary(max_size=60).map(lambda noise: b"NATS/1.0" + noise))
def test_reading_any_header_block_ends_in_headers_or_a_protocol_error(block: bytes) -> None:
    with contextlib.suppress(NatsProtocolError):
        parse_headers(block)

"""None"""

from __future__ import annotations

import contextlib
import itertools
import random
import re

import msgspec
import pytest
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
        Greeting, nonce=st.text(max_size=20), max_payload=st.integers(0, 2**26), lame_duck=st.booleans()
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


# The parser beside a slow one that does the same in the plainest way, on streams that were damaged at random.
#
# Why: the parser is written for speed; whatever it does to be quick, it must take and refuse what the plain one does.


_SEEDS = 40
_STREAMS_PER_SEED = 100
_LIMIT = 200
_MSG = re.compile(rb"MSG ([^ ]*) (\d{1,19}) (?:([^ ]*) )?(\d{1,19})")
_HMSG = re.compile(rb"HMSG ([^ ]*) (\d{1,19}) (?:([^ ]*) )?(\d{1,19}) (\d{1,19})")
_SIGNALS = {b"PING": Signal.PING, b"PONG": Signal.PONG, b"+OK": Signal.OK}


class Refused(Exception):
    """The plain reader takes no more."""


def plainly_read(data: bytes) -> list[ServerOp]:
    """All whole values at the beginning of ``data``; raises `Refused` where it is not what a server writes."""
    ops: list[ServerOp] = []
    while b"\r\n" in data:
        line, _, rest = data.partition(b"\r\n")
        if line in _SIGNALS:
            ops.append(_SIGNALS[line])
        elif line.startswith(b"-ERR "):
            ops.append(ServerError(line[5:].decode("utf-8", "replace").strip().strip("'")))
        elif line == b"-ERR":
            ops.append(ServerError(""))
        elif found := _MSG.fullmatch(line):
            subject, sid, reply, size = found.groups()
            total = int(size)
            if total > _LIMIT:
                raise Refused
            if len(rest) < total + 2:
                return ops
            if rest[total : total + 2] != b"\r\n":
                raise Refused
            ops.append(Message(subject, int(sid), reply or b"", rest[:total]))
            rest = rest[total + 2 :]
        elif found := _HMSG.fullmatch(line):
            subject, sid, reply, headers_size, size = found.groups()
            split, total = int(headers_size), int(size)
            if split > total or total > _LIMIT:
                raise Refused
            if len(rest) < total + 2:
                return ops
            if rest[total : total + 2] != b"\r\n":
                raise Refused
            ops.append(Message(subject, int(sid), reply or b"", rest[split:total], rest[:split]))
            rest = rest[total + 2 :]
        else:
            raise Refused
        data = rest
    return ops


def some_stream(chance: random.Random) -> bytes:
    parts = []
    for _ in range(chance.randrange(1, 5)):
        body = chance.choice(
            [b"", b"hello", b"\r\n", b"PING\r\n", b"x\n", chance.randbytes(chance.randrange(150))]
        )
        reply = chance.choice([b"", b"_INBOX.a.1 "])
        headers = b"NATS/1.0\r\na: b\r\n\r\n"
        sid = chance.choice([1, 7, 2047, 2048, 123456789])
        parts.append(
            chance.choice(
                [
                    b"PING\r\n",
                    b"+OK\r\n",
                    b"-ERR 'Slow Consumer'\r\n",
                    b"MSG t.a %d %b%d\r\n%b\r\n" % (sid, reply, len(body), body),
                    b"HMSG t.a %d %b%d %d\r\n%b%b\r\n"
                    % (sid, reply, len(headers), len(headers) + len(body), headers, body),
                ]
            )
        )
    return b"".join(parts)


def damaged(stream: bytes, chance: random.Random) -> bytes:
    """A few bytes changed, dropped, doubled or put in; what is likely to matter more often than the rest."""
    data = bytearray(stream)
    for _ in range(chance.randrange(4)):
        at = chance.randrange(len(data) + 1)
        match chance.randrange(4):
            case 0 if at < len(data):
                data[at] = chance.choice(b"\r\n 0129-+_.xM\x00\xff")
            case 1 if at < len(data):
                del data[at : at + chance.randrange(1, 4)]
            case 2:
                data[at:at] = data[at : at + chance.randrange(20)]
            case _:
                data[at:at] = chance.choice([b"\r", b"\n", b"\r\n", b" ", b"0", b"99", chance.randbytes(3)])
    return bytes(data)


@pytest.mark.parametrize("seed", range(_SEEDS))
def test_damaged_streams_are_taken_and_refused_as_by_the_plain_reader_however_they_are_cut(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(_STREAMS_PER_SEED):
        stream = damaged(some_stream(chance), chance)
        if b"INFO" in stream:
            continue
        try:
            expected, is_refused = plainly_read(stream), False
        except Refused:
            expected, is_refused = [], True
        parser = Parser(payload_bytes_max=_LIMIT)
        ops: list[ServerOp] = []
        try:
            at = 0
            while at < len(stream):
                step = chance.choice([1, 2, 7, 1000])
                ops += parser.feed(stream[at : at + step])
                at += step
                assert parser._partial_bytes <= len(stream) + 1
        except NatsProtocolError:
            assert is_refused, stream
        else:
            assert not is_refused, stream
            assert ops == expected, stream

"""The parser beside a slow one that does the same in the plainest way, on streams that were damaged at random.

Why: the parser is written for speed; whatever it does to be quick, it must take and refuse what the plain one does.
"""

from __future__ import annotations

import random
import re

import pytest

from serve_common.nats.options import NatsProtocolError
from serve_common.nats.protocol import Message, Parser, ServerError, ServerOp, Signal

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
                assert parser._kept_bytes <= len(stream) + 1
        except NatsProtocolError:
            assert is_refused, stream
        else:
            assert not is_refused, stream
            assert ops == expected, stream

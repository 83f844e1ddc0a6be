"""Which headers go through a proxy and which end at it; and who observes a request."""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import IntEnum
from functools import lru_cache
from typing import Final, NamedTuple, Protocol

import msgspec

from serve_common.dispatch.calls import RequestSpec
from serve_common.protocol.frames import Headers
from serve_common.telemetry.request_traces import RequestObserver
from serve_proxy.core.problems import Problem


class ObservedRequest(RequestObserver, Protocol):
    """One request from its arrival to its end."""

    def asks(self, ask: RequestSpec) -> None:
        """Its endpoint was found, and this is what is asked of it."""
        ...

    def ended(self, status: int, problem: Problem | None = None, sent_bytes: int = 0) -> None:
        """It has ended with this status, which is that of the ``problem`` if this process has failed it.

        ``sent_bytes`` are those of a body that was here as a whole. Does nothing when it had ended.
        """
        ...


class ReceivedBody(Protocol):
    """The body of a request, as it arrives."""

    total_bytes: int
    """So far."""


REQUEST_ID: Final = "X-Request-ID"
REQUEST_ID_LENGTH_MAX: Final = 128

_ENDS_HERE: Final = frozenset(
    name.encode()
    for name in (
        "connection",
        "expect",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    )
)
"""About one connection only (RFC 9110, 7.6.1), and `Expect`, which the proxy answers itself."""
_NOT_TO_BE_NAMED: Final = frozenset({b"host", b"content-length", b"authorization", b"cookie"})
"""What is about the whole way however a client's `Connection` names it: leaving it out would change the request."""
_OURS: Final = _ENDS_HERE | {b"content-length", b"x-request-id", b"date", b"server"}


class _Sign(IntEnum):
    """What a header means to the proxy."""

    NOTHING = 0
    ENDS_HERE = 1
    CODING = 2
    CONNECTION = 3
    REQUEST_ID = 4
    UPGRADE = 5
    TRACEPARENT = 6
    IDEMPOTENCY_KEY = 7
    HOST = 8
    MODEL_ID = 9
    SHARD_KEY = 10
    RELATIVE_SLO = 11
    ABSOLUTE_SLO = 12
    TIMEOUT = 13
    FORWARDED_FOR = 14
    FORWARDED_PROTO = 15
    FORWARDED_HOST = 16
    FORWARDED = 17
    """Something else that proxies in front tell of the client."""
    AMBIGUOUS = 18
    """Its name has an underscore: to whoever reads headers as CGI and WSGI do, it is that of another header."""


RELATIVE_SLO: Final = "X-Serve-Relative-SLO-MS"
ABSOLUTE_SLO: Final = "X-Serve-Absolute-SLO-MS"
TIMEOUT: Final = "x-request-timeout-seconds"
"""As Ray Serve has it."""
MODEL_ID: Final = "serve_multiplexed_model_id"
"""As Ray Serve has it."""
SHARD_KEY: Final = "x-serve-shard-key"
"""The name that endpoints look for unless they are told another."""

_SIGNS: Final = dict.fromkeys(_ENDS_HERE, _Sign.ENDS_HERE) | {
    b"transfer-encoding": _Sign.CODING,
    b"connection": _Sign.CONNECTION,
    b"x-request-id": _Sign.REQUEST_ID,
    b"upgrade": _Sign.UPGRADE,
    b"traceparent": _Sign.TRACEPARENT,
    b"idempotency-key": _Sign.IDEMPOTENCY_KEY,
    b"host": _Sign.HOST,
    b"forwarded": _Sign.FORWARDED,
    b"x-real-ip": _Sign.FORWARDED,
    b"x-forwarded-for": _Sign.FORWARDED_FOR,
    b"x-forwarded-proto": _Sign.FORWARDED_PROTO,
    b"x-forwarded-host": _Sign.FORWARDED_HOST,
    MODEL_ID.encode(): _Sign.MODEL_ID,
    SHARD_KEY.encode(): _Sign.SHARD_KEY,
    RELATIVE_SLO.lower().encode(): _Sign.RELATIVE_SLO,
    ABSOLUTE_SLO.lower().encode(): _Sign.ABSOLUTE_SLO,
    TIMEOUT.encode(): _Sign.TIMEOUT,
}
_HOST: Final = _Sign.HOST
_CONNECTION: Final = _Sign.CONNECTION
_FORWARDED_FOR: Final = _Sign.FORWARDED_FOR
_AMBIGUOUS: Final = _Sign.AMBIGUOUS
_LAST_THAT_STAYS: Final = _Sign.UPGRADE
"""Up to here a header is not passed on as it is."""
_FORWARDED_PREFIX: Final = b"x-forwarded-"
_ALL_HOPS: Final = 1_000_000


@lru_cache(maxsize=1024)
def _read_name(raw_name: bytes) -> tuple[bytes, _Sign]:
    """The name in lower case, and what it means to the proxy; the same few names come again and again."""
    name = raw_name.lower()
    sign = _SIGNS.get(name)
    if sign is None:
        if b"_" in name:
            sign = _Sign.AMBIGUOUS
        else:
            sign = _Sign.FORWARDED if name.startswith(_FORWARDED_PREFIX) else _Sign.NOTHING
    return name, sign


class RequestHeaders(msgspec.Struct, gc=False):
    """What a request's headers say to the proxy, and what goes on to the replica. Values are as they were sent."""

    forwarded: Headers
    request_id: str = ""
    """As the client sent it when that is usable; otherwise empty."""
    traceparent: str = ""
    follower: ObservedRequest | None = None
    """Set by whoever decides that the request is followed."""
    has_idempotency_key: bool = False
    host: bytes = b""
    forwarded_for: bytes = b""
    """What trusted hops said in ``X-Forwarded-For``, joined. It is not in `forwarded`: this proxy adds to it."""
    forwarded_proto: bytes = b""
    has_forwarded_host: bool = False
    model_id: bytes = b""
    shard_key: bytes = b""
    """Of the header that has the default name."""
    has_slo: bool = False
    """One of the next three is there."""
    relative_slo_ms: bytes | None = None
    absolute_slo_ms: bytes | None = None
    timeout_s: bytes | None = None
    upgrade: bytes = b""
    has_coding: bool = False
    """There is a ``Transfer-Encoding``, whatever it says."""


def read_request_headers(raw: Iterable[tuple[bytes, bytes]], forwarded_hops: int = 0) -> RequestHeaders:
    """Sort out the headers of a request, as a client sent them.

    ``forwarded_hops`` proxies in front of this one are trusted to have added the address that they saw to
    ``X-Forwarded-For``: more of it is not believed, and with none of them nothing at all that tells of the client.
    """
    return _read(raw, forwarded_hops, is_checked=False)


def read_checked_headers(raw: Iterable[tuple[bytes, bytes]]) -> RequestHeaders:
    """As `read_request_headers`, of `checked_headers` to which middlewares may have added what they like."""
    return _read(raw, _ALL_HOPS, is_checked=True)


def _read(raw: Iterable[tuple[bytes, bytes]], forwarded_hops: int, *, is_checked: bool) -> RequestHeaders:
    forwarded: Headers = []
    read = RequestHeaders(forwarded)
    connection = b""
    for raw_name, raw_value in raw:
        name, sign = _read_name(raw_name)
        if sign:
            if sign is _HOST:
                read.host = raw_value
            elif sign is _CONNECTION:
                connection += b"," + raw_value
            elif sign >= _FORWARDED_FOR:
                if not (is_checked if sign is _AMBIGUOUS else forwarded_hops):
                    continue
                _note(read, sign, raw_value)
            else:
                _note(read, sign, raw_value)
            if sign <= _LAST_THAT_STAYS or sign is _FORWARDED_FOR:
                continue
        forwarded.append((name, raw_value))
    if connection and not is_checked and connection.lower() not in (b",keep-alive", b",close"):
        named = _named(connection)
        read.forwarded = [(name, value) for name, value in forwarded if name not in named]
    if read.forwarded_for and not is_checked:
        read.forwarded_for = _last_hops(read.forwarded_for, forwarded_hops)
    return read


def _named(connection: bytes) -> set[bytes]:
    """The headers that are about one connection because a client's `Connection` says so."""
    named = {token.strip().lower() for token in connection.split(b",")} - _NOT_TO_BE_NAMED
    return {name for name in named if _read_name(name)[1] < _FORWARDED_FOR}


def _last_hops(forwarded_for: bytes, forwarded_hops: int) -> bytes:
    """Of what stands left of the trusted ones, the client wrote everything; empty when not all of them are there."""
    hops = [hop for part in forwarded_for.split(b",") if (hop := part.strip())]
    return b", ".join(hops[-forwarded_hops:]) if len(hops) >= forwarded_hops else b""


def checked_headers(
    raw: Iterable[tuple[bytes, bytes]], forwarded_hops: int
) -> tuple[tuple[bytes, bytes], ...]:
    """The headers of a request for middlewares, as they came: without what `read_request_headers` would not believe.

    What they add is theirs then, and no `Connection` of the client takes it away. The library still finds `Connection`
    and its like there.
    """
    raw = tuple(raw)
    connection = b",".join(value for name, value in raw if name.lower() == b"connection")
    named = _named(connection) if connection else set()
    kept: list[tuple[bytes, bytes]] = []
    told: list[bytes] = []
    for raw_name, value in raw:
        name, sign = _read_name(raw_name)
        if sign is _AMBIGUOUS or (sign >= _FORWARDED_FOR and not forwarded_hops):
            continue
        if sign is _FORWARDED_FOR:
            told.append(value)
        elif name not in named or name in _ENDS_HERE:
            kept.append((raw_name, value))
    if told and (hops := _last_hops(b",".join(told), forwarded_hops)):
        kept.append((b"X-Forwarded-For", hops))
    return tuple(kept)


def use_host(read: RequestHeaders, host: bytes) -> None:
    """Put what the target names in the place of `Host`, which then counts for nothing (RFC 9112, 3.2.2)."""
    read.host = host
    read.forwarded = [(b"host", host), *(header for header in read.forwarded if header[0] != b"host")]


_HOST_FORM: Final = re.compile(
    rb"(?:[A-Za-z0-9\-._~!$&'()*+,;=%]*|\[[A-Za-z0-9\-._~!$&'()*+,;=%:]+\])(?::[0-9]*)?"
)


@lru_cache(maxsize=1024)
def is_host(value: bytes) -> bool:
    """True for what a `Host` may say (RFC 9110, 7.2): a name or address with or without a port, or nothing."""
    return _HOST_FORM.fullmatch(value) is not None


def is_only_chunked(raw: Iterable[tuple[bytes, bytes]]) -> bool:
    """True when the codings of a body that comes in chunks are no more than that."""
    codings = [value for name, value in raw if name.lower() == b"transfer-encoding"]
    return len(codings) == 1 and codings[0].strip(b" \t").lower() == b"chunked"


_FIELDS: Final = {
    _Sign.FORWARDED_PROTO: "forwarded_proto",
    _Sign.MODEL_ID: "model_id",
    _Sign.SHARD_KEY: "shard_key",
    _Sign.RELATIVE_SLO: "relative_slo_ms",
    _Sign.ABSOLUTE_SLO: "absolute_slo_ms",
    _Sign.TIMEOUT: "timeout_s",
}


def _note(read: RequestHeaders, sign: _Sign, value: bytes) -> None:
    field = _FIELDS.get(sign)
    if field is not None:
        setattr(read, field, value)
        if _Sign.RELATIVE_SLO <= sign <= _Sign.TIMEOUT:
            read.has_slo = True
    elif sign is _Sign.REQUEST_ID:
        read.request_id = usable_request_id(value.decode("latin-1"))
    elif sign is _Sign.TRACEPARENT:
        read.traceparent = value.decode("latin-1")
    elif sign is _Sign.IDEMPOTENCY_KEY:
        read.has_idempotency_key = True
    elif sign is _Sign.FORWARDED_FOR:
        read.forwarded_for = b"%b, %b" % (read.forwarded_for, value) if read.forwarded_for else value
    elif sign is _Sign.FORWARDED_HOST:
        read.has_forwarded_host = True
    elif sign is _Sign.CODING:
        read.has_coding = True
    elif sign is _Sign.UPGRADE:
        read.upgrade = b"%b,%b" % (read.upgrade, value) if read.upgrade else value


@lru_cache(maxsize=1024)
def _name_of(option: str) -> bytes:
    return option.lower().encode()


def value_of(read: RequestHeaders, option: str) -> bytes:
    """The first value of the header that an endpoint's option names; empty when there is none."""
    if not option:
        return b""
    name = _name_of(option)
    for held, value in read.forwarded:
        if held == name:
            return value
    return b""


def usable_request_id(value: str) -> str:
    """``value`` when it may appear in logs and headers, otherwise an empty text."""
    is_usable = 0 < len(value) <= REQUEST_ID_LENGTH_MAX and value.isascii() and value.isprintable()
    return value if is_usable else ""


class ResponseHeaders(NamedTuple):
    """What a replica's headers say to the proxy, and what goes on to the client."""

    forwarded: Headers
    content_length: int | None


_NOT_IN_NAMES: Final = bytes(range(0x21)) + b'()<>@,;:\\"/[]?={}\x7f'
"""What is no part of a token (RFC 9110, 5.6.2); bytes above ASCII are found apart."""

_NOT_IN_VALUES: Final = bytes(byte for byte in range(0x20) if byte != ord("\t")) + b"\x7f"
"""Control bytes (RFC 9110, 5.5); what is above ASCII may mean anything and is passed on."""


@lru_cache(maxsize=1024)
def _read_answer_name(raw_name: bytes) -> bytes:
    """The name in lower case. Raises ValueError when it cannot be one."""
    if not raw_name or not raw_name.isascii() or raw_name.translate(None, _NOT_IN_NAMES) != raw_name:
        raise ValueError(f"{raw_name[:80]!r} cannot be the name of a header")
    return raw_name.lower()


def read_response_head(status: int, headers: Iterable[tuple[bytes, bytes]]) -> ResponseHeaders:
    """Sort out the headers of an answer. Raises ValueError for a head that would break the answer apart."""
    if not 200 <= status <= 599:
        raise ValueError(f"{status} is no status of a final answer")
    forwarded: Headers = []
    content_length: int | None = None
    for raw_name, value in headers:
        name = _read_answer_name(raw_name)
        if name in _OURS:
            if name == b"content-length" and value.isdigit():
                content_length = int(value)
            continue
        if value.translate(None, _NOT_IN_VALUES) != value:
            raise ValueError(f"header {name[:80]!r} has a line break or another control byte in its value")
        forwarded.append((raw_name, value))
    return ResponseHeaders(forwarded, content_length)


def as_text(headers: Headers) -> list[tuple[str, str]]:
    """For whoever takes only text that has a UTF-8 form: what has none is in it as question marks."""
    return [(name.decode("latin-1"), _as_utf8(value)) for name, value in headers]


def _as_utf8(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeError:
        return value.decode("latin-1").encode("ascii", "replace").decode("ascii")


def as_exact_text(headers: Headers) -> list[tuple[str, str]]:
    """Text which `as_bytes` turns back into the very bytes; it may be no UTF-8."""
    return [(name.decode("latin-1"), value.decode("utf-8", "surrogateescape")) for name, value in headers]


def as_bytes(text: str) -> bytes:
    """The bytes for which text of a header stands, such as that of `as_exact_text`."""
    return text.encode("utf-8", "surrogateescape")

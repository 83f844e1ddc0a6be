"""Which headers are forwarded and which are hop-by-hop; the client behind proxies in front, and the deadline of a
request.

Why bytes: HTTP header fields are bytes, and which text they mean is the application's concern.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import IntEnum
from functools import lru_cache
from typing import Final, NamedTuple, Protocol

import msgspec

from serve_common.dispatch.calls import RequestSpec
from serve_common.errors import DeadlineExceeded
from serve_common.protocol.frames import Headers
from serve_common.telemetry.request_traces import RequestObserver
from serve_proxy.core.problems import BadRequest, Problem


class ObservedRequest(RequestObserver, Protocol):
    """Observes one request from its arrival to its end.

    Why one interface for a trace, the access log and both at once: the request path checks only whether there is an
    observer, and an unobserved request costs nothing else.
    """

    def on_request(self, spec: RequestSpec) -> None:
        """Called when the endpoint was found and ``spec`` is sent to it."""
        ...

    def ended(self, status: int, problem: Problem | None = None, sent_bytes: int = 0) -> None:
        """Called when the request has ended with ``status``, that of the ``problem`` if this process failed it.

        ``sent_bytes`` is the size of a response body that was complete. Idempotent.
        """
        ...


class ReceivedBody(Protocol):
    """The body of a request, as it arrives."""

    total_bytes: int
    """Bytes received so far."""


REQUEST_ID: Final = "X-Request-ID"
REQUEST_ID_LENGTH_MAX: Final = 128

_HOP_BY_HOP: Final = frozenset(
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
"""Hop-by-hop headers (RFC 9110, 7.6.1), and `Expect`, which the proxy answers itself."""
_ALWAYS_END_TO_END: Final = frozenset({b"host", b"content-length", b"authorization", b"cookie"})
"""End-to-end headers even if a client's `Connection` names them: removing them would change the request."""
_SET_BY_PROXY: Final = _HOP_BY_HOP | {b"content-length", b"x-request-id", b"date", b"server"}


class _HeaderKind(IntEnum):
    """How the proxy treats a header."""

    NOTHING = 0
    HOP_BY_HOP = 1
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
    DISCONNECT = 14
    FORWARDED_FOR = 15
    FORWARDED_PROTO = 16
    FORWARDED_HOST = 17
    FORWARDED = 18
    """Another header in which proxies in front describe the client."""
    AMBIGUOUS = 19
    """A name with an underscore: CGI and WSGI servers would read it as another header."""


RELATIVE_SLO: Final = "X-Serve-Relative-SLO-MS"
ABSOLUTE_SLO: Final = "X-Serve-Absolute-SLO-MS"
TIMEOUT: Final = "x-request-timeout-seconds"
"""The same header as Ray Serve's."""
DISCONNECT: Final = "x-request-disconnect-disabled"
"""The same header as Ray Serve's: ``?1`` lets a request run to its end although its client leaves."""
MODEL_ID: Final = "serve_multiplexed_model_id"
"""The same header as Ray Serve's, which is known with hyphens too: proxies in front may write them for underscores."""
SHARD_KEY: Final = "x-serve-shard-key"
"""The default header of an endpoint's shard key."""

_HEADER_KINDS: Final = dict.fromkeys(_HOP_BY_HOP, _HeaderKind.HOP_BY_HOP) | {
    b"transfer-encoding": _HeaderKind.CODING,
    b"connection": _HeaderKind.CONNECTION,
    b"x-request-id": _HeaderKind.REQUEST_ID,
    b"upgrade": _HeaderKind.UPGRADE,
    b"traceparent": _HeaderKind.TRACEPARENT,
    b"idempotency-key": _HeaderKind.IDEMPOTENCY_KEY,
    b"host": _HeaderKind.HOST,
    b"forwarded": _HeaderKind.FORWARDED,
    b"x-real-ip": _HeaderKind.FORWARDED,
    b"x-forwarded-for": _HeaderKind.FORWARDED_FOR,
    b"x-forwarded-proto": _HeaderKind.FORWARDED_PROTO,
    b"x-forwarded-host": _HeaderKind.FORWARDED_HOST,
    MODEL_ID.encode(): _HeaderKind.MODEL_ID,
    MODEL_ID.replace("_", "-").encode(): _HeaderKind.MODEL_ID,
    SHARD_KEY.encode(): _HeaderKind.SHARD_KEY,
    RELATIVE_SLO.lower().encode(): _HeaderKind.RELATIVE_SLO,
    ABSOLUTE_SLO.lower().encode(): _HeaderKind.ABSOLUTE_SLO,
    TIMEOUT.encode(): _HeaderKind.TIMEOUT,
    DISCONNECT.encode(): _HeaderKind.DISCONNECT,
}
_HOST: Final = _HeaderKind.HOST
_CONNECTION: Final = _HeaderKind.CONNECTION
_FORWARDED_FOR: Final = _HeaderKind.FORWARDED_FOR
_AMBIGUOUS: Final = _HeaderKind.AMBIGUOUS
_LAST_NOT_FORWARDED: Final = _HeaderKind.UPGRADE
"""Headers of the kinds up to this one are not forwarded as they are."""
_FORWARDED_PREFIX: Final = b"x-forwarded-"
_ALL_HOPS: Final = 1_000_000


@lru_cache(maxsize=1024)
def _parse_name(raw_name: bytes) -> tuple[bytes, _HeaderKind]:
    """The name in lower case, and its kind; cached, because the same few names recur."""
    name = raw_name.lower()
    header_kind = _HEADER_KINDS.get(name)
    if header_kind is None:
        if b"_" in name:
            header_kind = _HeaderKind.AMBIGUOUS
        else:
            header_kind = _HeaderKind.FORWARDED if name.startswith(_FORWARDED_PREFIX) else _HeaderKind.NOTHING
    return name, header_kind


class RequestHeaders(msgspec.Struct, gc=False):
    """A request's headers: those that the proxy uses, and those forwarded to the replica. Values are unchanged."""

    forwarded: Headers
    request_id: str = ""
    """The client's request id if it is usable; otherwise empty."""
    traceparent: str = ""
    observer: ObservedRequest | None = None
    """The observer of the request; None when it is not observed."""
    has_idempotency_key: bool = False
    host: bytes = b""
    forwarded_for: bytes = b""
    """``X-Forwarded-For`` of the trusted hops, joined. It is not in `forwarded`: this proxy adds to it."""
    forwarded_proto: bytes = b""
    has_forwarded_host: bool = False
    model_id: bytes = b""
    shard_key: bytes = b""
    """The value of the header with the default name."""
    has_slo: bool = False
    """True when one of the next three is set."""
    relative_slo_ms: bytes | None = None
    absolute_slo_ms: bytes | None = None
    timeout_s: bytes | None = None
    outlives_client: bool = False
    """True when a client that leaves does not cancel the request."""
    upgrade: bytes = b""
    has_coding: bool = False
    """True when there is a ``Transfer-Encoding``, with any value."""
    sender: tuple[str, str] | None = None
    """What `forward` returned for them; None before."""


def read_request_headers(raw: Iterable[tuple[bytes, bytes]], forwarded_hops: int = 0) -> RequestHeaders:
    """Parse the headers of a request, as a client sent them.

    ``forwarded_hops`` proxies in front of this one are trusted to have added the address that they saw to
    ``X-Forwarded-For``: further entries are dropped, and with 0 hops so are all forwarding headers.
    """
    return _read(raw, forwarded_hops, is_checked=False)


def read_checked_headers(raw: Iterable[tuple[bytes, bytes]]) -> RequestHeaders:
    """Parse `checked_headers`, to which middlewares may have added any header."""
    return _read(raw, _ALL_HOPS, is_checked=True)


def _read(raw: Iterable[tuple[bytes, bytes]], forwarded_hops: int, *, is_checked: bool) -> RequestHeaders:
    forwarded: Headers = []
    read = RequestHeaders(forwarded)
    connection = b""
    for raw_name, raw_value in raw:
        name, header_kind = _parse_name(raw_name)
        if header_kind:
            if header_kind is _HOST:
                read.host = raw_value
            elif header_kind is _CONNECTION:
                connection += b"," + raw_value
            elif header_kind >= _FORWARDED_FOR:
                if not (is_checked if header_kind is _AMBIGUOUS else forwarded_hops):
                    continue
                _apply(read, header_kind, raw_value)
            else:
                _apply(read, header_kind, raw_value)
            if header_kind <= _LAST_NOT_FORWARDED or header_kind is _FORWARDED_FOR:
                continue
        forwarded.append((name, raw_value))
    if connection and not is_checked and connection.lower() not in (b",keep-alive", b",close"):
        named = _connection_options(connection)
        read.forwarded = [(name, value) for name, value in forwarded if name not in named]
    if read.forwarded_for and not is_checked:
        read.forwarded_for = _last_hops(read.forwarded_for, forwarded_hops)
    return read


def _connection_options(connection: bytes) -> set[bytes]:
    """The headers that a client's `Connection` makes hop-by-hop."""
    named = {token.strip().lower() for token in connection.split(b",")} - _ALWAYS_END_TO_END
    return {name for name in named if _parse_name(name)[1] < _FORWARDED_FOR}


def _last_hops(forwarded_for: bytes, forwarded_hops: int) -> bytes:
    """The last ``forwarded_hops`` entries, as the client wrote those before them; empty when there are fewer."""
    hops = [hop for part in forwarded_for.split(b",") if (hop := part.strip())]
    return b", ".join(hops[-forwarded_hops:]) if len(hops) >= forwarded_hops else b""


def checked_headers(
    raw: Iterable[tuple[bytes, bytes]], forwarded_hops: int
) -> tuple[tuple[bytes, bytes], ...]:
    """The headers of a request for middlewares, as received, without those that `read_request_headers` would drop.

    So headers that middlewares add are accepted whatever the client's `Connection` names. Hop-by-hop headers themselves
    stay, because the library reads them.
    """
    raw = tuple(raw)
    connection = b",".join(value for name, value in raw if name.lower() == b"connection")
    named = _connection_options(connection) if connection else set()
    accepted: list[tuple[bytes, bytes]] = []
    hop_values: list[bytes] = []
    for raw_name, value in raw:
        name, header_kind = _parse_name(raw_name)
        if header_kind is _AMBIGUOUS or (header_kind >= _FORWARDED_FOR and not forwarded_hops):
            continue
        if header_kind is _FORWARDED_FOR:
            hop_values.append(value)
        elif name not in named or name in _HOP_BY_HOP:
            accepted.append((raw_name, value))
    if hop_values and (hops := _last_hops(b",".join(hop_values), forwarded_hops)):
        accepted.append((b"X-Forwarded-For", hops))
    return tuple(accepted)


def use_host(read: RequestHeaders, host: bytes) -> None:
    """Replace `Host` by the authority of the request target, which takes precedence (RFC 9112, 3.2.2)."""
    read.host = host
    read.forwarded = [(b"host", host), *(header for header in read.forwarded if header[0] != b"host")]


_HOST_FORM: Final = re.compile(
    rb"(?:[A-Za-z0-9\-._~!$&'()*+,;=%]*|\[[A-Za-z0-9\-._~!$&'()*+,;=%:]+\])(?::[0-9]*)?"
)


@lru_cache(maxsize=1024)
def is_host(value: bytes) -> bool:
    """True for a valid `Host` (RFC 9110, 7.2): a name or address with or without a port, or empty."""
    return _HOST_FORM.fullmatch(value) is not None


def is_only_chunked(raw: Iterable[tuple[bytes, bytes]]) -> bool:
    """True when chunked is the only transfer coding."""
    codings = [value for name, value in raw if name.lower() == b"transfer-encoding"]
    return len(codings) == 1 and codings[0].strip(b" \t").lower() == b"chunked"


_FIELDS: Final = {
    _HeaderKind.FORWARDED_PROTO: "forwarded_proto",
    _HeaderKind.MODEL_ID: "model_id",
    _HeaderKind.SHARD_KEY: "shard_key",
    _HeaderKind.RELATIVE_SLO: "relative_slo_ms",
    _HeaderKind.ABSOLUTE_SLO: "absolute_slo_ms",
    _HeaderKind.TIMEOUT: "timeout_s",
}


def _apply(read: RequestHeaders, header_kind: _HeaderKind, value: bytes) -> None:
    field = _FIELDS.get(header_kind)
    if field is not None:
        setattr(read, field, value)
        if _HeaderKind.RELATIVE_SLO <= header_kind <= _HeaderKind.TIMEOUT:
            read.has_slo = True
    elif header_kind is _HeaderKind.REQUEST_ID:
        read.request_id = usable_request_id(value.decode("latin-1"))
    elif header_kind is _HeaderKind.TRACEPARENT:
        read.traceparent = value.decode("latin-1")
    elif header_kind is _HeaderKind.IDEMPOTENCY_KEY:
        read.has_idempotency_key = True
    elif header_kind is _HeaderKind.FORWARDED_FOR:
        read.forwarded_for = b"%b, %b" % (read.forwarded_for, value) if read.forwarded_for else value
    elif header_kind is _HeaderKind.DISCONNECT:
        read.outlives_client = value == b"?1"
    elif header_kind is _HeaderKind.FORWARDED_HOST:
        read.has_forwarded_host = True
    elif header_kind is _HeaderKind.CODING:
        read.has_coding = True
    elif header_kind is _HeaderKind.UPGRADE:
        read.upgrade = b"%b,%b" % (read.upgrade, value) if read.upgrade else value


@lru_cache(maxsize=1024)
def _encode_name(option: str) -> bytes:
    return option.lower().encode()


def get_header_value(read: RequestHeaders, option: str) -> bytes:
    """The first value of the header named by an endpoint's ``option``; empty when there is none."""
    if not option:
        return b""
    name = _encode_name(option)
    for header_name, value in read.forwarded:
        if header_name == name:
            return value
    return b""


def usable_request_id(value: str) -> str:
    """``value`` if it is safe in logs and headers, otherwise an empty string."""
    is_usable = 0 < len(value) <= REQUEST_ID_LENGTH_MAX and value.isascii() and value.isprintable()
    return value if is_usable else ""


class ResponseHeaders(NamedTuple):
    """A replica's response headers: those forwarded to the client, and the body's length if given."""

    forwarded: Headers
    content_length: int | None


_NOT_IN_NAMES: Final = bytes(range(0x21)) + b'()<>@,;:\\"/[]?={}\x7f'
"""Bytes not allowed in a token (RFC 9110, 5.6.2); bytes above ASCII are checked separately."""

_NOT_IN_VALUES: Final = bytes(byte for byte in range(0x20) if byte != ord("\t")) + b"\x7f"
"""Control bytes (RFC 9110, 5.5); bytes above ASCII are opaque and forwarded."""


@lru_cache(maxsize=1024)
def _parse_response_name(raw_name: bytes) -> bytes:
    """The name in lower case. Raises ValueError for an invalid name."""
    if not raw_name or not raw_name.isascii() or raw_name.translate(None, _NOT_IN_NAMES) != raw_name:
        raise ValueError(f"{raw_name[:80]!r} cannot be the name of a header")
    return raw_name.lower()


def read_response_head(status: int, headers: Iterable[tuple[bytes, bytes]]) -> ResponseHeaders:
    """Parse the headers of a response. Raises ValueError for a head that would corrupt the response."""
    if not 200 <= status <= 599:
        raise ValueError(f"{status} is no status of a final answer")
    forwarded: Headers = []
    content_length: int | None = None
    for raw_name, value in headers:
        name = _parse_response_name(raw_name)
        if name in _SET_BY_PROXY:
            if name == b"content-length" and value.isdigit():
                content_length = int(value)
            continue
        if value.translate(None, _NOT_IN_VALUES) != value:
            raise ValueError(f"header {name[:80]!r} has a line break or another control byte in its value")
        forwarded.append((raw_name, value))
    return ResponseHeaders(forwarded, content_length)


def as_text(headers: Headers) -> list[tuple[str, str]]:
    """Headers as valid Unicode text; bytes that are not UTF-8 become question marks."""
    return [(name.decode("latin-1"), _as_utf8(value)) for name, value in headers]


def _as_utf8(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeError:
        return value.decode("latin-1").encode("ascii", "replace").decode("ascii")


def decode_headers_exact(headers: Headers) -> list[tuple[str, str]]:
    """Headers as text that `as_bytes` turns back into the same bytes; it may contain surrogates."""
    return [(name.decode("latin-1"), value.decode("utf-8", "surrogateescape")) for name, value in headers]


def as_bytes(text: str) -> bytes:
    """The bytes of a header's text, such as from `decode_headers_exact`."""
    return text.encode("utf-8", "surrogateescape")


_SCHEMES: Final = {b"http": "http", b"https": "https", b"ws": "http", b"wss": "https"}
_ADDRESS_LENGTH_MAX: Final = 64


@lru_cache(maxsize=4096)
def _build_direct_headers(peer: str, scheme: str, host: bytes) -> Headers:
    """Forwarding headers of a client that no other proxy forwarded; the same for all requests of a connection."""
    added = [(b"x-forwarded-proto", scheme.encode()), (b"x-forwarded-host", host)]
    return [(b"x-forwarded-for", _get_host(peer)), *added] if peer else added


def _get_host(peer: str) -> bytes:
    return peer.rpartition(":")[0].encode()


def forward(read: RequestHeaders, peer: str, scheme: str) -> tuple[str, str]:
    """Add ``X-Forwarded-…`` to the forwarded headers; return `RequestSpec.client` and `RequestSpec.scheme`.

    ``peer`` is the connection's other end as ``host:port``, ``scheme`` is http or https. Call it once.

    Why received values are not believed as they are: any client can write ``X-Forwarded-For``. Only the operator knows
    how many load balancers are in front of the proxy, and configures it (`ProxySettings.forwarded_hops`); the entries
    of those are kept, and this proxy adds the address that it sees itself.
    """
    forwarded = read.forwarded
    if not read.forwarded_for and not read.forwarded_proto and not read.has_forwarded_host:
        forwarded += _build_direct_headers(peer, scheme, read.host)
        return peer, scheme
    client = get_client(read.forwarded_for, peer)
    if read.forwarded_for:
        forwarded.append((b"x-forwarded-for", b"%b, %b" % (read.forwarded_for, _get_host(peer))))
    elif peer:
        forwarded.append((b"x-forwarded-for", _get_host(peer)))
    if read.forwarded_proto:
        scheme = _SCHEMES.get(read.forwarded_proto.strip().lower(), scheme)
    else:
        forwarded.append((b"x-forwarded-proto", scheme.encode()))
    if not read.has_forwarded_host:
        forwarded.append((b"x-forwarded-host", read.host))
    return client, scheme


def get_client(forwarded_for: bytes, peer: str) -> str:
    """The first client in ``X-Forwarded-For`` as ``host:port``, or else the ``peer``."""
    if not forwarded_for:
        return peer
    first = forwarded_for.partition(b",")[0].strip()
    if 0 < len(first) <= _ADDRESS_LENGTH_MAX and first.isascii() and first.decode().isprintable():
        return _with_port(first.decode())
    return peer


def _with_port(address: str) -> str:
    """``host:port`` of an address with or without a port, or of an IPv6 address in brackets; port 0 if it has none."""
    if address.startswith("["):
        host, _, rest = address[1:].partition("]")
        return f"{host}{rest}" if rest.startswith(":") else f"{host}:0"
    return address if address.count(":") == 1 else f"{address}:0"


_NUMBER: Final = re.compile(rb"\d{1,15}(\.\d{1,9})?")


def earliest_deadline(
    read: RequestHeaders, deadline: float, endpoint_slo_ms: float | None, *, now: float, wall_now: float
) -> float:
    """The deadline of a request, by the clock of ``now`` as ``deadline`` is; all in seconds.

    ``deadline`` is the proxy's own and ``endpoint_slo_ms`` applies to requests without one; ``wall_now`` is seconds
    since 1970. Raises `BadRequest` naming the header, as an invalid number would mean to wait far too long,
    `DeadlineExceeded` for one that has passed.
    """
    if not read.has_slo:
        return deadline if endpoint_slo_ms is None else min(deadline, now + endpoint_slo_ms / 1000)
    if read.relative_slo_ms is not None:
        deadline = min(deadline, now + _positive(RELATIVE_SLO, read.relative_slo_ms) / 1000)
    if read.timeout_s is not None:
        deadline = min(deadline, now + _positive(TIMEOUT, read.timeout_s))
    if read.absolute_slo_ms is not None:
        left_s = _positive(ABSOLUTE_SLO, read.absolute_slo_ms) / 1000 - wall_now
        if left_s <= 0:
            raise DeadlineExceeded(f"the time that {ABSOLUTE_SLO} names has passed")
        deadline = min(deadline, now + left_s)
    return deadline


def _positive(name: str, value: bytes) -> float:
    text = value.strip()
    number = float(text) if _NUMBER.fullmatch(text) else 0.0
    if number <= 0:
        raise BadRequest(name, f"{value[:40].decode('latin-1')!r} is not a number above 0")
    return number

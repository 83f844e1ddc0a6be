"""The NATS client protocol, as much as the data plane needs: lines, headers, a parser, and subscriptions. Pure.

Why not nats-py: it costs a third of the data plane's throughput. Headers stay bytes on the data plane, which looks
inside only for foreign clients and for the one status that every request must understand, "no responders".

Source: https://docs.nats.io/reference/reference-protocols/nats-protocol
"""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Final, NoReturn, final

import msgspec

from serve_common.nats.options import InvalidSubject, NatsProtocolError

NO_RESPONDERS_STATUS: Final = 503
_VERSION: Final = b"NATS/1.0"


def encode_headers(headers: Iterable[tuple[str, str]]) -> bytes:
    """The header block; a key may come more than once. Raises NatsProtocolError where it would break."""
    lines = [_VERSION]
    for key, value in headers:
        is_key_good = key.isascii() and key.isprintable() and key and ":" not in key and " " not in key
        if not is_key_good:
            raise NatsProtocolError(f"header key {key!r}: it must be printable ASCII without ':' and blanks")
        if "\r" in value or "\n" in value:
            raise NatsProtocolError(f"header {key!r}: its value has a line break")
        lines.append(f"{key}: {value.strip(' ')}".encode())
    return b"\r\n".join(lines) + b"\r\n\r\n"


def parse_headers(block: bytes) -> list[tuple[str, str]]:
    """Keys and values in order, values without surrounding blanks; bytes that are no UTF-8 become U+FFFD.

    Raises NatsProtocolError when the block is none.
    """
    if not block.startswith(_VERSION) or not block.endswith(b"\r\n\r\n"):
        raise NatsProtocolError(
            f"headers must begin with NATS/1.0 and end with an empty line: {block[:80]!r}"
        )
    headers: list[tuple[str, str]] = []
    for line in block[:-4].split(b"\r\n")[1:]:
        key, colon, value = line.partition(b":")
        if not key or not colon:
            raise NatsProtocolError(f"header line without key and colon: {line[:80]!r}")
        headers.append((key.decode("utf-8", "replace"), value.strip(b" ").decode("utf-8", "replace")))
    return headers


def get_status(block: bytes) -> int | None:
    """The status code in the first line of a header block; None when it has none."""
    first_line = block.partition(b"\r\n")[0]
    tokens = first_line.split(b" ", 2)
    if len(tokens) < 2 or tokens[0] != _VERSION or len(tokens[1]) != 3 or not tokens[1].isdigit():
        return None
    return int(tokens[1])


def is_no_responders(block: bytes) -> bool:
    """True when the server answers in place of a subscriber, because there is none."""
    return get_status(block) == NO_RESPONDERS_STATUS


CLIENT_LINE_BYTES_MAX: Final = 4096
"""Servers drop a client that writes a longer line."""
SUBJECT_BYTES_MAX: Final = 255

CRLF: Final = b"\r\n"
PING: Final = b"PING\r\n"
PONG: Final = b"PONG\r\n"
_WORD_BREAKS: Final = b" \t\r\n\x00"
_SUBJECTS_BYTES_MAX: Final = CLIENT_LINE_BYTES_MAX - 64
_CONTROL_BYTES: Final = bytes(range(33)) + b"\x7f"


class Message(msgspec.Struct, frozen=True, gc=False):
    """MSG or HMSG: a message for the subscription `sid`. `reply` is empty when no answer is expected."""

    subject: bytes
    sid: int
    reply: bytes
    payload: bytes
    headers: bytes | None = None


class Greeting(msgspec.Struct, frozen=True):
    """INFO: the server's description of itself, at first and again when it changes. Sizes in bytes."""

    max_payload: int = 1024 * 1024
    tls_required: bool = False
    tls_available: bool = False
    lame_duck: bool = msgspec.field(default=False, name="ldm")
    nonce: str = ""
    """To be signed by a client that logs in with a key."""
    version: str = ""
    """The server's version, such as 2.12.1."""
    jetstream: bool = False
    """Whether the server has JetStream."""


class ServerError(msgspec.Struct, frozen=True):
    """-ERR: the server refused something; `text` comes without its quotes."""

    text: str

    @property
    def is_permission_violation(self) -> bool:
        """One publish or subscription was refused; the connection goes on."""
        return self.text.lower().startswith("permissions violation")

    @property
    def is_authorization_failure(self) -> bool:
        """The server refuses this user (from now on). A client whose login timed out, or whose token has expired, may
        try again."""
        tokens = self.text.lower()
        may_try_again = "timeout" in tokens or "expired" in tokens
        return not self.is_permission_violation and not may_try_again and "auth" in tokens


class Signal(enum.Enum):
    """The verbs that carry nothing."""

    PING = "PING"
    PONG = "PONG"
    OK = "+OK"


ServerOp = Message | Greeting | ServerError | Signal


def encode_connect(*, name: str, login: Mapping[str, str], tls_required: bool = False) -> bytes:
    """The CONNECT line; ``login`` has the credentials."""
    options: dict[str, str | int | bool] = {
        "verbose": False,
        "pedantic": False,
        "tls_required": tls_required,
        "headers": True,
        "no_responders": True,
        "echo": True,
        "lang": "python",
        "version": "0.1.0",
        "name": name,
        # 1 requests INFO while connected, which announces lame duck mode
        "protocol": 1,
        **login,
    }
    return b"CONNECT " + msgspec.json.encode(options) + CRLF


def encode_pub(subject: bytes, reply: bytes, payload: bytes) -> bytes:
    """A whole PUB with its payload, which is copied: for small ones. Else as `encode_pub_line`."""
    tokens = subject + reply
    length = len(tokens)
    if not subject or length > _SUBJECTS_BYTES_MAX or len(tokens.translate(None, _WORD_BREAKS)) != length:
        _refuse_subjects(subject, reply)
    if reply:
        return b"PUB %b %b %d\r\n%b\r\n" % (subject, reply, len(payload), payload)
    return b"PUB %b %d\r\n%b\r\n" % (subject, len(payload), payload)


def encode_pub_line(subject: bytes, reply: bytes, payload_bytes: int) -> bytes:
    """The PUB line; the payload and a CRLF must follow it (so that a large payload need not be copied).

    `reply` may be empty. Raises InvalidSubject where the words would not reach the server as they are.
    """
    _check_subjects(subject, reply)
    if reply:
        return b"PUB %b %b %d\r\n" % (subject, reply, payload_bytes)
    return b"PUB %b %d\r\n" % (subject, payload_bytes)


def encode_hpub_line(subject: bytes, reply: bytes, headers_bytes: int, payload_bytes: int) -> bytes:
    """The HPUB line; headers, payload and a CRLF must follow it. Else as `encode_pub_line`."""
    _check_subjects(subject, reply)
    total_bytes = headers_bytes + payload_bytes
    if reply:
        return b"HPUB %b %b %d %d\r\n" % (subject, reply, headers_bytes, total_bytes)
    return b"HPUB %b %d %d\r\n" % (subject, headers_bytes, total_bytes)


def encode_sub(subject: bytes, queue: bytes, sid: int) -> bytes:
    """The SUB line; `queue` may be empty. Raises InvalidSubject for a bad pattern or queue name."""
    check_subject(subject, may_have_wildcards=True)
    if not queue:
        return b"SUB %b %d\r\n" % (subject, sid)
    check_subject(queue)
    return b"SUB %b %b %d\r\n" % (subject, queue, sid)


def encode_unsub(sid: int) -> bytes:
    """The UNSUB line; takes effect at once."""
    return b"UNSUB %d\r\n" % sid


def check_subject(subject: bytes, *, may_have_wildcards: bool = False) -> bytes:
    """Return `subject` when it is 1 to 255 bytes of non-empty tokens without blanks or control characters.

    Wildcards `*` (a whole token) and `>` (the last token) pass only where `may_have_wildcards`.
    Raises InvalidSubject, which says what is wrong.
    """
    if not 1 <= len(subject) <= SUBJECT_BYTES_MAX:
        raise InvalidSubject(f"subject of {len(subject)} bytes: it must have 1 to {SUBJECT_BYTES_MAX}")
    if subject.translate(None, _CONTROL_BYTES) != subject:
        raise InvalidSubject(f"subject {subject!r} has a blank or a control character")
    tokens = subject.split(b".")
    if b"" in tokens:
        raise InvalidSubject(f"subject {subject!r} has an empty token")
    if not may_have_wildcards and (b"*" in tokens or b">" in tokens):
        raise InvalidSubject(f"subject {subject!r} has a wildcard where none is allowed")
    if b">" in tokens[:-1]:
        raise InvalidSubject(f"subject {subject!r} has '>' before its last token")
    return subject


def _check_subjects(subject: bytes, reply: bytes) -> None:
    tokens = subject + reply
    length = len(tokens)
    if not subject or length > _SUBJECTS_BYTES_MAX or len(tokens.translate(None, _WORD_BREAKS)) != length:
        _refuse_subjects(subject, reply)


def _refuse_subjects(subject: bytes, reply: bytes) -> NoReturn:
    length = len(subject) + len(reply)
    if length > _SUBJECTS_BYTES_MAX:
        raise InvalidSubject(f"subject and reply of {length} bytes: too long for one line")
    raise InvalidSubject(f"subject {subject!r}, reply {reply!r}: each must be one word")


SERVER_LINE_BYTES_MAX: Final = CLIENT_LINE_BYTES_MAX + 256
"""A server's own line repeats a client's words and adds an id, a size or an error's text."""
GREETING_BYTES_MAX: Final = 32 * 1024
PAYLOAD_BYTES_MAX: Final = 64 * 1024 * 1024
"""No NATS server can be configured above this."""

_CR: Final = 13
_MESSAGE_VERBS: Final = frozenset((b"MSG", b"HMSG"))
_SMALL_NUMBERS: Final = {b"%d" % number: number for number in range(2048)}
"""Ids and sizes of nearly all lines: a lookup costs a third of checking and parsing."""
_SIGNALS: Final = {signal.value.encode(): signal for signal in Signal}
_greeting_decoder = msgspec.json.Decoder(Greeting)


class Parser:
    """Turns the server's bytes, cut anywhere, into values. Keeps at most one incomplete value.

    Every byte passes here, so it must be fast, and it trusts none: all that it keeps is limited. It accepts what
    servers write (upper-case verbs, single spaces), not every spelling that the protocol's description allows.
    """

    __slots__ = ("_needed_bytes", "_partial", "_partial_bytes", "_payload_bytes_max")

    def __init__(self, *, payload_bytes_max: int = PAYLOAD_BYTES_MAX) -> None:
        """`payload_bytes_max` counts headers and payload of one message together."""
        self._payload_bytes_max = payload_bytes_max
        # A large payload arrives in many pieces: they are joined once, when the last one is there.
        self._partial: list[bytes] = []
        self._partial_bytes = 0
        self._needed_bytes = 0

    def feed(self, data: bytes) -> list[ServerOp]:
        """The values that `data` completes, in order.

        Raises NatsProtocolError, which names the verb and what is wrong; the parser must not be used after that.
        """
        if self._partial:
            self._partial.append(data)
            self._partial_bytes += len(data)
            if self._partial_bytes < self._needed_bytes:
                return []
            data = b"".join(self._partial)
            self._partial.clear()
        ops: list[ServerOp] = []
        at, end = 0, len(data)
        while at < end:
            # Searching one byte is three times as fast as searching two.
            line_end = data.find(b"\n", at) - 1
            if line_end < at or data[line_end] != _CR:
                line_end = data.find(CRLF, at)
                if line_end < 0:
                    _check_line_length(data, at, end - 1)
                    self._buffer(data, at, end - at + 1)
                    break
            if line_end - at > SERVER_LINE_BYTES_MAX:
                _check_line_length(data, at, line_end)
            tokens = data[at:line_end].split(b" ")
            if tokens[0] not in _MESSAGE_VERBS:
                ops.append(_decode_line(data[at:line_end]))
                at = line_end + 2
                continue
            subject, sid, reply, headers_bytes, total_bytes = _decode_message(tokens)
            if total_bytes > self._payload_bytes_max:
                raise NatsProtocolError(f"message of {total_bytes} bytes: at most {self._payload_bytes_max}")
            body = line_end + 2
            body_end = body + total_bytes
            at_next = body_end + 2
            if at_next > end:
                self._buffer(data, at, at_next - at)
                break
            if data[body_end:at_next] != CRLF:
                raise NatsProtocolError(f"message of {total_bytes} bytes is not ended by CRLF")
            if headers_bytes < 0:
                ops.append(Message(subject, sid, reply, data[body:body_end]))
            else:
                split = body + headers_bytes
                ops.append(Message(subject, sid, reply, data[split:body_end], data[body:split]))
            at = at_next
        return ops

    def _buffer(self, data: bytes, at: int, needed_bytes: int) -> None:
        rest = data[at:]
        self._partial.append(rest)
        self._partial_bytes = len(rest)
        self._needed_bytes = needed_bytes


def _check_line_length(data: bytes, at: int, line_end: int) -> None:
    length = line_end - at
    if length > SERVER_LINE_BYTES_MAX:
        limit = GREETING_BYTES_MAX if data.startswith(b"INFO ", at) else SERVER_LINE_BYTES_MAX
        if length > limit:
            verb = data[at : at + 8].split(b" ")[0]
            raise NatsProtocolError(f"{verb!r} line of {length} bytes or more: at most {limit}")


def _decode_message(tokens: list[bytes]) -> tuple[bytes, int, bytes, int, int]:
    """Subject, sid, reply, size of the headers (-1: a MSG has none) and size of headers and payload."""
    if tokens[0] == b"MSG":
        if len(tokens) == 5:
            _, subject, sid, reply, size = tokens
        elif len(tokens) == 4:
            _, subject, sid, size = tokens
            reply = b""
        else:
            raise NatsProtocolError(f"MSG has 3 or 4 words after it, not {len(tokens) - 1}: {_shown(tokens)}")
        try:
            return subject, _SMALL_NUMBERS[sid], reply, -1, _SMALL_NUMBERS[size]
        except KeyError:
            return subject, _number(tokens, sid), reply, -1, _number(tokens, size)
    if not 5 <= len(tokens) <= 6:
        raise NatsProtocolError(f"HMSG has 4 or 5 words after it, not {len(tokens) - 1}: {_shown(tokens)}")
    reply = tokens[3] if len(tokens) == 6 else b""
    headers_bytes, total_bytes = _number(tokens, tokens[-2]), _number(tokens, tokens[-1])
    if headers_bytes > total_bytes:
        raise NatsProtocolError(
            f"HMSG headers of {headers_bytes} bytes in {total_bytes} bytes: {_shown(tokens)}"
        )
    return tokens[1], _number(tokens, tokens[2]), reply, headers_bytes, total_bytes


def _decode_line(line: bytes) -> ServerOp:
    signal = _SIGNALS.get(line)
    if signal is not None:
        return signal
    verb, _, rest = line.partition(b" ")
    if verb == b"INFO":
        try:
            return _greeting_decoder.decode(rest)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise NatsProtocolError(f"INFO cannot be read: {error}") from error
    if verb == b"-ERR":
        return ServerError(rest.decode("utf-8", "replace").strip().strip("'"))
    if verb in _SIGNALS:
        raise NatsProtocolError(f"{verb.decode()} stands alone: {line[:200]!r}")
    raise NatsProtocolError(f"unknown verb {verb[:32]!r}")


def _number(tokens: list[bytes], word: bytes) -> int:
    if word.isdigit() and len(word) <= 19:
        return int(word)
    raise NatsProtocolError(f"{word[:32]!r} is no number: {_shown(tokens)}")


def _shown(tokens: list[bytes]) -> str:
    return repr(b" ".join(tokens)[:200])


MessageCallback = Callable[[bytes, bytes, bytes, bytes | None], None]
"""(subject, reply, payload, headers). Runs in the read path: it must be quick and must not block."""


@final
class Subscription:
    """A callback for the messages of a subject; made by `BusConnection.subscribe`."""

    __slots__ = ("_all", "callback", "is_ending", "queue", "sid", "subject")

    def __init__(
        self, subscriptions: Subscriptions, sid: int, subject: bytes, queue: bytes, callback: MessageCallback
    ) -> None:
        self._all = subscriptions
        self.sid = sid
        self.subject = subject
        self.queue = queue
        self.callback = callback
        self.is_ending = False
        """Not renewed any more, but what comes still reaches the callback."""

    def unsubscribe(self) -> None:
        """End it at once: messages that are on their way are dropped. May be called twice."""
        self._all.end(self)

    async def drain(self, timeout_s: float) -> None:
        """End it without losing what the server has already sent: those messages still reach the callback.

        When this returns no further message comes. A connection that is lost, or an answer that does not
        come in `timeout_s`, ends it as well.
        """
        await self._all.drain(self, timeout_s)


@final
class Subscriptions:
    """All subscriptions of one connection."""

    def __init__(
        self,
        write: Callable[[bytes], None],
        flush: Callable[[float], Awaitable[None]],
        on_failure: Callable[[Exception, str, str], None],
    ) -> None:
        """`write` sends to the server, if connected; `flush` waits for it, so many seconds, and raises nothing.

        `on_failure` gets what a callback raised, the word "callback", and the subject.
        """
        self._write = write
        self._flush = flush
        self._on_failure = on_failure
        self._by_sid: dict[int, Subscription] = {}
        self._last_sid = 0

    def take_message(self, message: Message) -> None:
        """Hand a message to its subscription; one that was ended meanwhile gets none."""
        subscription = self._by_sid.get(message.sid)
        if subscription is None:
            return
        try:
            subscription.callback(message.subject, message.reply, message.payload, message.headers)
        except Exception as error:  # noqa: BLE001 - a bad callback must not end the connection of others
            self._on_failure(error, "callback", subscription.subject.decode("utf-8", "replace"))

    def add(self, subject: bytes, queue: bytes, callback: MessageCallback) -> Subscription:
        """Subscribe `callback`, as `BusConnection.subscribe`."""
        sid = self._last_sid + 1
        line = encode_sub(subject, queue, sid)
        self._last_sid = sid
        subscription = self._by_sid[sid] = Subscription(self, sid, subject, queue, callback)
        self._write(line)
        return subscription

    def lasting(self) -> list[Subscription]:
        """All subscriptions that are not about to end."""
        return [subscription for subscription in self._by_sid.values() if not subscription.is_ending]

    def renew(self) -> None:
        """Send all subscriptions to a new server."""
        for subscription in self.lasting():
            self._write(encode_sub(subscription.subject, subscription.queue, subscription.sid))

    def end(self, subscription: Subscription) -> None:
        """Unsubscribe at once."""
        if self._by_sid.pop(subscription.sid, None) is not None:
            self._write(encode_unsub(subscription.sid))

    async def drain(self, subscription: Subscription, timeout_s: float) -> None:
        """Unsubscribe without losing what the server has already sent."""
        subscription.is_ending = True
        self._write(encode_unsub(subscription.sid))
        await self._flush(timeout_s)
        self._by_sid.pop(subscription.sid, None)

    def clear(self) -> None:
        """Forget all: the connection is closed."""
        self._by_sid.clear()

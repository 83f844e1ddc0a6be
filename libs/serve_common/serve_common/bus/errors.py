"""What can go wrong on the data plane's bus, apart from what all of Muster shares (`serve_common.errors`).

Why: a caller must tell three cases apart: the message was not sent (try elsewhere or later), it can never be
sent (the caller's mistake), or the peer does not speak NATS (give the connection up).
"""

from __future__ import annotations

from serve_common.errors import BusUnavailable, PermanentError, TransientError


class NotConnected(BusUnavailable):
    """There is no connection right now, so nothing was sent and nothing is kept for later."""


class OutboundFull(TransientError):
    """The server takes bytes slower than they are written, and the limit of bytes that wait is reached."""

    error_code = "bus_outbound_full"


class InboxFull(TransientError):
    """As many requests as allowed wait for replies."""

    error_code = "bus_inbox_full"


class PayloadTooLarge(PermanentError):
    """Headers and payload together are larger than the server takes; nothing was sent."""

    error_code = "payload_too_large"
    status_hint = 413


class InvalidSubject(PermanentError, ValueError):
    """The subject would not reach the server as one word; nothing was sent."""

    error_code = "invalid_subject"


class ProtocolError(PermanentError):
    """The bytes are not what the NATS client protocol allows; the message says what is wrong."""

    error_code = "bus_protocol_error"

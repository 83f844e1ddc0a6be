"""Answers who asks for what a process logged before: for `muster logs`, which would else begin with nothing.

Why the answers are published and not replied: a process that runs user code must not be able to answer on the inboxes
of people's tools.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from serve_common.errors import BadField
from serve_common.logs.relay import pieces
from serve_common.names import check_name
from serve_common.subjects import Subjects
from serve_common.wires.logs import RecallLogs, kind_of, read_line
from serve_common.wires.unreadable import UNREADABLE


def recalled(
    payload: bytes, kind: str, recent: Sequence[bytes], subjects: Subjects
) -> Iterator[tuple[str, bytes]]:
    """Subjects and payloads to publish in answer to a `RecallLogs`. Raises `BadField` for what is none."""
    try:
        asked = msgspec.json.decode(payload, type=RecallLogs)
    except UNREADABLE as error:
        raise BadField("recall", str(error)) from error
    subject = subjects.recalled_log(check_name(asked.token, "token"), kind)
    read = [(line, read_line(line)) for line in recent]
    wanted = [(line, fields) for line, fields in read if asked.filter.matches(kind_of(fields, kind), fields)]
    wanted.sort(key=lambda each: str(each[1].get("timestamp", "")))
    for piece, _ in pieces([line for line, _ in wanted[-asked.limit :]] if asked.limit > 0 else []):
        yield subject, piece

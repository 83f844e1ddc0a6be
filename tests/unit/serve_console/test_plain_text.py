"""Text of users without what only a terminal understands."""

from __future__ import annotations

import pytest

from serve_console.core.plain_text import strip_escapes
from serve_console.web.shared import encode_event


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[1;31mred\x1b[0m", "red"),
        ("\x9b31mred\x9b0m", "red"),
        ("\x1b]8;;https://example.org\x07link\x1b]8;;\x1b\\", "link"),
        ("\x1b]0;never ends", ""),
        ("\x1b(B\x1bcreset", "reset"),
        ("bell\x07 null\x00 delete\x7f", "bell null delete"),
        ("one\r\ntwo\rthree\u2028four\n\tfive", "one\ntwo\nthree\nfour\n\tfive"),
        ("\u202egnp.exe", "gnp.exe"),
        ("Zürich 東京 🚀 é", "Zürich 東京 🚀 é"),
    ],
)
def test_escapes_are_stripped_and_text_stays(text: str, shown: str) -> None:
    assert strip_escapes(text) == shown


def test_no_text_ends_an_event_of_a_stream() -> None:
    event = encode_event("log", "one\r\revent: banner\rdata: two\nthree\r\n")
    assert (
        event
        == b"event: log\ndata: one\ndata: \ndata: event: banner\ndata: data: two\ndata: three\ndata: \n\n"
    )

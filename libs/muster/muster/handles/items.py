"""The items of a streamed answer, taken out of its pieces wherever those were cut.

Why pure: the cuts are the bus' and can be anywhere, so every place is tested.
"""

from __future__ import annotations

from typing import Final, final

from muster.handles.pickles import BODY_BYTES_MAX
from serve_common.dispatch.errors import AnswerUnusable

_LENGTH_BYTES: Final = 4
_NOTHING: Final = memoryview(b"")


@final
class ItemReader:
    """Takes pieces, gives items: each stands after its length (4 bytes, big endian)."""

    __slots__ = ("_at", "_needed_bytes", "_parts", "_parts_bytes", "_view")

    def __init__(self) -> None:
        self._view = _NOTHING
        self._at = 0
        self._parts: list[memoryview] = []
        """Of an item that is not whole yet; joined once, when it is."""
        self._parts_bytes = 0
        self._needed_bytes = 0

    @property
    def is_between_items(self) -> bool:
        """True when nothing of a further item has come."""
        return not self._parts and self._at == len(self._view)

    def feed(self, piece: memoryview) -> None:
        """Take the next piece; only when `next_item` has given all it could."""
        if self._parts:
            self._parts.append(piece)
            self._parts_bytes += len(piece)
            if self._parts_bytes < self._needed_bytes:
                return
            piece = memoryview(b"".join(self._parts))
            self._parts = []
        self._view, self._at = piece, 0

    def next_item(self) -> memoryview | None:
        """The next item; None when more must be fed first. Raises `AnswerUnusable` for one that is too large."""
        view, at = self._view, self._at
        left_bytes = len(view) - at
        needed_bytes = _LENGTH_BYTES
        if left_bytes >= _LENGTH_BYTES:
            needed_bytes += int.from_bytes(view[at : at + _LENGTH_BYTES], "big")
            if needed_bytes > BODY_BYTES_MAX + _LENGTH_BYTES:
                raise AnswerUnusable(f"an item of {needed_bytes} bytes; at most {BODY_BYTES_MAX} are taken")
            if left_bytes >= needed_bytes:
                self._at = at + needed_bytes
                return view[at + _LENGTH_BYTES : at + needed_bytes]
        if left_bytes:
            self._parts = [view[at:]]
            self._parts_bytes, self._needed_bytes = left_bytes, needed_bytes
            self._view, self._at = _NOTHING, 0
        return None

"""Differences of lists of lines, at a cost that is bounded whatever the lines are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import unified_diff
from typing import Final

_COMPARED_MAX: Final = 400
"""Lines of each side between the equal beginning and end: to compare them takes the square of their number."""


def compare_lines(old: Sequence[str], new: Sequence[str], context: int) -> Iterator[str]:
    """Lines of a unified difference without its heading; where much differs only the first of it."""
    shortest = min(len(old), len(new))
    start = next((at for at in range(shortest) if old[at] != new[at]), shortest)
    most = shortest - start
    end = next((at for at in range(most) if old[-1 - at] != new[-1 - at]), most)
    first = max(0, start - context)
    before, after = (_cut(lines, first, len(lines) - max(0, end - context)) for lines in (old, new))
    found = unified_diff(before, after, n=context, lineterm="")
    for number, line in enumerate(found):
        if number >= 2:
            yield line
    left_out = max(len(lines) - end - start for lines in (old, new)) - _COMPARED_MAX
    if left_out > 0:
        yield f"@@ {left_out} more lines are not compared @@"


def _cut(lines: Sequence[str], first: int, last: int) -> Sequence[str]:
    return lines[first : min(last, first + _COMPARED_MAX)]

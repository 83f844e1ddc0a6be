"""Which names are on a page of a list.

Why by name and not by number: between two pages things come and go, and what was there all the time must be on exactly
one of them.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import Final, TypeVar

from serve_common.errors import BadField
from serve_common.wires.queries import PAGE_LIMIT_MAX, PagedQuery

Name = TypeVar("Name", bound=str)

ALL: Final = PagedQuery()
"""Everything on one page."""


def page_of(names: Iterable[Name], query: PagedQuery) -> list[Name]:
    """The names that the query asks for, in order. Raises `BadField` for a limit outside 1 to `PAGE_LIMIT_MAX`."""
    later = (name for name in names if name > query.after)
    if query.limit is None:
        return sorted(later)
    return heapq.nsmallest(checked_limit(query.limit, PAGE_LIMIT_MAX), later)


def checked_limit(limit: int, limit_max: int) -> int:
    """``limit`` when it is within 1 to ``limit_max``; raises `BadField` otherwise."""
    if not 1 <= limit <= limit_max:
        shown = limit if abs(limit) < 10**18 else "far too large" if limit > 0 else "far too small"
        raise BadField("limit", f"is {shown}; it must be between 1 and {limit_max}")
    return limit

"""A whole private Muster with the no-op example deployed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from serve_common.errors import PermanentError


@asynccontextmanager
async def running_muster(directory: Path) -> AsyncIterator[str]:
    """The URL of the no-op deployment."""
    raise PermanentError("TBD")
    yield ""

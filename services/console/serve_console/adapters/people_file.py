"""The people who may sign in, read again whenever their file changes."""

from __future__ import annotations

from pathlib import Path
from typing import final

import structlog

from serve_common.identities.people import PeopleUnusable, Person, decode_people

_log = structlog.get_logger(__name__)


@final
class PeopleFile:
    """`console_users.json`, which `muster console user` writes in place."""

    def __init__(self, path: Path) -> None:
        """Nothing is read yet."""
        self._path = path
        self._seen: tuple[int, int] | None = None
        self._people: dict[str, Person] = {}

    def read(self) -> dict[str, Person]:
        """The people by name. A file that cannot be read leaves them as they were: it may be half-written."""
        try:
            state = self._path.stat()
            seen = (state.st_mtime_ns, state.st_size)
            if seen != self._seen:
                self._people = decode_people(self._path.read_text(encoding="utf-8"))
                self._seen = seen
        except (OSError, UnicodeDecodeError, PeopleUnusable) as error:
            _log.warning("console_users_unreadable", path=str(self._path), reason=str(error))
        return self._people

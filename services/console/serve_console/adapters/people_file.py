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
        # One value, as several threads read at once.
        self._found: tuple[tuple[int, int] | None, dict[str, Person]] = (None, {})

    def read(self) -> dict[str, Person]:
        """The people by name; none without a file.

        A file that cannot be read leaves them as they were: it may be half-written.
        """
        seen, people = self._found
        try:
            state = self._path.stat()
            now = (state.st_mtime_ns, state.st_size)
            if now != seen:
                people = decode_people(self._path.read_text(encoding="utf-8"))
                self._found = (now, people)
        except FileNotFoundError:
            if people:
                _log.warning("console_users_removed", path=str(self._path))
            self._found = (None, {})
            return {}
        except (OSError, UnicodeDecodeError, PeopleUnusable) as error:
            _log.warning("console_users_unreadable", path=str(self._path), reason=str(error))
        return people

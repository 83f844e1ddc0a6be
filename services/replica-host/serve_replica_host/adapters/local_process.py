"""A process of this machine, held so that its pid can never be taken for a later one's.

Why: a replica that survives Ray's kill is killed by the kernel. Its pid was told long before, and a pid that has
become free is given to somebody else.
"""

from __future__ import annotations

import os
import signal
from typing import Final, final

import structlog

_log = structlog.get_logger(__name__)

_HAS_HANDLES: Final = hasattr(os, "pidfd_open")


@final
class LocalProcess:
    """A process that is alive when this is made. Close it, or a file descriptor leaks."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._handle: int | None = None
        self._is_gone = False
        if not _HAS_HANDLES:  # only Linux has them
            return
        try:
            self._handle = os.pidfd_open(pid)
        except ProcessLookupError:
            self._is_gone = True
        except OSError as error:  # forbidden, or too many: then the pid must do
            _log.warning("process_without_handle", pid=pid, error=str(error))

    def kill(self) -> bool:
        """SIGKILL. False when there is no such process any more."""
        if self._is_gone:
            return False
        try:
            if self._handle is not None:
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)
            else:
                os.kill(self._pid, signal.SIGKILL)
        except ProcessLookupError:
            self._is_gone = True
        return not self._is_gone

    def close(self) -> None:
        """Let go of the process; harmless when done twice."""
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)

"""What a replica does otherwise on another machine than its host's: it keeps what else it would write to the host."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import final

from serve_common.adapters.system_clock import SystemClock
from serve_common.names import BackendTag, ReplicaTag
from serve_replica_host.replica.fetched import Fetched, KeptLines, read_files
from serve_replica_host.replica.log_lines import own_stderr
from serve_replica_host.replica.logs import log_ids
from serve_replica_host.replica.private_directory import make_private_directory


@final
class FarSide:
    """Of one process. Methods may be called from any thread, `fetch` from one at a time."""

    def __init__(self, *, has_metrics: bool) -> None:
        """Raises OSError when there is no room for temporary files."""
        self._directory = make_private_directory(SystemClock().now()) if has_metrics else None
        self._lines: KeptLines | None = None

    @property
    def metrics_dir(self) -> str:
        """prometheus_client's multiprocess directory of this process alone; empty for none."""
        return "" if self._directory is None else str(self._directory)

    def keep_lines(self, replica_tag: ReplicaTag, backend_tag: BackendTag) -> Callable[[bytes], None]:
        """The way for the log lines of the replica that this process has become."""
        ids = {"service": "replica", **log_ids(replica_tag, backend_tag)}
        self._lines = KeptLines(own_stderr(), ids, SystemClock())
        return self._lines.keep

    def fetch(self, *, with_lines: bool) -> Fetched:
        """All metrics as they are now, and the lines since the last time. Raises OSError."""
        files, left_out_bytes = ({}, 0) if self._directory is None else read_files(Path(self._directory))
        lines = self._lines.give() if with_lines and self._lines is not None else b""
        return Fetched(files, lines, left_out_bytes)

    def leave(self) -> Fetched:
        """The last fetch of a process that has nothing more to say."""
        last = self.fetch(with_lines=True)
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
        return last

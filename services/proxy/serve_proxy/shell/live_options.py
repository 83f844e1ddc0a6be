"""The HTTP options in force, kept up with the bucket while requests run.

Why a state of its own: middlewares are imported, which takes time and can fail. Until they are there, and when they
cannot be, what was in force stays so, and the proxy must not call the snapshot applied before that is settled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Generic, TypeVar, final

import structlog

from serve_common.errors import BadField, ServeError
from serve_common.routing.snapshot_table import HttpChange
from serve_common.tasks import OwnedTask, TaskOwner
from serve_common.values.http_options import HttpOptions, check_http_options

_log = structlog.get_logger(__name__)

LOAD_TIMEOUT_S: Final = 30.0
"""How long importing middlewares may take together."""
_ERROR_LENGTH_MAX: Final = 1000

M = TypeVar("M")
"""Loaded middlewares; only the adapter looks into them."""


class MiddlewareRefused(ServeError):
    """A middleware cannot be imported, or is none."""

    error_code = "middleware_refused"


@final
class LiveOptions(Generic[M]):
    """Takes over one `HttpChange` after the other."""

    def __init__(
        self,
        defaults: HttpOptions,
        *,
        nothing: M,
        load: Callable[[Sequence[str]], Awaitable[M]],
        use: Callable[[HttpOptions, M], None],
        on_settled: Callable[[int], None],
    ) -> None:
        """``defaults`` hold until a snapshot says otherwise; ``nothing`` stands for no middlewares.

        ``load`` imports middlewares and raises `MiddlewareRefused`; ``use`` puts options in force for requests that
        arrive from then on; ``on_settled`` is told the snapshot id that is in force or refused, with all before it.
        """
        self.options = defaults
        """In force for requests that arrive now."""
        self.error = ""
        """Why the newest snapshot is not in force; empty when it is."""
        self.error_snapshot_id = 0
        """Of that snapshot."""
        self._defaults = defaults
        self._load = load
        self._use = use
        self._on_settled = on_settled
        self._tasks = TaskOwner("live_options")
        self._nothing = self._loaded = nothing
        self._loading: OwnedTask | None = None
        self._newest_id = 0

    @property
    def why_not_in_force(self) -> str | None:
        """Why the newest options are not in force (yet); None when they are."""
        if self._loading is not None:
            return "the middlewares are being imported"
        return self.error or None

    def take(self, change: HttpChange) -> None:
        """Put ``change`` in force: at once where nothing is to be imported, otherwise in the background.

        Only the newest counts: an import that is under way for an older one is no longer waited for.
        """
        if 0 < change.snapshot_id <= self._newest_id:
            return  # told again
        self._newest_id = max(self._newest_id, change.snapshot_id)
        if self._loading is not None:
            self._loading.cancel()
            self._loading = None
        if self._put_at_once(change):
            self._on_settled(change.snapshot_id)
        else:
            self._loading = self._tasks.start(self._load_and_put(change), name="load")

    async def close(self, timeout_s: float) -> None:
        """Stop what is under way."""
        await self._tasks.close(timeout_s)

    def _options_of(self, change: HttpChange) -> HttpOptions:
        return self._defaults if change.options is None else change.options

    def _put_at_once(self, change: HttpChange) -> bool:
        """False when something is to be imported first."""
        middlewares = self._options_of(change).middlewares
        if middlewares and middlewares != self.options.middlewares:
            return False
        self._put(change, self._loaded if middlewares else self._nothing)
        return True

    async def _load_and_put(self, change: HttpChange) -> None:
        middlewares = self._options_of(change).middlewares
        try:
            async with asyncio.timeout(LOAD_TIMEOUT_S):
                loaded = await self._load(middlewares)
        except MiddlewareRefused as error:
            self._refuse(change, str(error))
        except TimeoutError:
            self._refuse(change, f"importing {', '.join(middlewares)} took more than {LOAD_TIMEOUT_S:g} s")
        else:
            self._put(change, loaded)
        self._loading = None
        self._on_settled(change.snapshot_id)

    def _put(self, change: HttpChange, loaded: M) -> None:
        options = self._options_of(change)
        try:
            if change.options is not None:
                check_http_options(options)
        except BadField as error:
            self._refuse(change, str(error))
            return
        self._use(options, loaded)
        self.options, self._loaded = options, loaded
        self.error, self.error_snapshot_id = "", 0
        _log.info(
            "http_options_in_force",
            snapshot_id=change.snapshot_id,
            request_timeout_s=options.request_timeout_s,
            body_bytes_max=options.body_bytes_max,
            middlewares=options.middlewares,
            access_log=options.access_log,
        )

    def _refuse(self, change: HttpChange, reason: str) -> None:
        self.error = reason[:_ERROR_LENGTH_MAX]
        self.error_snapshot_id = change.snapshot_id
        _log.error("http_options_refused", snapshot_id=change.snapshot_id, reason=self.error)

"""Uploaded code: rows in the store are the truth, the bucket from which hosts fetch it is a cache.

Pages are written to the store as they arrive, so an upload needs no memory; code is complete only once its digest was
verified. What deploys name it must be complete, and is in the bucket before the command is recorded, unless NATS is
away: a host that misses code says so in its reports, and gets it then. The bucket may be lost at any time.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable
from typing import Any, Final

import msgspec
import structlog

from serve_common.api.commands import Command, UploadCode
from serve_common.config.autoscaling import AutoscalingPolicy
from serve_common.config.backend import ReplicaConfig
from serve_common.errors import BadField, LimitReached, NotFound, ServeError, TransientError
from serve_common.protocol.code import CODE_BYTES_MAX, PAGE_BYTES_MAX
from serve_common.values import check_digest
from serve_controller.core.checkpoint import Checkpoint
from serve_controller.ports import CodeBucket, CodeRows

_log = structlog.get_logger()

UPLOADS_MAX: Final = 32
"""Most uploads in progress; beyond it the one begun longest ago is dropped."""
UNUSED_S: Final = 3600.0
"""Seconds after its last upload or deploy for which code that nothing names is kept."""
TRIM_EVERY_S: Final = 600.0
_PAGES_MAX: Final = CODE_BYTES_MAX // PAGE_BYTES_MAX


class _Upload:
    """The part of an upload that has arrived."""

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self.next_page = 0
        self.hash = hashlib.sha256()


class CodeStore:
    """Receives uploads, and sees to it that hosts can fetch what is deployed."""

    def __init__(self, rows: CodeRows, bucket: CodeBucket) -> None:
        self._rows = rows
        self._bucket = bucket
        self._uploads: dict[str, _Upload] = {}
        self._published: set[str] = set()
        """Code known to be in the bucket; forgotten when a host misses one."""
        self._publishing = asyncio.Lock()

    async def take(self, command: UploadCode) -> bool:
        """Receive a page; returns whether the code is complete.

        Raises `BadField` for a page out of order and for code that is not what its digest says, `LimitReached` for a
        size, and `StoreUnavailable`.
        """
        digest = check_digest(command.digest, "digest")
        if not 0 <= command.pages <= _PAGES_MAX:
            raise LimitReached(f"pages: code has at most {CODE_BYTES_MAX} bytes")
        if await self._rows.touch_code([digest]):
            return True
        if command.pages == 0:
            return False
        if not 0 <= command.page < command.pages:
            raise BadField("page", f"must be 0 to {command.pages - 1}")
        is_last = command.page == command.pages - 1
        if len(command.data) > PAGE_BYTES_MAX or (not is_last and len(command.data) != PAGE_BYTES_MAX):
            raise LimitReached(
                f"data: all pages but the last have {PAGE_BYTES_MAX} bytes, the last at most as many"
            )
        upload = self._get_upload(digest, command)
        if command.page > upload.next_page or upload.pages != command.pages:
            raise BadField("page", "comes before the one before it; send all pages anew, from 0")
        if command.page < upload.next_page:
            return False  # a retry, or another upload of the same code
        await self._rows.add_code_page(digest, command.page, command.data)
        if self._uploads.get(digest) is not upload or upload.next_page != command.page:
            return False  # another upload of the same code went on meanwhile
        upload.hash.update(command.data)
        upload.next_page += 1
        if not is_last:
            return False
        del self._uploads[digest]
        found = upload.hash.hexdigest()
        if found != digest:
            raise BadField(
                "digest", f"is {digest}, and what arrived has the digest {found}; nothing was stored"
            )
        await self._rows.complete_code(digest, command.pages)
        return True

    def _get_upload(self, digest: str, command: UploadCode) -> _Upload:
        known = self._uploads.get(digest)
        if known is not None:
            return known
        if command.page > 0:
            raise BadField("page", "comes before the one before it; send all pages anew, from 0")
        while len(self._uploads) >= UPLOADS_MAX:
            del self._uploads[next(iter(self._uploads))]
        upload = self._uploads[digest] = _Upload(command.pages)
        return upload

    async def read(self, digest: str, page: int) -> tuple[bytes, int]:
        """A page of stored code, and the number of its pages. Raises `NotFound`, `BadField`, and `StoreUnavailable`."""
        pages = await self._rows.code_pages(check_digest(digest, "code"))
        if pages and not 0 <= page < pages:
            raise BadField("page", f"must be 0 to {pages - 1}")
        data = await self._rows.read_code_page(digest, page) if pages else None
        if data is None:
            raise NotFound(f"code: {digest} is not stored")
        return data, pages

    async def prepare(self, command: Command[Any]) -> None:
        """Make the code that a command names available to hosts. Raises `BadField` when it was not uploaded."""
        fields = dict(_named_by(command))
        if not fields:
            return
        known = await self._rows.touch_code(fields)
        for digest, field in fields.items():
            if digest not in known:
                raise BadField(field, f"{check_digest(digest, field)} is not stored; upload the code first")
        await self.publish(fields)

    async def publish(self, digests: Iterable[str], *, again: bool = False) -> None:
        """Put code into the bucket, unless it is known to be there; ``again``: a host did not find it.

        Failures are logged: hosts go on to report what they miss.
        """
        async with self._publishing:
            for digest in digests:
                if again:
                    self._published.discard(digest)
                try:
                    await self._publish(digest)
                except TransientError as error:
                    _log.warning("code_not_published", digest=digest, error=str(error))

    async def _publish(self, digest: str) -> None:
        if digest in self._published:
            return
        pages = await self._rows.code_pages(digest)
        if pages and not await self._bucket.has_code(digest, pages):
            for page in range(pages):
                data = await self._rows.read_code_page(digest, page)
                if data is None:
                    return  # deleted meanwhile
                await self._bucket.put_code_page(digest, page, pages, data)
            _log.info("code_published", digest=digest, pages=pages)
        if pages:
            self._published.add(digest)

    async def trim(self, checkpoint: Checkpoint) -> None:
        """Delete code that nothing in ``checkpoint`` names and that was not used for `UNUSED_S`."""
        for digest in await self._rows.trim_code(sorted(named_code(checkpoint)), UNUSED_S):
            self._published.discard(digest)
            try:
                await self._bucket.drop_code(digest)
            except ServeError as error:  # the bucket drops the oldest by itself
                _log.warning("code_not_dropped", digest=digest, error=str(error))


def named_code(checkpoint: Checkpoint) -> set[str]:
    """Digests of all code that a version or a revision names."""
    versions = [version for backend in checkpoint.backends.values() for version in backend.versions()]
    versions += [
        revision.version for revisions in checkpoint.revisions.values() for revision in revisions.values()
    ]
    named = {digest for version in versions for digest in version.replica_config.uploads.values()}
    scalings = [version.backend_config.autoscaling_config for version in versions]
    return named | {each.policy.code for each in scalings if each is not None and each.policy.code}


def _named_by(value: Any, at: str = "") -> Iterable[tuple[str, str]]:
    """Code that a command names, each with the path of the field that names it."""
    if isinstance(value, ReplicaConfig):
        for field, digest in value.uploads.items():
            yield digest, f"{at}.{field}"
    elif isinstance(value, AutoscalingPolicy):
        if value.code:
            yield value.code, f"{at}.code"
    elif isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            yield from _named_by(getattr(value, name), f"{at}.{name}" if at else name)
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _named_by(inner, f"{at}[{number}]")

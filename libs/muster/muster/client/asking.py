"""Asks the admin API one thing, and asks again while what is wrong may pass.

Why it retries: a controller that dies is back, or replaced, within seconds, and every verb is idempotent (changes that
are not so by themselves carry an id that is made once), so a caller need not know that it happened. What is wrong for
good is raised at once.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

import msgspec

from muster.client.ports import NoAnswer, NobodyListens, Requests
from muster.client.replies import read_reply
from serve_common.errors import FencedOut, LimitReached, ServeError, TransientError
from serve_common.subjects import Subjects
from serve_common.wires.admin import VERBS, WHO_HEADER, WHO_LENGTH_MAX
from serve_common.wires.commands import Command, Request
from serve_common.wires.queries import PagedQuery

ATTEMPT_S: Final = 5.0
"""How long one try waits for its answer; a reply lost with its controller costs this much."""
PAGE_LIMIT: Final = 500
"""How much of a list is asked for at once."""

VERB_OF: Final = {request_type: verb for verb, (request_type, _reply_type) in VERBS.items()}

Item = TypeVar("Item")


def ignore(_what: object) -> None:
    """Hear something and do nothing."""
    return


class Asker:
    """Sends requests to whichever controller leads. Errors are those of `serve_common.errors`, as it raised them."""

    def __init__(
        self,
        requests: Requests,
        subjects: Subjects,
        *,
        who: str = "",
        headers: Mapping[str, str] | None = None,
        retry_for_s: float = 30.0,
        retry_pause_s: float = 0.25,
        on_retry: Callable[[str], None] = ignore,
    ) -> None:
        """Transient errors are tried again for ``retry_for_s``; ``on_retry`` hears why, for people.

        ``who`` stands in the audit log beside every change; empty says nothing. ``headers`` go with every change too.
        """
        self._requests = requests
        self._subjects = subjects
        own = {WHO_HEADER: who[:WHO_LENGTH_MAX]} if who else {}
        self._headers = {**(headers or {}), **own} or None
        self._retry_for_s = retry_for_s
        self._retry_pause_s = retry_pause_s
        self._on_retry = on_retry

    async def ask(self, request: Request, *, attempt_s: float = ATTEMPT_S) -> Any:
        """The reply, of the type that `VERBS` names."""
        verb = VERB_OF[type(request)]
        subject = self._subjects.admin(verb)
        is_command = isinstance(request, Command)
        body = msgspec.json.encode(with_request_id(request) if is_command else request)
        headers = self._headers if is_command else None
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + self._retry_for_s
        while True:
            try:
                answer = await self._requests.request(subject, body, timeout_s=attempt_s, headers=headers)
                return read_reply(verb, answer, VERBS[verb][1])
            # Fenced out means for us that another controller leads by now: ask that one.
            except (TransientError, FencedOut) as error:
                if loop.time() + self._retry_pause_s >= give_up_at:
                    raise self._last_word(error) from error
                self._on_retry(str(self._last_word(error)))
            await asyncio.sleep(self._retry_pause_s)

    async def ask_all(self, query: PagedQuery, name_of: Callable[[Item], str]) -> list[Item]:
        """The whole list, page by page, unless ``query`` asks for one page by its ``limit``.

        A page that is too large for one message is asked for again in smaller ones.
        """
        if query.limit is not None:
            page: list[Item] = await self.ask(query)
            return page
        whole: list[Item] = []
        after, limit = query.after, PAGE_LIMIT
        while True:
            try:
                page = await self.ask(msgspec.structs.replace(query, limit=limit, after=after))
            except LimitReached:
                if limit == 1:
                    raise
                limit = max(1, limit // 4)
                continue
            whole.extend(page)
            if len(page) != limit:
                return whole
            last = name_of(page[-1])
            if last <= after:
                raise ServeError(f"the answer to {VERB_OF[type(query)]} repeats itself after {after!r}")
            after = last

    def _last_word(self, error: ServeError) -> ServeError:
        if isinstance(error, NobodyListens):
            return TransientError(f"no controller answers at {self._requests.where}; is one running?")
        if isinstance(error, NoAnswer):
            return TransientError(f"no controller answered in time at {self._requests.where}: {error}")
        return error


class Asking:
    """What asks: base of the commands and of the queries."""

    def __init__(self, asker: Asker) -> None:
        """``asker`` reaches the controller that leads."""
        self._asker = asker


def with_request_id(request: Request) -> Request:
    """The same, with an id of its own where one belongs there and none was given."""
    if getattr(request, "request_id", "") is not None:
        return request
    return msgspec.structs.replace(request, request_id=uuid.uuid4().hex)

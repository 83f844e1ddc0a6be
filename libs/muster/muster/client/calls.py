"""A call of an endpoint by plain request and reply, as any NATS client would make it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from muster.client.ports import Answer, NoAnswer, NobodyListens, Requests
from muster.client.replies import error_of
from serve_common.errors import DeadlineExceeded, TransientError
from serve_common.names import EndpointTag, deployment_tag
from serve_common.subjects import Subjects


class Caller:
    """Calls endpoints through the proxies' gateway."""

    def __init__(
        self,
        requests: Requests,
        subjects: Subjects,
        *,
        retry_for_s: float = 5.0,
        retry_pause_s: float = 0.25,
    ) -> None:
        """A call that nobody heard is sent again for ``retry_for_s``; any other is sent once."""
        self._requests = requests
        self._subjects = subjects
        self._retry_for_s = retry_for_s
        self._retry_pause_s = retry_pause_s

    async def call(self, name: str, body: bytes, *, headers: Mapping[str, str], timeout_s: float) -> Answer:
        """The endpoint's answer.

        Raises `BadField` for a name that cannot be, `TransientError` when no proxy listens, `DeadlineExceeded`, and
        the error that the answer bears.
        """
        subject = self._subjects.call(EndpointTag(deployment_tag(name)))
        loop = asyncio.get_running_loop()
        begun = loop.time()
        while True:
            try:
                left_s = max(0.1, begun + timeout_s - loop.time())
                answer = await self._requests.request(subject, body, timeout_s=left_s, headers=headers)
                break
            except NobodyListens as error:
                if loop.time() >= begun + min(self._retry_for_s, timeout_s):
                    raise TransientError(
                        f"no proxy answers calls at {self._requests.where}; is one running?"
                    ) from error
            except NoAnswer as error:
                raise DeadlineExceeded(f"{name} did not answer within {timeout_s:g} s: {error}") from error
            await asyncio.sleep(self._retry_pause_s)
        failure = error_of(answer)
        if failure is not None:
            raise failure
        return answer

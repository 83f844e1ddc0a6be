"""The whole admin API of one stack: a method for each verb, which survives the death of the controller it was sent to.

Why three files behind it: commands and queries change when the API does, and how a leader is found and asked does not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from muster.client.asking import Asker, ignore
from muster.client.changes import Changes
from muster.client.ports import Requests
from muster.client.queries import Queries
from serve_common.subjects import Subjects


class AdminClient(Changes, Queries):
    """The admin API of one stack. Errors are those of `serve_common.errors`, as the controller raised them."""

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
        """See `Asker`."""
        super().__init__(
            Asker(
                requests,
                subjects,
                who=who,
                headers=headers,
                retry_for_s=retry_for_s,
                retry_pause_s=retry_pause_s,
                on_retry=on_retry,
            )
        )

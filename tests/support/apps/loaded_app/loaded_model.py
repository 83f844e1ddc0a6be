"""What the tests under load serve: no work but the waiting that is asked for, and an answer that tells who gave it."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

from starlette.requests import Request


class Loaded:
    """Answers ``version, configuration, process, host``, and after an empty line what was posted.

    What posts ``die``, or says so in its query, ends its process.
    """

    def __init__(self, version: str) -> None:
        self._version = version
        self._configuration = "none"

    def reconfigure(self, user_config: Any) -> None:
        self._configuration = str(user_config)

    async def __call__(self, request: Request) -> bytes:
        body = await request.body()
        if body == b"die" or "die" in request.query_params:
            os._exit(1)
        if "record" in request.query_params:
            with Path(request.query_params["record"]).open("a") as runs:  # noqa: ASYNC230 - a line
                runs.write(f"{request.query_params['number']}\n")
        await asyncio.sleep(float(request.query_params["work_s"]))
        # The stack marks all that a host's process starts with the host's name.
        who = (self._version, self._configuration, str(os.getpid()), os.environ.get("MUSTER_PROCESS", ""))
        return "\n".join(who).encode() + b"\n\n" + body

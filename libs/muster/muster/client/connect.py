"""Connects to a stack, and calls its endpoints."""

from __future__ import annotations

import asyncio
import getpass
import os
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

import msgspec

from muster.client.address import StackAddress
from muster.client.admin import AdminClient
from muster.client.requests import AdminReply, NoListeners, NoReply, Requests, parse_error
from serve_common.api.queries import PRINCIPAL_LENGTH_MAX
from serve_common.errors import DeadlineExceeded, TransientError
from serve_common.names import EndpointTag, deployment_tag
from serve_common.protocol.subjects import Subjects
from serve_common.telemetry.trace_context import headers_from_environment


class Caller:
    """Calls endpoints through the proxies' gateway, by plain request and reply, as any NATS client can."""

    def __init__(
        self,
        requests: Requests,
        subjects: Subjects,
        *,
        retry_for_s: float = 5.0,
        retry_pause_s: float = 0.25,
    ) -> None:
        """A call without any listener is sent again for ``retry_for_s``; any other is sent once."""
        self._requests = requests
        self._subjects = subjects
        self._retry_for_s = retry_for_s
        self._retry_pause_s = retry_pause_s

    async def call(
        self, name: str, body: bytes, *, headers: Mapping[str, str], timeout_s: float
    ) -> AdminReply:
        """Send one request to an endpoint and return its response.

        Raises `BadField` for an invalid name, `TransientError` when no proxy listens, `DeadlineExceeded`, and the error
        that the response carries.
        """
        subject = self._subjects.call(EndpointTag(deployment_tag(name)))
        loop = asyncio.get_running_loop()
        started_at = loop.time()
        while True:
            try:
                left_s = max(0.1, started_at + timeout_s - loop.time())
                reply = await self._requests.request(subject, body, timeout_s=left_s, headers=headers)
                break
            except NoListeners as error:
                if loop.time() >= started_at + min(self._retry_for_s, timeout_s):
                    raise TransientError(
                        f"no proxy answers calls at {self._requests.where}; is one running?"
                    ) from error
            except NoReply as error:
                raise DeadlineExceeded(f"{name} did not answer within {timeout_s:g} s: {error}") from error
            await asyncio.sleep(self._retry_pause_s)
        failure = parse_error(reply)
        if failure is not None:
            raise failure
        return reply


def default_principal() -> str:
    """``user@host`` in characters that a NATS header can carry, at most `PRINCIPAL_LENGTH_MAX` of them.

    In the audit log it is a claim, not a proof.
    """
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = f"uid-{os.getuid()}"  # a container's user often has no name
    principal = f"{user}@{socket.gethostname()}"
    return "".join(char if char.isascii() and char.isprintable() else "?" for char in principal)[
        :PRINCIPAL_LENGTH_MAX
    ]


class Stack(msgspec.Struct, frozen=True):
    """A connected stack."""

    admin: AdminClient
    caller: Caller


@asynccontextmanager
async def connect_stack(
    address: StackAddress,
    *,
    connect_within_s: float = 5.0,
    retry_for_s: float = 30.0,
    on_retry: Callable[[str], None] = lambda _why: None,
    principal: str | None = None,
) -> AsyncIterator[Stack]:
    """Connect, and disconnect at the end.

    ``principal`` is the name in the audit log; None is ``user@host`` of this process.

    Changes belong to the trace in the environment variables TRACEPARENT and TRACESTATE, if they are set.

    Raises `BusUnavailable` when NATS does not answer within ``connect_within_s``, and `BusAuthorizationFailed`.
    """
    # Only here: the driver takes longer to import than `muster --help` should take.
    from muster.client.nats import NatsRequests  # noqa: PLC0415 - as above

    requests = NatsRequests(address)
    subjects = Subjects(address.subject_prefix)
    principal = default_principal() if principal is None else principal
    try:
        await requests.connect(within_s=connect_within_s, on_retry=on_retry)
        yield Stack(
            admin=AdminClient(
                requests,
                subjects,
                principal=principal,
                headers=headers_from_environment(os.environ),
                retry_for_s=retry_for_s,
                on_retry=on_retry,
            ),
            caller=Caller(requests, subjects),
        )
    finally:
        await requests.close()

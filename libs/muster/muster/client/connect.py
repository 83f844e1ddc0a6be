"""Joins the client's parts for one address."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec

from muster.client.address import StackAddress
from muster.client.admin import AdminClient
from muster.client.calls import Caller
from muster.client.who import who_am_i
from serve_common.subjects import Subjects
from serve_common.tracing.trace_context import headers_of_environment


class Stack(msgspec.Struct, frozen=True):
    """A stack that was reached."""

    admin: AdminClient
    caller: Caller


@asynccontextmanager
async def connect_stack(
    address: StackAddress,
    *,
    connect_within_s: float = 5.0,
    retry_for_s: float = 30.0,
    on_retry: Callable[[str], None] = lambda _why: None,
    who: str | None = None,
) -> AsyncIterator[Stack]:
    """Connect, and let go at the end. ``who`` stands in the audit log; None is ``user@host`` of this process.

    Changes belong to the trace that TRACEPARENT and TRACESTATE name, where whatever runs this process has set them.

    Raises `BusUnavailable` when NATS does not answer within ``connect_within_s``, and `BusAuthorizationFailed`.
    """
    # Only here: the driver takes longer to import than `muster --help` should take.
    from muster.client.adapters.nats_requests import NatsRequests  # noqa: PLC0415 - as above

    requests = NatsRequests(address)
    subjects = Subjects(address.subject_prefix)
    who = who_am_i() if who is None else who
    try:
        await requests.connect(within_s=connect_within_s, on_retry=on_retry)
        yield Stack(
            admin=AdminClient(
                requests,
                subjects,
                who=who,
                headers=headers_of_environment(os.environ),
                retry_for_s=retry_for_s,
                on_retry=on_retry,
            ),
            caller=Caller(requests, subjects),
        )
    finally:
        await requests.close()

"""The admin verbs as a NATS service, offered by the leader alone.

Why nats.micro: ``nats micro ls|info|stats|ping`` and third-party clients can then discover the admin API. Only the
leader offers it, so a call without a leader fails with "no responders" at once.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import msgspec
import nats.micro
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError
from nats.micro.request import Request as MicroRequest
from nats.micro.service import EndpointInfo, Service, ServiceConfig, ServiceInfo
from opentelemetry.trace import SpanKind

from serve_common.api.queries import (
    COMMANDS,
    PRINCIPAL_HEADER,
    VERBS,
    GetAllEndpoints,
    GetSchemas,
    sanitize_principal,
)
from serve_common.api.views import EndpointView
from serve_common.errors import BadField, LimitReached, NotLeading, ServeError
from serve_common.names import DEFAULT_APPLICATION, EndpointTag
from serve_common.protocol.subjects import ADMIN_SERVICE, GATEWAY_QUEUE, MODEL_SERVICE, Subjects, is_inbox
from serve_common.runtime.tasks import TaskOwner
from serve_common.telemetry.log_lines import RateLimitedLogger
from serve_common.telemetry.request_traces import operation
from serve_common.telemetry.trace_context import TRACEPARENT, TRACESTATE
from serve_common.values import suggest
from serve_controller.shell.admin import AdminApi
from serve_controller.shell.queries import error_view

_log = structlog.get_logger()

MessageHandler = Callable[[Msg], Awaitable[None]]

CALLS_MAX = 1000
"""Most concurrent admin calls; most of them wait for goals."""
ENDPOINTS_MAX = 1000
"""Most endpoints in one reply of `ModelDirectory`, which must fit into one message."""
_UNKNOWN_QUEUE = "controllers-unknown"
"""Another queue group than that of the verbs: NATS chooses one member of a group over all subjects that match."""
_STOP_TIMEOUT_S = 2.0
_DRAIN_TIMEOUT_S = 0.5


class _InboxesOnly:
    """Client for nats.micro that passes on requests whose reply subject is an inbox, and drops all others.

    Why a wrapper of the client: nats.micro itself responds to `$SRV`, and would do so on any reply subject.
    """

    def __init__(self, client: Client, on_dropped: Callable[[], object]) -> None:
        self._client = client
        self._on_dropped = on_dropped
        self._limited_log = RateLimitedLogger(_log.warning)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def subscribe(
        self, subject: str, queue: str = "", *, cb: MessageHandler, **kwargs: Any
    ) -> Subscription:
        """Subscribe like the client, with the filter in front of ``cb``."""

        async def on_message(message: Msg) -> None:
            if is_inbox(message.reply.encode()):
                await cb(message)
                return
            self._on_dropped()
            now_s = asyncio.get_running_loop().time()
            self._limited_log.log(
                now_s, "call_without_inbox", subject=message.subject[:200], reply=message.reply[:200]
            )

        return await self._client.subscribe(subject, queue, cb=on_message, **kwargs)


class ModelDirectory(Service):
    """Lists all endpoints in the format of NATS services, so that ``nats micro info`` shows how to call them.

    Proxies serve the calls, in an account that admins do not see; the leader knows the endpoints and responds for all.
    It has no statistics: those are metrics of the proxies.
    """

    def __init__(
        self,
        client: Client,
        config: ServiceConfig,
        subjects: Subjects,
        list_endpoints: Callable[[], list[EndpointView]],
    ) -> None:
        super().__init__(client, config)
        self._subjects = subjects
        self._list_endpoints = list_endpoints

    def info(self) -> ServiceInfo:
        """The first `ENDPOINTS_MAX` endpoints as they are now."""
        endpoints = self._list_endpoints()[:ENDPOINTS_MAX]
        return dataclasses.replace(
            super().info(), endpoints=[self._endpoint_info(each) for each in endpoints]
        )

    def _endpoint_info(self, endpoint: EndpointView) -> EndpointInfo:
        tag = endpoint.endpoint_tag
        metadata = {"endpoint": tag, "methods": ",".join(endpoint.methods)}
        if endpoint.route is not None:
            metadata["route"] = endpoint.route
        return EndpointInfo(
            name=tag.removeprefix(f"{DEFAULT_APPLICATION}/").replace("/", "-"),
            subject=self._subjects.call(EndpointTag(tag)),
            queue_group=GATEWAY_QUEUE,
            metadata=metadata,
        )


class AdminService:
    """Receives admin calls from the bus and dispatches them to the handler."""

    def __init__(
        self,
        client: Client,
        subjects: Subjects,
        version: str,
        admin: AdminApi,
        on_dropped: Callable[[], object] = lambda: None,
    ) -> None:
        """``version`` is shown by ``nats micro info``.

        ``on_dropped`` is called for each call that is dropped because its reply subject is no inbox.
        """
        self._client = client
        self._guarded: Any = _InboxesOnly(client, on_dropped)
        self._subjects = subjects
        self._version = version
        self._admin = admin
        self._service: Service | None = None
        self._models: Service | None = None
        self._unknown: Subscription | None = None
        self._tasks = TaskOwner("admin_calls")

    async def offer(self) -> None:
        """Start accepting calls. Raises errors of NATS."""
        config = ServiceConfig(
            name=ADMIN_SERVICE,
            version=self._version,
            description="Muster's commands and queries",
            metadata={"schemas": self._subjects.admin(GetSchemas.verb)},
        )
        models = ServiceConfig(
            name=MODEL_SERVICE,
            version=self._version,
            description=f"Endpoints of deployed models; {self._subjects.admin(GetAllEndpoints.verb)} lists all",
        )
        self._service = await nats.micro.add_service(self._guarded, config)
        group = self._service.add_group(name=self._subjects.admin_group, queue_group="controllers")
        for verb in VERBS:
            await group.add_endpoint(name=verb, handler=self._handler(verb))
        self._models = ModelDirectory(self._guarded, models, self._subjects, self._admin.list_endpoints)
        await self._models.start()
        # Last, and withdrawn first: while it is there and a verb is not, calls of that verb would find nobody.
        self._unknown = await self._guarded.subscribe(
            self._subjects.admin(">"), _UNKNOWN_QUEUE, cb=self._on_any_verb
        )

    async def _on_any_verb(self, message: Msg) -> None:
        """Refuse a call of a verb that does not exist, which would otherwise look as if nobody led."""
        verb = message.subject.removeprefix(self._subjects.admin(""))
        if verb not in VERBS:
            await _respond_error(
                MicroRequest(message), BadField("verb", f"{verb[:80]!r} is unknown{suggest(verb, VERBS)}")
            )

    async def withdraw(self) -> None:
        """Stop accepting calls, so that callers reach the next leader; accepted calls go on."""
        service, self._service = self._service, None
        models, self._models = self._models, None
        unknown, self._unknown = self._unknown, None
        if service is None:
            return
        await self._drain_calls(service, unknown)
        try:
            async with asyncio.timeout(_STOP_TIMEOUT_S):
                if unknown is not None:
                    await unknown.unsubscribe()
                await service.stop()
                if models is not None:
                    await models.stop()
        except (NatsError, OSError, TimeoutError) as error:
            # The server drops the subscriptions with the connection, or is notified at the reconnect.
            _log.warning("service_not_withdrawn", error=repr(error))

    async def close(self) -> None:
        """Cancel the calls in progress; their callers are told to ask the next leader."""
        await asyncio.sleep(0)  # what was cancelled before it began would tell nobody
        await self._tasks.close(timeout_s=1.0)

    async def _drain_calls(self, service: Service, unknown: Subscription | None) -> None:
        """Unsubscribe, and accept all calls that the server has delivered already.

        Why: `Service.stop` drops those, and their callers would wait in vain; and the subscriptions' own ``drain``
        keeps them for the next connection if NATS becomes unavailable meanwhile.
        """
        if not self._client.is_connected:
            return
        endpoints = [endpoint._subscription for endpoint in service._endpoints]  # noqa: SLF001 - there is no other way
        known = [unknown, *endpoints]
        try:
            async with asyncio.timeout(_DRAIN_TIMEOUT_S):
                for subscription in filter(None, known):
                    await self._client._send_unsubscribe(subscription._id)  # noqa: SLF001 - as above
                for _ in range(2):  # the first PING overtakes messages that the client still buffers
                    await self._client.flush()
                for subscription in filter(None, known):
                    await subscription._pending_queue.join()  # noqa: SLF001 - as above
        except (NatsError, OSError, TimeoutError) as error:
            _log.warning("last_calls_not_taken", error=repr(error))

    def _handler(self, verb: str) -> Callable[[MicroRequest], Any]:
        async def handle(request: MicroRequest) -> None:
            # Each call in a task of its own: one that waits must not block the others of its verb.
            if len(self._tasks) >= CALLS_MAX:
                await _respond_error(request, LimitReached(f"{CALLS_MAX} admin calls are under way"))
                return
            self._tasks.start(self._handle(verb, request), name=f"admin {verb}")

        return handle

    async def _handle(self, verb: str, request: MicroRequest) -> None:
        try:
            with _traced(verb, request):
                reply = await self._admin.handle(verb, request.data, _principal(request))
        except ServeError as error:
            await _respond_error(request, error)
            return
        except asyncio.CancelledError:
            await _respond_error(request, NotLeading("this controller stops; try again"))
            raise
        except Exception:
            await _respond_error(request, ServeError("an internal error; the controller's log has it"))
            raise
        if len(reply) > self._client.max_payload:
            text = f"the answer has {len(reply)} bytes and NATS carries {self._client.max_payload} in one message"
            await _respond_error(request, LimitReached(f"{text}; ask for less: use limit and after"))
            return
        await request.respond(reply)


def _traced(verb: str, request: MicroRequest) -> AbstractContextManager[object]:
    """A span around a command; queries, which may be repeated every second, have none."""
    if verb not in COMMANDS:
        return nullcontext()
    headers = request.headers or {}
    return operation(
        f"admin {verb}",
        {"rpc.system.name": "nats", "muster.principal": _principal(request)},
        kind=SpanKind.SERVER,
        traceparent=headers.get(TRACEPARENT, ""),
        tracestate=headers.get(TRACESTATE, ""),
    )


def _principal(request: MicroRequest) -> str:
    """The caller's name for itself, sanitized."""
    return sanitize_principal((request.headers or {}).get(PRINCIPAL_HEADER, ""))


async def _respond_error(request: MicroRequest, error: ServeError) -> None:
    view = error_view(error)
    first_line = view.message.splitlines()[0][:500] if view.message else view.code
    # Headers are limited to one line of printable ASCII; the body has the full message.
    plain = "".join(c if " " <= c <= "~" else "?" for c in first_line)
    await request.respond_error(str(error.status_hint), plain, data=msgspec.json.encode(view))

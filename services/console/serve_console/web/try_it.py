"""The page Try it: calls an endpoint with the rights of the person, by a form or by hand."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Final, final
from urllib.parse import urlsplit

from starlette.datastructures import FormData, UploadFile
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from muster.client.requests import proxy_urls
from serve_common.api.views import EndpointView
from serve_common.errors import BadField, ServeError
from serve_common.names import EndpointTag
from serve_common.protocol.subjects import Subjects
from serve_common.telemetry.trace_context import TRACEPARENT, TraceParent, parse_trace_id
from serve_console.core.call_requests import (
    BODY_BYTES_MAX,
    CONTENT_TYPES,
    DEFAULT_TIMEOUT_S,
    METHOD_CHOICES,
    CallRequest,
    SentFile,
    build_free_request,
    check_request,
    parse_timeout,
)
from serve_console.core.call_results import CallFailure, CallResult, describe_reply
from serve_console.core.call_snippets import CallPlace, CallSnippet, build_snippets, clean_file_name
from serve_console.core.openapi_forms import ApiOperation, ApiSchema
from serve_console.core.openapi_requests import OperationValues, build_operation_request
from serve_console.core.system import System
from serve_console.shell.api_schemas import ApiSchemas
from serve_console.shell.sessions import PersonSession
from serve_console.web.security import FORM_PART_BYTES_MAX
from serve_console.web.shared import Shared

BY_HAND: Final = "any"
"""Key of the form without a schema."""
_FIELDS_MAX: Final = 200
_FILES_MAX: Final = 16
_MARGIN_S: Final = 2.0
"""Seconds that the proxy's own report of a timeout has to arrive."""
_TIMEOUT_HEADER: Final = "x-request-timeout-seconds"


@final
class TryPage:
    """Its routes."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._schemas = ApiSchemas(shared.clock)

    def routes(self) -> list[BaseRoute]:
        """The page, and sending."""
        return [self._shared.get("/try", self._show), self._shared.post("/try", self._send)]

    async def _show(self, request: Request, session: PersonSession) -> Response:
        query = request.query_params
        return await self._render(request, session, query.get("name", ""), query.get("op", ""))

    async def _send(self, request: Request, session: PersonSession) -> Response:
        form = await request.form(
            max_fields=_FIELDS_MAX, max_files=_FILES_MAX, max_part_size=FORM_PART_BYTES_MAX
        )
        # Browsers send lines ended by CR and LF, whatever was typed.
        values = {key: value.replace("\r\n", "\n") for key, value in form.items() if isinstance(value, str)}
        files = await _read_files(form)
        await form.close()
        system = await self._shared.hub.fresh()
        endpoint = find_endpoint(system, values.get("name", ""))
        key = values.get("op", "")
        schema = await self._find_schema(session, system, endpoint, may_read=key != BY_HAND)
        operation = None if schema is None or key == BY_HAND else schema.find(key)
        call: CallRequest | None = None
        result: CallResult | None = None
        timeout_s = DEFAULT_TIMEOUT_S
        errors: dict[str, str] = {}
        try:
            timeout_s = parse_timeout(values.get("timeout", ""))
        except BadField as error:
            errors[error.field] = error.reason
        if not session.may_call:
            errors["role"] = "your role may not call endpoints"
        if endpoint is None:
            errors["name"] = "there is no such endpoint"
        if operation is None and key != BY_HAND:
            errors["op"] = "the application does not offer this operation now; load the page again"
        call, found = _build_call(operation, values, files)
        errors |= found
        if call is not None and endpoint is not None and not errors:
            try:
                result = await self._call(session, endpoint.endpoint_tag, check_request(call), timeout_s)
            except BadField as error:
                errors[error.field] = error.reason
        snippets: list[CallSnippet] = []
        if call is not None and endpoint is not None:
            snippets = self._build_snippets(session, system, endpoint, call, timeout_s)
        if "HX-Request" in request.headers:
            labels = {field.key: field.name for field in operation.fields} if operation else {}
            part = self._shared.renderer.part
            return Response(
                part("try_parts.html", "outcome_swap", result, snippets, errors, labels, self._get_trace_url(result)),
                media_type="text/html",
            )  # fmt: skip
        return await self._render(
            request, session, values.get("name", ""), values.get("op", ""),
            values=values, errors=errors, result=result, snippets=snippets,
        )  # fmt: skip

    async def _call(self, session: PersonSession, name: str, call: CallRequest, timeout_s: int) -> CallResult:
        """Send a call, and describe what came of it."""
        traceparent = TraceParent(secrets.token_hex(16), secrets.token_hex(8), is_sampled=True).header
        headers = {"X-Serve-Method": call.method, "X-Serve-Path": call.path, _TIMEOUT_HEADER: str(timeout_s)}
        if call.query:
            headers["X-Serve-Query"] = call.query
        written = {name.lower(): value for name, value in call.headers}
        if TRACEPARENT not in written:
            headers[TRACEPARENT] = traceparent
        # A later header of the same name replaces the former, whatever its case.
        headers = {key: value for key, value in headers.items() if key.lower() not in written}
        for key, value in call.headers:
            headers[key] = value
        trace_id = parse_trace_id(written.get(TRACEPARENT, traceparent))
        started_at = self._shared.clock.now()
        try:
            reply = await session.stack.caller.exchange(
                name, call.body, headers=headers, timeout_s=timeout_s + _MARGIN_S
            )
        except BadField as error:
            raise BadField("body", error.reason) from error
        except ServeError as error:
            return CallResult(
                tone="bad",
                elapsed_ms=(self._shared.clock.now() - started_at) * 1000,
                trace_id=trace_id,
                failure=CallFailure(str(error)[:2000]),
            )
        return describe_reply(reply, elapsed_s=self._shared.clock.now() - started_at, trace_id=trace_id)

    async def _find_schema(
        self, session: PersonSession, system: System, endpoint: EndpointView | None, *, may_read: bool
    ) -> ApiSchema | None:
        if endpoint is None or not session.may_call:
            return None
        deployments = [system.find_deployment(tag) for tag in sorted(endpoint.traffic)]
        version = ",".join(view.goal_id for view in deployments if view is not None)
        return await self._schemas.get(session.stack.caller, endpoint, version, may_call=may_read)

    async def _render(
        self,
        request: Request,
        session: PersonSession,
        name: str,
        key: str,
        *,
        values: Mapping[str, str] | None = None,
        errors: Mapping[str, str] | None = None,
        result: CallResult | None = None,
        snippets: Sequence[CallSnippet] = (),
    ) -> Response:
        system = await self._shared.hub.fresh()
        endpoint = find_endpoint(system, name)
        is_wanted = request.query_params.get("schema") == "1" or key not in {"", BY_HAND}
        schema = await self._find_schema(session, system, endpoint, may_read=is_wanted)
        operation = None
        if schema is not None and key != BY_HAND:
            operation = schema.find(key) or (schema.operations[0] if schema.operations else None)
        base_url = "" if endpoint is None else self._get_url(session, system, endpoint)
        return self._shared.renderer.page(
            request,
            session,
            "try.html",
            page="try",
            system=system,
            status=200,
            names=sorted(system.endpoints),
            name=name,
            endpoint=endpoint,
            schema=schema,
            may_read_schema=endpoint is not None and session.may_call and "GET" in endpoint.methods,
            has_no_schema=is_wanted and schema is None,
            operation=operation,
            op=operation.key if operation else BY_HAND,
            values=_get_values(operation, endpoint) if values is None else values,
            errors=errors or {},
            result=result,
            snippets=snippets,
            trace_url=self._get_trace_url(result),
            base_url=base_url,
            methods=METHOD_CHOICES,
            content_types=CONTENT_TYPES,
            body_kib=BODY_BYTES_MAX // 1024,
            labels={field.key: field.name for field in operation.fields} if operation else {},
        )

    def _get_trace_url(self, result: CallResult | None) -> str:
        template = self._shared.settings.traces_url
        has_trace = template and result is not None and result.trace_id
        return template.replace("{trace_id}", result.trace_id) if has_trace and result else ""

    def _get_url(self, session: PersonSession, system: System, endpoint: EndpointView) -> str:
        """Where the endpoint is called over HTTP; empty where it cannot be."""
        if endpoint.route is None:
            return ""
        base = self._shared.settings.http_url
        if not base and system.status is not None:
            urls = proxy_urls(system.status.proxies, session.stack.address.host)
            base = urls[0] if urls else ""
        return f"{base}{endpoint.route}".rstrip("/") if base else ""

    def _build_snippets(
        self,
        session: PersonSession,
        system: System,
        endpoint: EndpointView,
        call: CallRequest,
        timeout_s: int,
    ) -> list[CallSnippet]:
        address = session.stack.address
        place = CallPlace(
            url=self._get_url(session, system, endpoint),
            nats_url=_hide_user(address.urls[0]) if address.urls else "",
            subject=Subjects(address.subject_prefix).call(EndpointTag(endpoint.endpoint_tag)),
            timeout_s=timeout_s,
        )
        return build_snippets(call, place)


def find_endpoint(system: System, name: str) -> EndpointView | None:
    """The endpoint of a full name, or of a name in the application ``default``."""
    return system.endpoints.get(name) or system.endpoints.get(f"default/{name}")


def _build_call(
    operation: ApiOperation | None, values: Mapping[str, str], files: Mapping[str, Sequence[SentFile]]
) -> tuple[CallRequest | None, dict[str, str]]:
    if operation is not None:
        boundary = f"muster-{secrets.token_hex(16)}"
        return build_operation_request(operation, OperationValues(values, files), boundary)
    try:
        return build_free_request(values, next(iter(files.get("file", ())), None)), {}
    except BadField as error:
        return None, {error.field: error.reason}


async def _read_files(form: FormData) -> dict[str, list[SentFile]]:
    """The files that were chosen; of one that is too large only as much as shows that."""
    files: dict[str, list[SentFile]] = {}
    for key, value in form.multi_items():
        if isinstance(value, UploadFile) and value.filename:
            content = await value.read(BODY_BYTES_MAX + 1)
            name = clean_file_name(value.filename) or "file"
            files.setdefault(key, []).append(SentFile(name, value.content_type or "", content))
    return files


def _get_values(operation: ApiOperation | None, endpoint: EndpointView | None) -> dict[str, str]:
    """What a fresh form holds."""
    if operation is not None:
        return {field.key: field.value for field in operation.fields}
    methods: Sequence[str] = () if endpoint is None else endpoint.methods
    return {"method": "POST" if not methods or "POST" in methods else methods[0], "path": "/"}


def _hide_user(url: str) -> str:
    split = urlsplit(url)
    return f"{split.scheme}://{split.netloc.rpartition('@')[2]}"

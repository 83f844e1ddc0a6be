"""External gates that are asked over HTTP: what they get, and what counts as an answer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, cast

import aiohttp
import msgspec
import pytest
from aiohttp import web

from serve_common.clock import SystemClock
from serve_common.config.external_gates import ExternalGate
from serve_common.names import BackendTag, GoalId
from serve_common.protocol.gates import RESPONSE_BYTES_MAX, GateRequest, GateResponse
from serve_common.protocol.subjects import Subjects
from serve_controller.adapters import external_gates
from serve_controller.adapters.external_gates import ExternalGates
from serve_controller.adapters.prometheus_api import PrometheusApi
from serve_controller.ports import GateSilent

REQUEST = GateRequest(
    gate="one",
    backend_tag=BackendTag("default/a"),
    canary=BackendTag("default/a--canary"),
    baseline=BackendTag("default/a--baseline"),
    goal_id=GoalId("g7"),
    version="v2",
    step=1,
    share=0.25,
    is_shadow=False,
    lasted_s=42.0,
)


class Server:
    """Answers as a test says, as a webhook and as Prometheus, and notes what it got."""

    def __init__(self) -> None:
        self.status, self.body = 200, b"{}"
        self.got: list[Any] = []
        self.queries: list[str] = []
        self.numbers: dict[str, str] = {}
        """What Prometheus answers, by a part of the query."""
        self.url = ""

    async def webhook(self, request: web.Request) -> web.Response:
        self.got.append(await request.json())
        return web.Response(status=self.status, body=self.body, headers={"Location": "/elsewhere"})

    async def query(self, request: web.Request) -> web.Response:
        query = str((await request.post())["query"])
        self.queries.append(query)
        for part, number in self.numbers.items():
            if part in query:
                data = {"resultType": "scalar", "result": [1.0, number]}
                return web.json_response({"status": "success", "data": data})
        return web.json_response({"status": "success", "data": {"resultType": "vector", "result": []}})


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    self = Server()
    app = web.Application()
    app.router.add_post("/gate", self.webhook)
    app.router.add_post("/api/v1/query", self.query)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert site._server is not None
    self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[attr-defined]
    yield self
    await runner.cleanup()


@pytest.fixture
async def gates(server: Server) -> AsyncIterator[ExternalGates]:
    api = PrometheusApi(server.url)
    gates = ExternalGates(cast(Any, None), Subjects(), api, SystemClock())
    yield gates
    await gates.close()
    await api.close()


async def test_a_webhook_gets_what_it_is_about_and_its_answer_counts(
    server: Server, gates: ExternalGates
) -> None:
    server.body = b'{"passed": false, "value": 0.5, "reason": "of 1,000 digits"}'
    gate = ExternalGate(name="one", webhook=f"{server.url}/gate")
    assert await gates.read(gate, REQUEST) == GateResponse(passed=False, value=0.5, reason="of 1,000 digits")
    assert server.got == [msgspec.to_builtins(REQUEST)]


@pytest.mark.parametrize(
    ("status", "body", "reason"),
    [
        (500, b'{"passed": true}', "status 500"),
        (404, b'{"passed": true}', "status 404"),
        (302, b'{"passed": true}', "status 302"),
        (204, b"", "status 204"),
        (200, b"", "is not as it should be"),
        (200, b"<html>", "is not as it should be"),
        (200, b'{"value": 1e999}', "response"),
        (200, b" " * (RESPONSE_BYTES_MAX + 1), "at most 65,536 are read"),
    ],
)
async def test_anything_else_is_no_answer(
    server: Server, gates: ExternalGates, status: int, body: bytes, reason: str
) -> None:
    server.status, server.body = status, body
    with pytest.raises(GateSilent, match=reason):
        await gates.read(ExternalGate(name="one", webhook=f"{server.url}/gate"), REQUEST)


async def test_where_nothing_listens_there_is_no_answer_and_no_credential_is_shown(
    server: Server, gates: ExternalGates
) -> None:
    url = server.url.replace("http://", "http://user:hunter2@") + "/gate?token=hunter3"
    server.status = 500
    with pytest.raises(GateSilent) as answered:
        await gates.read(ExternalGate(name="one", webhook=url), REQUEST)
    with pytest.raises(GateSilent) as refused:
        await gates.read(
            ExternalGate(name="one", webhook="http://user:hunter2@127.0.0.1:1/x?t=hunter3"), REQUEST
        )
    for caught in (answered, refused):
        assert "127.0.0.1" in str(caught.value)
        assert "hunter" not in str(caught.value)


async def test_a_webhook_that_hangs_is_given_up(
    server: Server, gates: ExternalGates, monkeypatch: pytest.MonkeyPatch
) -> None:
    gates._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=1e-6))
    monkeypatch.setattr(external_gates, "TIMEOUT_S", 1e-6)
    with pytest.raises(GateSilent, match="does not answer within"):
        await gates.read(ExternalGate(name="one", webhook=f"{server.url}/gate"), REQUEST)


async def test_a_query_is_evaluated_for_the_canary_and_for_a_ratio_for_its_baseline_too(
    server: Server, gates: ExternalGates
) -> None:
    server.numbers = {"canary": "3", "baseline": "2"}
    promql = 'sum(rate(errors{backend_tag="$backend_tag"}[$look_back]))'
    assert await gates.read(ExternalGate(name="one", promql=promql, at_most=5), REQUEST) == GateResponse(
        value=3
    )
    assert server.queries == ['sum(rate(errors{backend_tag="default/a--canary"}[42s]))']
    ratio = ExternalGate(name="one", promql=promql, max_ratio=2)
    assert await gates.read(ratio, REQUEST) == GateResponse(value=3, baseline_value=2)
    assert server.queries[-1] == 'sum(rate(errors{backend_tag="default/a--baseline"}[42s]))'


@pytest.mark.parametrize(("lasted_s", "look_back"), [(0.0, "10s"), (299.5, "299500ms"), (4000.0, "300s")])
async def test_a_query_looks_back_at_the_step_alone(
    server: Server, gates: ExternalGates, lasted_s: float, look_back: str
) -> None:
    server.numbers = {"up": "1"}
    request = msgspec.structs.replace(REQUEST, lasted_s=lasted_s)
    await gates.read(ExternalGate(name="one", promql="up[$look_back]", at_most=5), request)
    assert server.queries == [f"up[{look_back}]"]


@pytest.mark.parametrize("number", [None, "NaN", "+Inf"])
async def test_a_query_without_a_number_has_no_answer(
    server: Server, gates: ExternalGates, number: str | None
) -> None:
    server.numbers = {} if number is None else {"up": number}
    with pytest.raises(GateSilent, match="default/a--canary"):
        await gates.read(ExternalGate(name="one", promql="up", at_most=5), REQUEST)


async def test_without_prometheus_a_query_has_no_answer() -> None:
    gates = ExternalGates(cast(Any, None), Subjects(), None, SystemClock())
    with pytest.raises(GateSilent, match="MUSTER_PROMETHEUS_URL"):
        await gates.read(ExternalGate(name="one", promql="up", at_most=5), REQUEST)

"""External gates of a rollout: a real controller asks a real Prometheus, a webhook, and a responder on NATS."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from nats.aio.msg import Msg

from serve_common.api.commands import Deploy, StartRollout
from serve_common.api.queries import GetRollouts
from serve_common.api.rollout_views import GateView
from serve_common.api.views import GoalStatus
from serve_common.config.external_gates import ExternalGate
from serve_common.config.rollout import RolloutConfig
from serve_common.names import GoalId
from serve_common.protocol.gates import GateRequest
from tests.support.servers.nats_server import NatsServer
from tests.support.servers.postgres_server import PostgresServer
from tests.support.servers.prometheus_server import PrometheusServer, scrape_config
from tests.support.stacks.admin_desk import CODE, SOON_S, AdminDesk
from tests.support.waiting import eventually

pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("quiet")]

NAME = "gated"


class Hook:
    """A webhook, and what it answers."""

    def __init__(self) -> None:
        self.status = 503
        self.answer: dict[str, Any] = {"passed": True}
        self.seen: list[GateRequest] = []
        self.url = ""

    async def handle(self, request: web.Request) -> web.Response:
        self.seen.append(msgspec.json.decode(await request.read(), type=GateRequest))
        return web.json_response(self.answer, status=self.status)


@pytest.fixture
async def hook() -> AsyncIterator[Hook]:
    self = Hook()
    app = web.Application()
    app.router.add_post("/gate", self.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert site._server is not None
    self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/gate"  # type: ignore[attr-defined]
    yield self
    await runner.cleanup()


async def gates(desk: AdminDesk) -> dict[str, GateView]:
    """The external ones, by name."""
    [view] = await desk.admin.call(GetRollouts(name=NAME))
    return {gate.kind: gate for gate in view.gates if gate.is_external}


async def until_shown(desk: AdminDesk, **statuses: str) -> dict[str, GateView]:
    async def shown() -> bool:
        found = await gates(desk)
        return bool(found) and all(found[name].status == status for name, status in statuses.items())

    await eventually(shown, within_s=SOON_S)
    return await gates(desk)


async def started(desk: AdminDesk, *external: ExternalGate) -> GoalId:
    await desk.done(await desk.admin.call(Deploy(name=NAME, version="v1", replica_config=CODE)))
    reply = await desk.admin.call(
        StartRollout(name=NAME, version="v2", rollout=RolloutConfig(steps=("10%", "100%"), gates=external))
    )
    assert reply.goal_id is not None
    return reply.goal_id


async def test_each_kind_is_asked_and_one_that_fails_aborts(
    shared_server: NatsServer, postgres_server: PostgresServer, hook: Hook, tmp_path: Path
) -> None:
    with PrometheusServer(tmp_path, scrape_config({}, interval_s=1)) as prometheus:
        await asyncio.to_thread(prometheus.start)
        async with AdminDesk.opened(
            shared_server, postgres_server, MUSTER_PROMETHEUS_URL=prometheus.url
        ) as desk:
            asked: list[GateRequest] = []

            async def answer(message: Msg) -> None:
                asked.append(msgspec.json.decode(message.data, type=GateRequest))
                await message.respond(b'{"value": 0.93, "reason": "of 1,000 digits"}')

            await desk.plane.client.subscribe(desk.subjects.gate("accuracy"), cb=answer)
            goal_id = await started(
                desk,
                ExternalGate(name="queue", promql="vector(0.4)", at_most=1.0, every_s=0.5),
                ExternalGate(
                    name="ratio", promql='count_values("x", vector(1)) or up', max_ratio=1.5, every_s=0.5
                ),
                ExternalGate(name="nothing", promql='up{job="none"}', at_most=1.0, every_s=0.5),
                ExternalGate(name="accuracy", responder="accuracy", at_least=0.9, every_s=0.5),
                ExternalGate(name="away", responder="away", every_s=0.5),
                ExternalGate(name="hook", webhook=hook.url, every_s=0.5, max_failures=1),
            )
            found = await until_shown(desk, queue="passed", ratio="passed", accuracy="passed")
            assert found["queue"].text == "0.4"
            assert found["ratio"].text == "1; baseline: 1"
            assert found["accuracy"].text == "0.93: of 1,000 digits"
            await eventually(lambda: len(hook.seen) > 2, within_s=SOON_S)
            found = await gates(desk)
            assert found["hook"].text == f"no answer: {hook.url} answers with status 503"
            assert "nobody answers on" in found["away"].text
            assert "no such series" in found["nothing"].text
            assert {found[name].status for name in ("hook", "away", "nothing")} == {"unknown"}
            assert hook.seen[0].canary == f"default/{NAME}--canary"
            assert (asked[0].gate, asked[0].version, asked[0].share) == ("accuracy", "v2", 0.1)

            await asyncio.to_thread(prometheus.kill)
            found = await until_shown(desk, queue="unknown", accuracy="passed")
            assert found["queue"].text.startswith("no answer: ")
            await asyncio.to_thread(prometheus.start)
            await until_shown(desk, queue="passed")

            hook.status, hook.answer = 200, {"passed": False, "reason": "it smells"}
            goal = await desk.ended(goal_id)
            assert goal.status is GoalStatus.FAILED
            assert goal.error == "hook: not passed: it smells (2 bad answers in a row; 1 may be)"
            hook.seen.clear()
            await asyncio.sleep(1.5)
            assert hook.seen == [], "of a rollout that has ended nothing is asked"


async def test_a_new_leader_asks_again(
    shared_server: NatsServer, postgres_server: PostgresServer, hook: Hook
) -> None:
    hook.status = 200
    async with AdminDesk.opened(shared_server, postgres_server) as desk:
        await started(
            desk,
            ExternalGate(name="hook", webhook=hook.url, every_s=0.5),
            ExternalGate(name="query", promql="vector(1)", at_most=1.0, every_s=0.5),
        )
        found = await until_shown(desk, hook="passed", query="unknown")
        assert "MUSTER_PROMETHEUS_URL" in found["query"].text
        [controller] = desk.plane.controllers
        controller.signal(signal.SIGKILL)
        await controller.until_gone()
        hook.seen.clear()
        await desk.plane.start_controller("controller-2")
        await desk.plane.until_led_by("controller-2")
        await until_shown(desk, hook="passed")
        assert hook.seen

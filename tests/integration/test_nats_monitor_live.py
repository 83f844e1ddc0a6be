"""The state of a real nats-server, as the leader of real controllers shows it: a connection that is cut, a server that
goes and comes, and each server only once.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from serve_common.telemetry.catalogue.nats_servers import NATS_METRICS
from tests.support.servers.nats_server import NatsServer
from tests.support.servers.postgres_server import PostgresServer
from tests.support.servers.reserved_port import HeldPort
from tests.support.stacks.control_plane import CHANGE_LIMIT_S, ControllerProcess, ControlPlane
from tests.support.stacks.scraped_pages import contradictions
from tests.support.waiting import eventually

pytestmark = pytest.mark.timeout(300)


class MonitoredServer:
    """A nats-server of its own to look at: nothing but this test uses it, so its numbers are known."""

    def __init__(self, directory: Path) -> None:
        self._held_port = HeldPort()
        self.monitor_port = self._held_port.port
        self.server = NatsServer(directory, config=CONFIG.format(port=self.monitor_port))

    @property
    def name(self) -> str:
        return f"127.0.0.1:{self.monitor_port}"


PUBLISHED = 100
CONFIG = """
http: "127.0.0.1:{port}"
max_connections: 50
max_pending: 1MB
write_deadline: "10s"
jetstream {{ max_memory_store: 1MB, max_file_store: 10MB }}
"""


@pytest.fixture
async def plane(shared_server: NatsServer, postgres_server: PostgresServer) -> AsyncIterator[ControlPlane]:
    async with ControlPlane.opened(shared_server, postgres_server) as plane:
        yield plane


@pytest.fixture
def monitored(tmp_path: Path) -> Iterator[MonitoredServer]:
    monitored = MonitoredServer(tmp_path)
    with monitored.server:
        yield monitored


async def shown_by(controller: ControllerProcess) -> dict[str, float]:
    """Values by metric, of the one server."""
    return shown_on(await controller.metrics())


def shown_on(page: str) -> dict[str, float]:
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name.startswith("serve_nats_")
    }


def publish_to_one_who_does_not_read(port: int) -> None:
    """Return when the server has taken everything; by then it must have cut the reader off."""
    address = ("127.0.0.1", port)
    body = b"x" * 500_000
    with (
        socket.create_connection(address, 20) as subscriber,
        socket.create_connection(address, 20) as publisher,
    ):
        subscriber.sendall(b'CONNECT {"verbose": false}\r\nSUB flood 1\r\nPING\r\n')
        read_until_pong(subscriber)
        publisher.sendall(b'CONNECT {"verbose": false}\r\n')
        # More than the two sockets' buffers and what the server lets wait.
        for _ in range(PUBLISHED):
            publisher.sendall(b"PUB flood %d\r\n%s\r\n" % (len(body), body))
        publisher.sendall(b"PING\r\n")
        read_until_pong(publisher)


def read_until_pong(connection: socket.socket) -> None:
    read = b""
    while b"PONG\r\n" not in read:
        piece = connection.recv(1)
        assert piece, read
        read += piece


async def test_the_leader_and_nobody_else_shows_a_server_and_whom_it_cut_off(
    plane: ControlPlane, monitored: MonitoredServer
) -> None:
    variables = {"MUSTER_NATS_MONITOR_URL": f"http://{monitored.name}"}
    leader = await plane.start_controller("controller-1", **variables)
    await plane.until_led_by("controller-1")
    standby = await plane.start_controller("controller-2", **variables)
    await standby.until_logged("standing_by")

    async def shows(**values: float) -> None:
        # A machine that has no time at all may leave a page unread now and then.
        async def does() -> bool:
            shown = await shown_by(leader)
            return {f"serve_nats_{name}": value for name, value in values.items()}.items() <= shown.items()

        await eventually(does, within_s=CHANGE_LIMIT_S)

    await shows(up=1, healthy=1, connections=0, connections_limit=50, slow_consumers_total=0)
    await shows(jetstream_storage_bytes=0, jetstream_storage_limit_bytes=10 * 2**20, jetstream_streams=0)

    page = ""

    async def has_all() -> bool:
        nonlocal page
        page = await leader.metrics()
        return set(shown_on(page)) == {spec.name for spec in NATS_METRICS}

    await eventually(has_all, within_s=CHANGE_LIMIT_S)
    assert contradictions({"controller": page}) == []
    assert f'serve_nats_up{{server="{monitored.name}"}}' in page
    assert await shown_by(standby) == {}

    await asyncio.to_thread(publish_to_one_who_does_not_read, monitored.server.port)
    await shows(slow_consumers_total=1, received_messages_total=PUBLISHED, connections_opened_total=2)

    monitored.server.kill()
    await shows(up=0)
    assert set(await shown_by(leader)) == {"serve_nats_up"}
    monitored.server.start()
    await shows(up=1, slow_consumers_total=0)

    leader.signal(signal.SIGTERM)
    await leader.until_gone()

    async def takes_over() -> bool:
        return (await shown_by(standby)).get("serve_nats_up") == 1

    await eventually(takes_over, within_s=CHANGE_LIMIT_S)


async def test_a_monitoring_port_that_never_answers_does_not_hold_up_the_leader(
    plane: ControlPlane,
) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        name = f"127.0.0.1:{silent.getsockname()[1]}"
        leader = await plane.start_controller("controller-1", MUSTER_NATS_MONITOR_URL=f"http://{name}")
        await plane.until_led_by("controller-1")

        async def is_said_to_be_down() -> bool:
            return await shown_by(leader) == {"serve_nats_up": 0}

        await eventually(is_said_to_be_down, within_s=CHANGE_LIMIT_S)
        await leader.until_logged("nats_page_away")  # what it logs comes beside what it shows
        assert leader.logged("nats_page_away")[0]["server"] == name
        assert await plane.leader(timeout_s=20.0) is not None

"""Real servers for the integration tests: on ports that the system chooses, gone afterwards."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import structlog

from tests.support.servers.nats_server import NatsServer
from tests.support.servers.postgres_server import PostgresServer
from tests.support.stacks.proxy_stack import Stack, running_stack


@pytest.fixture
def quiet() -> Iterator[None]:
    """Nothing is logged in this process: simulated hosts run in it, beside what a command prints."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    yield
    structlog.reset_defaults()


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """A Postgres that all tests share: make a database of your own in it, and leave it running."""
    with PostgresServer() as server:
        server.start()
        yield server


@pytest.fixture(scope="module")
def breakable_postgres() -> Iterator[PostgresServer]:
    """A Postgres of one module, not started yet: to be killed, frozen and started again."""
    with PostgresServer() as server:
        yield server


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    """A nats-server of one test, to be killed, frozen and started again."""
    with NatsServer(tmp_path / "nats") as server:
        yield server


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """A nats-server that the tests of a module share: leave it running."""
    with NatsServer(tmp_path_factory.mktemp("nats")) as server:
        yield server


@pytest.fixture
async def stack(server: NatsServer) -> AsyncIterator[Stack]:
    """A proxy in this process, beside the nats-server of the test."""
    async with running_stack(server) as stack:
        yield stack

"""Real servers for the integration tests: on ports that the system chooses, gone afterwards."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.postgres_server import PostgresServer


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

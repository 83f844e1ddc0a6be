"""A container is called healthy exactly when its operations port says so."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest
from prometheus_client import CollectorRegistry

from serve_common.runtime.healthcheck import check_url
from serve_common.runtime.operations import OperationsServer
from serve_common.runtime.settings import OperationsSettings


async def ask(reason: str | None, path: str) -> str | None:
    server = OperationsServer(
        OperationsSettings(host="127.0.0.1", port=0), CollectorRegistry(), readiness_error=lambda: reason
    )
    await server.start()
    try:
        return await asyncio.to_thread(check_url, f"http://127.0.0.1:{server.port}{path}")
    finally:
        await server.close()


async def test_a_ready_process_is_healthy() -> None:
    assert await ask(None, "/readyz") is None


async def test_a_process_that_is_not_ready_says_why() -> None:
    said = await ask("NATS is not connected", "/readyz")
    assert said is not None
    assert said.endswith("NATS is not connected")


async def test_an_unknown_path_is_unhealthy() -> None:
    assert await ask(None, "/nothing") is not None


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/readyz", "http://127.0.0.1:port/readyz"])
def test_what_cannot_be_asked_is_unhealthy(url: str) -> None:
    assert check_url(url) is not None


def test_the_command_ends_with_1_and_says_why() -> None:
    command = [sys.executable, "-m", "serve_common.runtime.healthcheck", "http://127.0.0.1:1/readyz"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 1
    assert "refused" in done.stdout

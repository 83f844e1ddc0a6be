"""An endpoint called over NATS by a program in JavaScript, with the client that npm has."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.stacks.proxy_stack import BIG_BYTES, Stack, serve_calls

pytestmark = pytest.mark.timeout(180)

SOURCES = Path(__file__).parent / "javascript"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The caller beside its installed client."""
    missing = [tool for tool in ("node", "npm") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"NOT TESTED: callers in JavaScript, for there is no {' and no '.join(missing)}")
    directory = tmp_path_factory.mktemp("javascript")
    for name in ("package.json", "caller.js"):
        shutil.copy(SOURCES / name, directory)
    install = ["npm", "install", "--no-package-lock", "--no-audit", "--no-fund", "--ignore-scripts"]
    done = subprocess.run(install, cwd=directory, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return directory / "caller.js"


async def answers(program: Path, url: str) -> dict[str, dict[str, Any]]:
    """What the program printed, by the name of the call."""
    process = await asyncio.create_subprocess_exec(
        "node", program, url, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(50):
        out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    lines = [json.loads(line) for line in out.splitlines()]
    return {line["name"]: line for line in lines}


async def test_a_javascript_program_calls_an_endpoint_and_understands_its_errors(
    program: Path, stack: Stack
) -> None:
    replica = await serve_calls(stack)
    came = await answers(program, stack.server.url)
    assert json.loads(came["json"]["text"]) == {"numbers": [1, 2]}
    assert came["json"]["id"] == "js-1"
    assert came["bytes"]["bytes"] == "00ff0d0a00"
    assert "code" not in came["bytes"] or not came["bytes"]["code"]
    assert (b"content-type", b"application/octet-stream") in replica.seen[1].headers
    assert (came["raises"]["code"], came["raises"]["error"]) == ("500", "ValueError: not this")
    assert came["unknown"]["code"] == "404"
    assert "default/nothing" in came["unknown"]["error"]
    assert came["late"]["code"] == "504"
    assert came["nobody"]["failed"] == "no responders"
    assert came["large"]["code"] == "502"
    assert "x-serve-stream" in came["large"]["error"]
    assert came["streamed"]["size"] == BIG_BYTES
    assert came["streamed"]["messages"] > 3

"""Importing middlewares: what is taken, what is refused and how that reads, and the order they are put around."""

from __future__ import annotations

import asyncio
import sys
import threading
from pathlib import Path

import pytest

from serve_proxy.http.middlewares import add_directory, compose, load_middlewares
from serve_proxy.shell.ingress import MiddlewareRefused

MODULE = """
import functools, threading
imported_in = threading.current_thread().name

def named(name):
    async def middleware(request, handler):
        return [name, *await handler(request)]
    return middleware

class Holder:
    inner = staticmethod(named("inner"))

class Callable:
    async def __call__(self, request, handler):
        return ["instance", *await handler(request)]

async def with_options(request, handler, *, option="x"):
    return [option, *await handler(request)]

outer = named("outer")
instance = Callable()
partial = functools.partial(with_options, option="partial")

def plain(request, handler): ...
async def one(request): ...
number = 7
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch):
    """A directory on the path with a module of middlewares; the module's name is new for each test."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    add_directory(str(tmp_path))
    add_directory(str(tmp_path))
    assert sys.path.count(str(tmp_path)) == 1
    name = f"middlewares_of_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    yield name
    for imported in [m for m in sys.modules if m.startswith(name)]:
        del sys.modules[imported]


async def test_the_first_is_the_outermost_and_the_import_runs_in_a_thread(module: str) -> None:
    paths = [f"{module}:{n}" for n in ("outer", "Holder.inner", "instance", "partial")]
    loaded = await load_middlewares(paths)

    async def handler(request):
        return [request]

    assert await compose(loaded, handler)("request") == ["outer", "inner", "instance", "partial", "request"]
    assert sys.modules[module].imported_in != threading.current_thread().name


@pytest.mark.parametrize(
    ("attribute", "reason"),
    [
        ("missing", "AttributeError"),
        ("plain", "is not async"),
        ("one", "cannot be called with a request and a handler"),
        ("number", "is of type int"),
        ("Callable", "is a class"),
    ],
)
async def test_what_is_no_middleware_is_refused_by_name(module: str, attribute: str, reason: str) -> None:
    with pytest.raises(MiddlewareRefused, match=f"{module}:{attribute}: .*{reason}"):
        await load_middlewares([f"{module}:outer", f"{module}:{attribute}"])


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import nowhere_at_all", "ModuleNotFoundError"),
        ("raise SystemExit(3)", "SystemExit"),
        ("(", "Syntax"),
    ],
)
async def test_a_module_that_cannot_be_imported_is_refused_and_can_be_mended(
    module: str, tmp_path: Path, source: str, reason: str
) -> None:
    file = tmp_path / f"{module}_broken.py"
    file.write_text(source)
    with pytest.raises(MiddlewareRefused, match=reason):
        await load_middlewares([f"{module}_broken:outer"])
    file.write_text(MODULE + "\n# of another length")
    assert len(await load_middlewares([f"{module}_broken:outer"])) == 1


async def test_a_module_that_is_not_there_is_named() -> None:
    with pytest.raises(MiddlewareRefused, match="nowhere_at_all:x: ModuleNotFoundError"):
        await load_middlewares(["nowhere_at_all:x"])


async def test_an_import_that_ends_after_nobody_waits_does_no_harm(module: str, tmp_path: Path) -> None:
    (tmp_path / f"{module}_slow.py").write_text(
        "import threading\ngate = threading.Event()\nimport sys\n"
        f"sys.modules['{module}_gate'] = gate\ngate.wait(10)\n" + MODULE
    )
    loading = asyncio.get_running_loop().create_task(load_middlewares([f"{module}_slow:outer"]))
    async with asyncio.timeout(30):
        while f"{module}_gate" not in sys.modules:  # noqa: ASYNC110 - another thread sets it
            await asyncio.sleep(0.005)
    loading.cancel()
    await asyncio.wait([loading])
    sys.modules[f"{module}_gate"].set()  # type: ignore[attr-defined]
    assert len(await load_middlewares([f"{module}_slow:outer"])) == 1

"""Importing middlewares: what is taken, what is refused and how that reads, and the order they are put around."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from serve_common.config.backend import HttpOptions
from serve_common.routing.route_table import HttpChange
from serve_proxy.http.middlewares import add_directory, compose, load_middlewares
from serve_proxy.shell import ingress as live_options
from serve_proxy.shell.ingress import LiveOptions, MiddlewareRefused
from tests.support.waiting import eventually

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
    await eventually(lambda: f"{module}_gate" in sys.modules)
    loading.cancel()
    await asyncio.wait([loading])
    sys.modules[f"{module}_gate"].set()  # type: ignore[attr-defined]
    assert len(await load_middlewares([f"{module}_slow:outer"])) == 1


# Options that change while the proxy runs: in force, refused, or still being imported, and what is said of each.


DEFAULTS = HttpOptions(request_timeout_s=7.0)


class World:
    """Middlewares are their names; loading waits for `finish`."""

    def __init__(self) -> None:
        self.loading: list[tuple[list[str], asyncio.Future[tuple[str, ...]]]] = []
        self.used: list[tuple[HttpOptions, tuple[str, ...]]] = []
        self.settled: list[int] = []
        self.is_listening = True
        self.port_error: OSError | None = None
        self.live: LiveOptions[tuple[str, ...]] = LiveOptions(
            DEFAULTS,
            nothing=(),
            load=self.load,
            use=self.use,
            listen=self.listen,
            on_applied=self.settled.append,
        )

    async def load(self, paths: Sequence[str]) -> tuple[str, ...]:
        loaded: asyncio.Future[tuple[str, ...]] = asyncio.get_running_loop().create_future()
        self.loading.append((list(paths), loaded))
        return await loaded

    async def listen(self, is_wanted: bool) -> None:
        if self.port_error is not None:
            raise self.port_error
        self.is_listening = is_wanted

    def use(self, options: HttpOptions, middlewares: tuple[str, ...]) -> None:
        self.used.append((options, middlewares))

    def take(self, snapshot_id: int, **options) -> None:
        self.live.take(HttpChange(options=HttpOptions(**options), snapshot_id=snapshot_id))

    async def finish(self, error: str = "") -> None:
        for _ in range(3):
            await asyncio.sleep(0)
        paths, loaded = self.loading.pop(0)
        if error:
            loaded.set_exception(MiddlewareRefused(error))
        else:
            loaded.set_result(tuple(paths))
        for _ in range(3):
            await asyncio.sleep(0)


@pytest.fixture
async def world():
    world = World()
    yield world
    await world.live.close(1)


async def test_what_needs_no_import_is_in_force_at_once(world: World) -> None:
    assert world.live.options is DEFAULTS
    world.take(3, request_timeout_s=1.0, body_bytes_max=10)
    assert world.live.options.body_bytes_max == 10
    assert world.used == [(world.live.options, ())]
    assert (world.settled, world.live.pending_reason) == ([3], None)


async def test_middlewares_are_in_force_once_imported_and_not_before(world: World) -> None:
    world.take(3, middlewares=["a:b"])
    assert (world.live.options, world.settled) == (DEFAULTS, [])
    assert world.live.pending_reason is not None
    await world.finish()
    assert world.live.options.middlewares == ["a:b"]
    assert world.used == [(world.live.options, ("a:b",))]
    assert (world.settled, world.live.pending_reason) == ([3], None)
    world.take(4, middlewares=["a:b"], request_timeout_s=2.0)  # the same ones are not imported again
    assert world.used[-1] == (world.live.options, ("a:b",))
    assert (world.settled, world.live.options.request_timeout_s) == ([3, 4], 2.0)
    world.take(5)
    assert world.used[-1] == (world.live.options, ())


async def test_what_is_refused_leaves_everything_as_it_was_and_says_why(world: World) -> None:
    world.take(3, request_timeout_s=1.0)
    world.take(4, middlewares=["a:b"], request_timeout_s=2.0)
    await world.finish("a:b: no such thing")
    assert world.live.options.request_timeout_s == 1.0
    assert (world.live.error, world.live.error_snapshot_id) == ("a:b: no such thing", 4)
    assert world.settled == [3, 4]
    world.take(5, request_timeout_s=3.0)
    assert (world.live.error, world.live.error_snapshot_id) == ("", 0)


async def test_options_out_of_their_limits_are_refused(world: World) -> None:
    world.take(3, request_timeout_s=-1.0)
    assert "request_timeout_s" in world.live.error
    assert (world.live.options, world.settled) == (DEFAULTS, [3])


async def test_only_the_newest_change_counts_also_while_an_older_one_is_being_imported(world: World) -> None:
    world.take(3, middlewares=["hangs:x"])
    await asyncio.sleep(0)
    world.take(3, middlewares=["hangs:x"])  # told again
    world.take(4, middlewares=["c:d"])
    await asyncio.sleep(0)
    assert [paths for paths, _ in world.loading] == [["hangs:x"], ["c:d"]]
    assert world.loading.pop(0)[1].cancelled()
    await world.finish()
    assert world.settled == [4]
    world.take(5, middlewares=["hangs:x"])
    await asyncio.sleep(0)
    world.take(6, request_timeout_s=6.0)
    assert world.live.options.request_timeout_s == 6.0
    assert [middlewares for _, middlewares in world.used] == [("c:d",), ()]
    assert (world.settled, world.live.pending_reason) == ([4, 6], None)


async def test_an_older_snapshot_changes_nothing_and_a_deleted_one_brings_the_defaults_back(
    world: World,
) -> None:
    world.take(5, request_timeout_s=5.0)
    world.take(4, request_timeout_s=4.0)
    assert world.live.options.request_timeout_s == 5.0
    world.live.take(HttpChange(options=None, snapshot_id=6))
    assert world.live.options is DEFAULTS
    world.take(7, request_timeout_s=5.0)
    world.live.take(HttpChange(options=None, snapshot_id=0))
    assert world.live.options is DEFAULTS


async def test_an_import_that_does_not_end_is_refused(world: World, monkeypatch) -> None:
    monkeypatch.setattr(live_options, "LOAD_TIMEOUT_S", 0.01)
    world.take(3, middlewares=["a:b"])
    await eventually(lambda: world.settled)
    assert "a:b took more than" in world.live.error


async def test_a_shutdown_closes_the_port_and_a_deploy_opens_it_before_they_count_as_applied(
    world: World,
) -> None:
    world.live.take(HttpChange(options=None, snapshot_id=3, is_shut_down=True))
    assert not world.settled
    await eventually(lambda: world.settled == [3])
    assert not world.is_listening
    world.live.take(HttpChange(options=HttpOptions(request_timeout_s=2.0), snapshot_id=4, is_shut_down=True))
    assert (world.settled, world.is_listening) == ([3, 4], False)

    world.port_error = OSError("taken")
    world.live.take(HttpChange(options=None, snapshot_id=5))
    await eventually(lambda: "taken" in (world.live.pending_reason or ""))
    assert world.settled == [3, 4]
    world.port_error = None
    await eventually(lambda: world.settled == [3, 4, 5])
    assert world.is_listening
    assert world.live.pending_reason is None

"""The parent of several proxy processes, with children that a test plays."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Mapping

import pytest
from prometheus_client.parser import text_string_to_metric_families

from serve_common.errors import BadField
from serve_common.names import NAME_LENGTH_MAX, ProxyId, check_name
from serve_common.runtime.settings import Environment
from serve_proxy.core.processes import child_id, merge_metrics
from serve_proxy.settings import ProxySettings, read_settings
from serve_proxy.shell.parent import Parent
from tests.support.waiting import eventually


class PlayedChild:
    def __init__(self) -> None:
        self.operations_port: int | None = None
        self.heard: list[str] = []
        self.end: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def ended(self) -> int:
        return await self.end

    def stop(self) -> None:
        self.heard.append("stop")

    def kill(self) -> None:
        self.heard.append("kill")


class Started:
    """All children that a parent started, in order."""

    def __init__(self) -> None:
        self.children: list[tuple[int, PlayedChild]] = []
        self.failures = 0
        self.has_room = asyncio.Event()
        self.has_room.set()
        self._changed = asyncio.Condition()

    async def __call__(self, number: int) -> PlayedChild:
        await self.has_room.wait()
        if self.failures:
            self.failures -= 1
            raise OSError("no more processes")
        child = PlayedChild()
        self.children.append((number, child))
        async with self._changed:
            self._changed.notify_all()
        return child

    async def until(self, count: int) -> PlayedChild:
        async with asyncio.timeout(30), self._changed:
            await self._changed.wait_for(lambda: len(self.children) >= count)
        return self.children[count - 1][1]


@contextlib.asynccontextmanager
async def running(
    processes: int, drain_timeout_s: float = 1
) -> AsyncIterator[tuple[Started, Parent, asyncio.Task[int]]]:
    """A parent that runs; it must have ended at the end."""
    started = Started()
    parent = Parent(started, processes, drain_timeout_s=drain_timeout_s)
    async with asyncio.TaskGroup() as group:
        yield started, parent, group.create_task(parent.run())


def listening(child: PlayedChild, port: int = 1) -> PlayedChild:
    child.operations_port = port
    return child


async def test_all_are_stopped_together_and_the_exit_code_says_whether_all_ended_in_order() -> None:
    for codes, expected in (((0, 0), 0), ((0, 1), 1), ((-9, 0), 1)):
        async with running(2) as (started, parent, run):
            children = [listening(await started.until(count)) for count in (1, 2)]
            assert sorted(number for number, _ in started.children) == [1, 2]
            assert parent.readiness_error() is None
            parent.stop()
            parent.stop()
            assert [child.heard for child in children] == [["stop", "stop"]] * 2
            for child, code in zip(children, codes, strict=True):
                child.end.set_result(code)
        assert run.result() == expected
        assert parent.children == {}


async def test_one_that_ends_is_started_again_and_missed_meanwhile() -> None:
    async with running(1) as (started, parent, _):
        for life in (1, 2):
            child = listening(await started.until(life))
            await eventually(lambda: parent.readiness_error() is None)
            started.has_room.clear()
            child.end.set_result(-9)
            await eventually(lambda: parent.readiness_error() == "processes that do not run: 1")
            started.has_room.set()
        child = listening(await started.until(3))
        parent.stop()
        child.end.set_result(0)


async def test_one_that_never_listened_ends_all_with_its_exit_code() -> None:
    async with running(2) as (started, _, run):
        first, second = await started.until(1), listening(await started.until(2))
        first.end.set_result(3)
        await eventually(lambda: second.heard)
        assert second.heard == ["stop"]
        second.end.set_result(0)
    assert run.result() == 3


async def test_one_that_was_stopped_before_it_heard_signals_counts_as_ended_in_order() -> None:
    async with running(1) as (started, parent, run):
        child = await started.until(1)
        parent.stop()
        child.end.set_result(-signal.SIGTERM)
    assert run.result() == 0


async def test_one_that_drains_for_too_long_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve_proxy.shell.parent.KILL_MARGIN_S", 0.0)
    async with running(1, 0.01) as (started, parent, run):
        child = listening(await started.until(1))
        parent.stop()
        await eventually(lambda: "kill" in child.heard)
        child.end.set_result(-9)
    assert run.result() == 1


async def test_a_machine_without_room_for_one_more_process_ends_the_first_start() -> None:
    started = Started()
    started.failures = 1
    assert await Parent(started, 1, drain_timeout_s=1).run() == 1


def test_the_ids_of_children_are_names_that_differ() -> None:
    assert child_id(ProxyId("proxy"), 3) == "proxy-3"
    long = ProxyId("pod-" + "x" * (NAME_LENGTH_MAX - 9) + "-ab1f")
    assert len(long) == NAME_LENGTH_MAX
    ids = {child_id(long, number) for number in range(1, 65)}
    assert len(ids) == 64
    for name in ids:
        assert check_name(name, "proxy_id").rpartition("-")[0].endswith("-ab1f")


def pages() -> Mapping[str, str]:
    page = (
        "# HELP requests_total Requests, answered {or not}\n# TYPE requests_total counter\n"
        'requests_total{path="/a b",code="200"} 3.0\n'
        "# HELP depth Queue\n# TYPE depth gauge\ndepth 2.0\n"
    )
    return {"1": page, "2": page.replace("3.0", "4.0")}


def test_a_merged_page_holds_every_sample_once_per_process_in_one_group_per_family() -> None:
    merged = merge_metrics(pages())
    families = {family.name: family for family in text_string_to_metric_families(merged)}
    assert set(families) == {"requests", "depth"}
    requests = families["requests"]
    assert requests.documentation == "Requests, answered {or not}"
    assert [(sample.labels, sample.value) for sample in requests.samples] == [
        ({"process": "1", "path": "/a b", "code": "200"}, 3.0),
        ({"process": "2", "path": "/a b", "code": "200"}, 4.0),
    ]
    assert [sample.labels for sample in families["depth"].samples] == [{"process": "1"}, {"process": "2"}]
    assert merge_metrics({}).strip() == ""


def settings(**variables: str) -> ProxySettings:
    return read_settings(Environment({"MUSTER_NATS_PASSWORD": "x", "MUSTER_PROXY_ID": "p", **variables}))


def test_the_number_of_processes_is_read_and_limited() -> None:
    assert settings().processes == 1
    assert settings(MUSTER_PROXY_PROCESSES="64").processes == 64
    for wrong in ("0", "65", "two"):
        with pytest.raises(BadField, match="MUSTER_PROXY_PROCESSES"):
            settings(MUSTER_PROXY_PROCESSES=wrong)
    assert settings().parent_fd is None
    assert settings(MUSTER_PROXY_PARENT_FD="7").parent_fd == 7

"""A replica host on a Ray cluster of two nodes: replicas on the other one count, speak and end as those at home do."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator

import psutil
import pytest
import pytest_asyncio

from serve_common.protocol.frames import ResponseHead
from serve_common.protocol.reports import ReplicaStatus
from tests.support.servers.ray_cluster import AT_HOME, ELSEWHERE, HOST, Cluster
from tests.support.waiting import eventually

pytestmark = [pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="module")]

APP = """
from __future__ import annotations

import os

from muster import metrics

said = metrics.Counter("tests_said_total", "Said.")


class Talker:
    def __init__(self):
        print("constructed")

    async def __call__(self, request):
        said.inc()
        print("said", request.query_params.get("what", "nothing"))
        return str(os.getpid())


class Broken:
    def __init__(self):
        print("before it broke")
        raise RuntimeError("the model file is missing")
"""

SAID, RESPONDED, ONGOING, CONNECTED = (
    "tests_said_total",
    "serve_replica_request_seconds_count",
    "serve_replica_ongoing_seconds_total",
    "serve_replica_bus_connected",
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[Cluster]:
    async with Cluster.running(APP) as running:
        yield running


async def test_replicas_on_both_nodes_answer_and_what_they_count_and_print_is_on_the_host(
    cluster: Cluster,
) -> None:
    host = cluster.host
    far, home = host.replica("Talker"), host.replica("Talker", at=AT_HOME)
    pids = {tag: report.pid for tag, report in (await host.run(far, home)).items()}

    answers = {
        tag: await host.call(tag, query=f"what=by+{tag.rpartition('#')[2]}") for tag in pids for _ in range(3)
    }
    # Users' counters are written at once, those of requests twice a second.
    await host.until_shown(
        lambda shown: (
            (shown.get(SAID), shown.get(RESPONDED), shown.get(CONNECTED)) == (6, 6, 2)
            and shown.get(ONGOING, 0) > 0
        )
    )

    assert all(isinstance(head, ResponseHead) for head, _ in answers.values())
    assert {tag: body.decode() for tag, (_, body) in answers.items()} == {
        tag: str(pid) for tag, pid in pids.items()
    }
    raylet = psutil.Process(cluster.second.raylet)
    assert [child.pid for child in raylet.children() if child.pid in pids.values()] == [pids[far.replica_tag]]
    names = [path.name for path in (cluster.directory / "host").rglob("counter_*.db")]
    assert sorted(names) == sorted(
        [
            f"counter_{cluster.second.node_id}-{pids[far.replica_tag]}.db",
            f"counter_{pids[home.replica_tag]}.db",
        ]
    )
    for goal in (far, home):
        tag = goal.replica_tag
        ids = {"replica_tag": str(tag), "backend_tag": "default/app", "host_id": str(HOST)}
        await host.until_said(message="constructed", event="print", **ids)
        said = await host.until_said(message=f"said by {tag.rpartition('#')[2]}", **ids)
        assert said["request_id"] == "r-1"


async def test_what_a_constructor_printed_before_it_raised_is_in_the_hosts_output(cluster: Cluster) -> None:
    host = cluster.host
    broken = host.replica("Broken")
    await host.goal(broken)

    failed = await host.until_status(ReplicaStatus.FAILED, broken.replica_tag)
    await host.until_said(message="before it broke", replica_tag=str(broken.replica_tag))

    assert failed[broken.replica_tag].error.endswith("RuntimeError: the model file is missing")
    await host.goal()
    await host.until(lambda report: not report.replicas)


async def test_nothing_of_a_replica_that_ends_in_order_is_lost_and_a_killed_one_lets_no_counter_fall(
    cluster: Cluster,
) -> None:
    host = cluster.host
    ending, staying = host.replica("Talker"), host.replica("Talker")
    reports = await host.run(ending, staying)
    before = (await host.samples()).get(SAID, 0.0)
    for number in range(20):
        await host.call(ending.replica_tag, query=f"what={number}")
    await host.goal(staying)
    await host.until(lambda report: [r.replica_tag for r in report.replicas] == [staying.replica_tag])

    after = await host.samples()
    assert after[SAID] == before + 20
    await host.until_said(message="said 19", replica_tag=str(ending.replica_tag))

    await host.call(staying.replica_tag)
    await host.until_shown(lambda shown: (shown.get(SAID), shown.get(CONNECTED)) == (before + 21, 1))
    counted = await host.samples("counter", "histogram")
    os.kill(reports[staying.replica_tag].pid, signal.SIGKILL)
    dead = await host.until_status(ReplicaStatus.DEAD, staying.replica_tag)
    await host.until_shown(lambda shown: CONNECTED not in shown)
    counted_after = await host.samples("counter", "histogram")

    assert {name: value for name, value in counted.items() if counted_after.get(name, -1.0) < value} == {}
    assert f"process {reports[staying.replica_tag].pid} on " in dead[staying.replica_tag].error
    # Its gauges leave the page also when it is only silent; its files are folded once its end is known.
    await eventually(lambda: not list((cluster.directory / "host").rglob("*-*.db")))


async def test_a_machine_that_dies_takes_its_replicas_and_its_resources_along(cluster: Cluster) -> None:
    host = cluster.host
    goals = [host.replica("Talker"), host.replica("Talker")]
    tags = [goal.replica_tag for goal in goals]
    await host.run(*goals)
    for tag in tags:
        await host.call(tag)
    await host.until_shown(lambda shown: shown.get(CONNECTED) == 2)
    counted = await host.samples("counter", "histogram")
    whole = await host.until(lambda report: ELSEWHERE in report.resources)

    os.kill(cluster.second.raylet, signal.SIGKILL)
    first_dead = await host.until(lambda r: any(x.status is ReplicaStatus.DEAD for x in r.replicas))
    dead = await host.until_status(ReplicaStatus.DEAD, *tags)
    counted_after = await host.samples("counter", "histogram")
    home = host.replica("Talker", at=AT_HOME)
    await host.run(home)

    assert (whole.resources["CPU"], first_dead.resources["CPU"]) == (3.0, 1.0)
    assert ELSEWHERE not in first_dead.resources
    assert all("ended with its machine" in report.error for report in dead.values())
    assert {name: value for name, value in counted.items() if counted_after.get(name, -1.0) < value} == {}

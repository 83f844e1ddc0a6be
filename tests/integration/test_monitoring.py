"""Everything that the dashboards ask is asked of a real Prometheus that scrapes a real stack under load: it answers.

One stack, one load and one Prometheus, with the real alert rules, for all of it.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import shutil
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest
import pytest_asyncio
import yaml

from muster.client.admin import AdminClient, connect_stack
from muster.embedded import EmbeddedStack
from muster.embedded.run_record import RunRecord
from serve_common.api.queries import GetAllBackends
from tests.support.dashboards import Question, all_questions, as_grafana_sends, dashboards, selectors
from tests.support.documents import page
from tests.support.identities import admin_address
from tests.support.loads.seen_load import deploy, under_load
from tests.support.paths import ROOT
from tests.support.programs import run_beside
from tests.support.servers.prometheus_server import (
    REQUIRED,
    PrometheusServer,
    promtool_commands,
    run_promtool,
    scrape_config,
)
from tests.support.servers.reserved_port import ANY_PORTS

pytestmark = pytest.mark.timeout(600)

SCRAPE_INTERVAL_S = 1.0
DATA_LIMIT_S = 120.0
"""Far more than it takes; machines may be busy."""
RULES = {f"rules-{file.name}": file.read_text() for file in (ROOT / "deploy/prometheus/rules").glob("*.yml")}
JOBS = ("controller", "proxy", "replica-host")

MAY_BE_EMPTY = {
    "overview / Alerts A": "an alert that fires is not healthy; that they can is promtool's to show",
    "bus-and-hosts / Spans that were dropped A": "nothing is traced here",
    "control-plane / Effects that failed A": "no effect fails while NATS, Postgres and the hosts are well",
    **{
        f"{board} / annotation Change of leader": "one controller, which lives"
        for board in ("overview", "backend", "autoscaling", "rollouts", "control-plane", "bus-and-hosts")
    },
}
"""What has nothing to show on a healthy stack, with the reason. It must be answered all the same."""
PROVOKED = {
    "MusterBackendHasNoReplica",
    "MusterQueueAtLimit",
    "MusterReplicaCrashLoop",
    "MusterReplicasShort",
    "MusterRequestsFail",
    "MusterRolloutAborted",
    "MusterScalingAtMaximum",
}
"""Alerts that this load, or a replica that dies, may leave pending."""
PASSING = {
    "MusterBusUnavailable",
    "MusterHasNoLeader",
    "MusterHasNoLiveHost",
    "MusterProcessDown",
    "MusterScalingDataStale",
    "MusterServiceMissing",
    "MusterStoreUnavailable",
}
"""Before the first scrape nothing is known; and a process that stands still for a second misses a scrape or a report,
which is why all of these wait for a while before they fire. They may begin, and must end again."""
OF_SLOW_MACHINES = {"MusterLoopLags", "MusterNatsUnhealthy", "MusterNatsUnreadable", "MusterUserCodeBlocks"}


class Seen:
    """Prometheus, from when on it was worth asking, and the stack."""

    def __init__(
        self, prometheus: PrometheusServer, since: float, record: RunRecord, admin: AdminClient
    ) -> None:
        self.prometheus = prometheus
        self.since = since
        self.record = record
        self.admin = admin

    def series(self, promql: str) -> list[dict[str, Any]]:
        """Labels and values over the time of the test, as a panel asks for them; an error is an AssertionError."""
        span = {"start": f"{self.since:.3f}", "end": f"{time.time():.3f}", "step": "1"}  # noqa: TID251 - a real clock
        query = urllib.parse.urlencode({"query": promql, **span})
        url = f"{self.prometheus.url}/api/v1/query_range?{query}"
        try:
            with urllib.request.urlopen(url, timeout=60) as response:
                found: list[dict[str, Any]] = json.load(response)["data"]["result"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{promql}: {error.read().decode()}") from error
        return [each for each in found if any(not math.isnan(float(value)) for _, value in each["values"])]

    def rules(self) -> list[dict[str, Any]]:
        """As Prometheus has them, with their health."""
        with urllib.request.urlopen(f"{self.prometheus.url}/api/v1/rules", timeout=60) as response:
            groups = json.load(response)["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def seen(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Seen]:
    directory = tmp_path_factory.mktemp("prometheus")
    directory.chmod(0o755)
    with PrometheusServer(
        directory, scrape_config({}, interval_s=SCRAPE_INTERVAL_S), files=RULES
    ) as prometheus:
        with pytest.MonkeyPatch.context() as environment:
            for name in [name for name in os.environ if name.startswith("MUSTER_")]:
                environment.delenv(name)
            environment.setenv("MUSTER_PROMETHEUS_URL", prometheus.url)
            options = msgspec.structs.replace(ANY_PORTS, num_cpus=12)
            stack = EmbeddedStack(tmp_path_factory.mktemp("s") / "state", options)
            _, _ = await asyncio.gather(asyncio.to_thread(prometheus.start), stack.start())
        try:
            record = stack.record
            targets = {job: [urlsplit(record.ops_urls[job]).netloc] for job in JOBS}
            config = scrape_config(targets, interval_s=SCRAPE_INTERVAL_S, rule_files=list(RULES))
            await asyncio.to_thread(prometheus.configure, config)
            since = time.time()  # noqa: TID251 - a real clock
            async with connect_stack(admin_address(record)) as reached:
                await asyncio.to_thread(prometheus.wait_for, "count(up == 1) == 3")
                await deploy(reached.admin)
                async with under_load(record.http_url):
                    yield Seen(prometheus, since, record, reached.admin)
        finally:
            await stack.stop()


def questions() -> list[tuple[Question, str]]:
    """Each with the PromQL that Grafana would send."""
    return [
        (question, as_grafana_sends(question, board, scrape_interval_s=SCRAPE_INTERVAL_S))
        for name, board in dashboards().items()
        for question in all_questions(name, board)
    ]


@pytest.mark.asyncio(loop_scope="module")
async def test_every_query_of_every_panel_annotation_and_variable_returns_data(seen: Seen) -> None:
    asked = questions()
    assert set(MAY_BE_EMPTY) <= {str(question) for question, _ in asked}
    missing = asked
    give_up_at = time.monotonic() + DATA_LIMIT_S
    while True:
        missing = await asyncio.to_thread(without_data, seen, missing)
        if not missing or time.monotonic() > give_up_at:
            break
        await asyncio.sleep(1.0)  # until there is more
    assert [f"{question}: {promql}" for question, promql in missing] == []


def without_data(seen: Seen, asked: list[tuple[Question, str]]) -> list[tuple[Question, str]]:
    """Those that must have data and have none, and those whose answers lack what their legends show."""
    missing = []
    for question, promql in asked:
        found = seen.series(promql)
        # A label that is empty is left out, as that of requests without an endpoint, which may be the first.
        labels = {label for each in found for label in each["metric"]}
        may_be_empty = not found and str(question) in MAY_BE_EMPTY
        if not may_be_empty and not (found and question.labels <= labels):
            missing.append((question, promql))
    return missing


@pytest.mark.asyncio(loop_scope="module")
async def test_every_alert_rule_is_in_force_and_watches_series_that_are_there(seen: Seen) -> None:
    give_up_at = time.monotonic() + DATA_LIMIT_S
    rules = await asyncio.to_thread(seen.rules)
    while ill := [rule for rule in rules if rule["health"] != "ok"]:  # not known before the first evaluation
        assert time.monotonic() < give_up_at, ill
        await asyncio.sleep(0.2)
        rules = await asyncio.to_thread(seen.rules)
    written = [
        rule for text in RULES.values() for group in yaml.safe_load(text)["groups"] for rule in group["rules"]
    ]
    assert {rule["name"] for rule in rules} == {rule["alert"] for rule in written}
    watched = {str(selector) for rule in written for selector in selectors(rule["expr"])}
    give_up_at = time.monotonic() + DATA_LIMIT_S
    while missing := [promql for promql in watched if not await asyncio.to_thread(seen.series, promql)]:
        assert time.monotonic() < give_up_at, missing
        await asyncio.sleep(1.0)


@pytest.mark.asyncio(loop_scope="module")
async def test_alerts_begin_for_what_is_wrong_and_for_nothing_else(seen: Seen) -> None:
    for name in ("MusterRequestsFail", "MusterQueueAtLimit"):
        promql = f'ALERTS{{alertname="{name}"}}'
        await asyncio.to_thread(seen.prometheus.wait_for, promql, timeout_s=DATA_LIMIT_S)
    alerts = await asyncio.to_thread(seen.series, "ALERTS")
    begun = {each["metric"]["alertname"] for each in alerts}
    assert begun <= PROVOKED | OF_SLOW_MACHINES | PASSING
    give_up_at = time.monotonic() + DATA_LIMIT_S
    while lasting := await asyncio.to_thread(begun_now, seen) - PROVOKED - OF_SLOW_MACHINES:
        assert time.monotonic() < give_up_at, lasting
        await asyncio.sleep(0.2)


def begun_now(seen: Seen) -> set[str]:
    """Alerts that are pending or firing at this moment."""
    return {each["metric"]["alertname"] for each in seen.prometheus.query("ALERTS")}


@pytest.mark.asyncio(loop_scope="module")
async def test_the_packers_of_the_example_follow_the_orders_that_wait(seen: Seen) -> None:
    """``examples/order_queue.py``: replicas follow a PromQL, up and down again."""
    state_dir = seen.record.state_dir

    async def until_packing(number: int) -> None:
        give_up_at = time.monotonic() + DATA_LIMIT_S
        while (found := await packers()) != (number, number):
            assert time.monotonic() < give_up_at, found
            await asyncio.sleep(0.2)

    async def packers() -> tuple[int, int]:
        (view,) = [b for b in await seen.admin.call(GetAllBackends()) if b.backend_tag == "orders/Packer"]
        running = [replica for replica in view.replicas if replica.state == "running"]
        return view.backend_config.num_replicas, len(running)

    (block,) = [each for each in page("examples/README.md").blocks() if "order_queue.py" in each.text]
    deploy_example, update, _ = (command.words for command in block.commands())
    await run_beside(state_dir, sys.executable, *deploy_example[1:])
    await run_beside(state_dir, str(Path(sys.executable).parent / update[0]), *update[1:])
    assert (await packers())[0] == 1
    request = urllib.request.Request(f"{seen.record.http_url}/orders", b"40")
    taken = await asyncio.to_thread(lambda: json.load(urllib.request.urlopen(request, timeout=60)))
    assert taken["waiting"] + taken["packed"] <= 40
    await until_packing(3)
    await until_packing(1)  # once fewer than ten wait


# promtool itself judges the alert rules: they are rules, and each fires when it should and only then.


DIRECTORY = ROOT / "deploy/prometheus"
RULE_FILES = sorted(str(file.relative_to(DIRECTORY)) for file in DIRECTORY.glob("rules/*.yml"))
TESTS = sorted(str(file.relative_to(DIRECTORY)) for file in DIRECTORY.glob("tests/*.yml"))


def test_every_alert_fires_when_it_should_and_only_then() -> None:
    assert TESTS
    for command in promtool_commands(DIRECTORY):
        done = run_promtool([*command, "test", "rules", *TESTS], DIRECTORY)
        assert done.returncode == 0, done.stdout + done.stderr
        checked = run_promtool([*command, "check", "rules", *RULE_FILES], DIRECTORY)
        assert checked.returncode == 0, checked.stdout + checked.stderr


def test_the_configuration_of_compose_finds_all_rules() -> None:
    in_image = [command for command in promtool_commands(DIRECTORY) if command[0] == "docker"]
    if not in_image:
        assert os.environ.get(REQUIRED) != "1", f"{REQUIRED}=1, but there is no image"
        pytest.skip("NOT TESTED: the paths of prometheus.yml, for they are those of the image")
    done = run_promtool([*in_image[0], "check", "config", "prometheus.yml"], DIRECTORY)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("rules found") == len(RULE_FILES), done.stdout


def test_promtool_notices_an_alert_that_no_longer_does_what_its_test_says(tmp_path: Path) -> None:
    for part in ("rules", "tests"):
        shutil.copytree(DIRECTORY / part, tmp_path / part)
    rules = tmp_path / "rules/scaling.yml"
    rules.write_text(rules.read_text().replace("for: 1m", "for: 5m"))
    tmp_path.chmod(0o755)
    command = promtool_commands(tmp_path)[0]
    done = run_promtool([*command, "test", "rules", "tests/scaling.yml"], tmp_path)
    assert done.returncode != 0
    assert "MusterScalingDataStale" in done.stdout + done.stderr

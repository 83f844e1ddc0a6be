"""The stack in containers does the main job, also when it is scaled, and remembers it when parts of it go away."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.aio.client import Client
from nats.errors import Error as NatsError

from serve_common.identities.roles import Role
from serve_common.nats.client import login_arguments
from serve_common.nats.login import build_login
from tests.compose.stack import DIGITS_REQUESTS, Stack
from tests.support.identities import bus_settings

pytestmark = [pytest.mark.compose, pytest.mark.timeout(1200)]

OURS = {"console": 1, "controller": 1, "proxy": 1, "replica-host": 1}
SERVICES = {"nats", "postgres", "prometheus", "ingress", *OURS}


async def connect(stack: Stack, role: str, **options: Any) -> Client:
    """As any NATS client would."""
    login = build_login(bus_settings(stack.secrets, stack.nats_url, Role(role)))
    options |= login_arguments(login, "", "")
    return await nats.connect(
        stack.nats_url, connect_timeout=30, allow_reconnect=False, max_reconnect_attempts=0, **options
    )


def test_every_container_is_healthy(stack: Stack) -> None:
    assert {container.Service for container in stack.compose.get_containers(include_all=True)} == SERVICES
    stack.wait_for_containers()


@pytest.mark.parametrize("service", sorted({"ingress", *OURS}))
def test_our_containers_run_without_root_and_cannot_change_their_image(stack: Stack, service: str) -> None:
    # The replica host starts as root and stays none of it: test_user_code_apart.py.
    as_user = ("--user", "10001:10001") if service == "replica-host" else ()
    assert stack.run("exec", "-T", *as_user, service, "id", "-u").strip() != "0"
    probe = "touch /etc/probe 2>/dev/null || touch /opt/probe 2>/dev/null || echo refused"
    assert stack.run("exec", "-T", service, "sh", "-c", probe).strip() == "refused"
    effective = stack.run("exec", "-T", *as_user, service, "grep", "CapEff", "/proc/self/status").split()[1]
    assert int(effective, 16) == 0


@pytest.mark.parametrize(
    ("service", "absent"),
    [
        ("controller", "ray"),
        ("console", "ray"),
        ("console", "asyncpg"),
        ("proxy", "ray"),
        ("proxy", "asyncpg"),
        ("replica-host", "asyncpg"),
    ],
)
def test_an_image_holds_only_what_its_service_needs(stack: Stack, service: str, absent: str) -> None:
    probe = f"import importlib.util as i; print(i.find_spec({absent!r}))"
    assert stack.run("exec", "-T", service, "python", "-c", probe).strip() == "None"


FORBIDDEN = {
    "nats": 8222, "postgres": 5432, "controller": 9101, "proxy": 9102, "ingress": 9104, "prometheus": 9090,
    "console": 8080,
}  # fmt: skip
"""What user code has no business with; Grafana is on Prometheus' network alone."""

CONNECT = """
import json, socket, sys
from concurrent.futures import ThreadPoolExecutor

def attempt(target):
    try:
        socket.create_connection(target, 3).close()
        return "connected"
    except OSError as error:
        return type(error).__name__

with ThreadPoolExecutor(64) as threads:
    print(json.dumps(list(threads.map(attempt, json.loads(sys.argv[1])))))
"""


def test_replicas_reach_nats_and_nothing_else(stack: Stack) -> None:
    """Attempts at every address that any container, or the machine itself, has on any network, and at every name."""

    def connect(service: str, targets: list[tuple[str, int]]) -> dict[tuple[str, int], str]:
        said = stack.run("exec", "-T", service, "python", "-c", CONNECT, json.dumps(targets))
        return dict(zip(targets, json.loads(said), strict=True))

    forbidden: list[tuple[str, int]] = []
    gateways: set[str] = set()
    for service, port in FORBIDDEN.items():
        names = {service, f"{service}-monitoring"}
        for network in stack.networks(service):
            names |= {network["IPAddress"], *(network["Aliases"] or ())}
            gateways |= {network["Gateway"]} - {""}
        forbidden += [(name, port) for name in sorted(names)]
    published = [
        int(stack.address(*each).rpartition(":")[2])
        for each in (("prometheus", 9090), ("nats", 4222), ("console", 8080))
    ]
    forbidden += [(gateway, port) for gateway in sorted(gateways) for port in published]
    forbidden += [(network["IPAddress"], 8000) for network in stack.networks("proxy")]
    assert len(forbidden) > 30
    found = connect("replica-host", [("nats", 4222), *forbidden])
    assert found.pop(("nats", 4222)) == "connected"
    assert {target for target, outcome in found.items() if outcome == "connected"} == set()
    # What was asked for is there, for those who have to look at it.
    seen = connect(
        "controller",
        [
            *((f"{name}-monitoring", FORBIDDEN[name]) for name in ("nats", "prometheus", "controller")),
            *((name, FORBIDDEN[name]) for name in ("proxy", "ingress", "postgres", "console")),
            ("replica-host", 9103),
        ],
    )
    assert set(seen.values()) == {"connected"}, seen


def test_every_container_has_limits(stack: Stack) -> None:
    for service in SERVICES:
        limits = stack.inspect(service)["HostConfig"]
        assert limits["Memory"] > 0, service
        assert limits["PidsLimit"] > 0, service
        assert (limits["NanoCpus"] > 0) or (service == "replica-host" and limits["CpuShares"] == 256), service


def test_the_example_is_deployed_by_the_cli_and_answers_every_request(stack: Stack) -> None:
    stack.deploy_digits()
    result = stack.evaluate()
    assert result["failures"] == 0, result
    assert result["accuracy"] >= 0.95
    (known,) = json.loads(stack.muster("status", "--json"))["deployments"]
    assert (known["name"], known["status"]) == ("default/digits", "healthy")


def test_large_bodies_take_direct_links_over_a_volume_that_only_proxies_and_hosts_have(stack: Stack) -> None:
    stack.have_digits()

    def links() -> float:
        request = urllib.request.Request(stack.http("/digits"), data=bytes(300_000), method="POST")
        with contextlib.suppress(urllib.error.HTTPError):  # no digits are in it
            urllib.request.urlopen(request, timeout=60).close()
        page = stack.run("exec", "-T", "proxy", "python", "-c", METRICS)
        return float(re.search(r'^serve_proxy_direct_links{transport="unix"} (\S+)$', page, re.MULTILINE)[1])  # type: ignore[index]

    stack.wait_until(lambda: links() >= 1, "the proxy has a direct link", links)
    mode = stack.run("exec", "-T", "replica-host", "stat", "-c", "%a %u %g", "/run/muster/direct")
    assert mode.split() == ["2750", "10002", "10001"]
    sharing = {
        service
        for service in SERVICES
        if "/run/muster/direct" in json.dumps(stack.inspect(service)["Mounts"])
    }
    assert sharing == {"proxy", "replica-host"}


METRICS = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:9102/metrics').read().decode())"


def test_prometheus_sees_every_process(stack: Stack) -> None:
    for service in (*OURS, "ingress", "prometheus"):
        stack.wait_for_query(f'sum(up{{job="{service}"}})', 1)
    stack.wait_for_query("min(up)", 1)


def test_loads_are_read_from_prometheus_and_nothing_moves_wrongly_while_that_is_away(stack: Stack) -> None:
    """Six by a query, at two each: three replicas, whatever becomes of Prometheus. Requests are read elsewhere then."""
    config = {
        "min_replicas": 1,
        "max_replicas": 5,
        "upscale_delay_s": 0,
        "downscale_delay_s": 0,
        "metrics_interval_s": 1,
        # After an outage Prometheus is read again once it covers as much.
        "look_back_period_s": 8,
        "panic_window_s": 4,
        "query": {"promql": "vector(6)", "target": 2},
    }
    stack.muster(
        "deploy", "noop:Noop", "--name", "followed", "--route-prefix", "/followed", "--app-dir", "/apps/noop",
        "--num-cpus", "0.1", "--autoscaling-config", json.dumps(config),
    )  # fmt: skip
    followed = "min_replicas=1,max_replicas=2,metrics_interval_s=1,look_back_period_s=8,panic_window_s=4"
    stack.deploy_digits("--autoscaling-config", followed)
    stack.wait_for_autoscaling("followed", num_replicas=3, verdict="steady", source="prometheus")
    stack.wait_for_autoscaling("digits", source="prometheus", is_seen=True)
    stack.wait_until_healthy("default/followed")
    stack.run("kill", "prometheus")
    stack.wait_for_autoscaling("followed", num_replicas=3, verdict="held", why="Prometheus")
    stack.wait_for_autoscaling("digits", num_replicas=1, source="scrape", is_seen=True)
    stack.up("prometheus")
    stack.wait_for_autoscaling("followed", num_replicas=3, verdict="steady", source="prometheus")
    stack.wait_for_autoscaling("digits", num_replicas=1, source="prometheus", is_seen=True)
    stack.wait_for_query('serve_autoscaler_target_replicas{backend_tag="default/followed"}', 3)
    stack.muster("delete", "followed")
    stack.deploy_digits()


async def test_a_foreign_nats_client_lists_deployments_and_deploys(stack: Stack) -> None:
    stack.have_digits()
    client = await connect(stack, "admin")
    try:
        answer = await client.request("serve.admin.list_deployments", b"{}", timeout=60)
        assert "default/digits" in answer.data.decode()
        request = {
            "name": "foreign",
            "replica_config": {"import_path": "noop:Noop", "app_dir": "/apps/noop"},
            "route_prefix": "/foreign",
        }
        answer = await client.request("serve.admin.deploy", json.dumps(request).encode(), timeout=60)
        assert not answer.headers, answer.headers
        goal_id = json.loads(answer.data)["goal_id"]
        wait = json.dumps({"goal_id": goal_id, "timeout_s": 30}).encode()
        for _ in range(6):
            answer = await client.request("serve.admin.wait_for_goal", wait, timeout=60)
            if json.loads(answer.data)["status"] != "pending":
                break
        assert json.loads(answer.data)["status"] == "succeeded", answer.data
    finally:
        await client.close()
    stack.muster("delete", "foreign")


async def test_an_anonymous_connection_is_refused(stack: Stack) -> None:
    # By hand, because nats-py leaves its socket open when it is refused.
    host, port = stack.address("nats", 4222).split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        assert b'"auth_required":true' in await reader.readline()
        writer.write(b'CONNECT {"verbose":false}\r\nPING\r\n')
        said = await asyncio.wait_for(reader.readline(), 60)
        assert said.startswith(b"-ERR 'Authorization Violation'")
    finally:
        writer.close()
        await writer.wait_closed()


async def test_a_proxys_credentials_do_not_serve_for_commands(stack: Stack) -> None:
    refusals: asyncio.Queue[Exception] = asyncio.Queue()
    client = await connect(stack, "proxy", error_cb=refusals.put, inbox_prefix=b"_INBOX_proxy.proxy-1")
    try:
        with pytest.raises(NatsError):
            await client.request("serve.admin.list_deployments", b"{}", timeout=2)
        refusal = await asyncio.wait_for(refusals.get(), 60)
        assert "permissions violation" in str(refusal).lower()
    finally:
        await client.close()


def test_a_killed_controller_comes_back_and_keeps_everything(stack: Stack) -> None:
    stack.have_digits()
    before = stack.status()["deployments"]
    with stack.under_load() as result:
        stack.run("kill", "controller")
        stack.up("controller")
    assert result["failures"] == 0, result
    stack.wait_until(lambda: stack.status()["deployments"] == before, f"there is {before}", stack.status)
    stack.deploy_digits("--user-config", '{"threshold": 0.5}')
    stack.deploy_digits()


def test_a_standby_controller_takes_over_from_one_that_is_killed(stack: Stack) -> None:
    stack.have_digits()
    stack.up("--no-recreate", "--scale", "controller=2")
    before = stack.status()
    with stack.under_load() as result:
        stack.kill_container(before["controller_id"])
        stack.muster("scale", "digits", "2")
        stack.muster("scale", "digits", "1")
        after = stack.status()
    assert result["failures"] == 0, result
    assert after["controller_id"] != before["controller_id"]
    assert after["epoch"] > before["epoch"]
    stack.up("--scale", "controller=1")
    stack.deploy_digits()


def test_the_stack_scales_up_is_upgraded_and_scales_down_under_load(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack.have_digits()
    with stack.under_load() as result:
        stack.up("--no-recreate", "--scale", "proxy=2", "--scale", "replica-host=2")
        stack.wait_for_query('sum(up{job="proxy"})', 2)
        stack.wait_for_query('sum(up{job="replica-host"})', 2)

        def live_hosts() -> int:
            return sum(host["status"] == "live" for host in stack.status()["hosts"])

        stack.wait_until(lambda: live_hosts() == 2, "both hosts live", live_hosts)
    assert result["failures"] == 0, result

    def both_proxies_asked() -> bool:
        assert stack.evaluate()["failures"] == 0
        return len(stack.query(f"sum by (instance) ({DIGITS_REQUESTS}) > 0")) == 2

    # Connections are spread, so those that are open stay where they are, and what is new meets both.
    stack.wait_until(both_proxies_asked, "both proxies were asked")

    before = stack.containers(*OURS)
    assert len(before) == 6
    assert stack.upgrade().count("up to date") == len(OURS)
    assert stack.containers(*OURS) == before, "what is up to date stays"
    monkeypatch.setenv("MUSTER_LOG_LEVEL", "warning")  # another configuration, as another image would be
    with stack.under_load() as result:
        assert stack.upgrade().count("is replaced") == 5
    assert result["failures"] == 0, result
    after = stack.containers(*OURS)
    assert (len(after), after & before) == (6, set())
    stack.wait_until(lambda: live_hosts() == len(stack.status()["hosts"]) == 2, "no host is left behind")
    assert not any(host["draining"] for host in stack.status()["hosts"])

    with stack.under_load() as result:
        stack.up("--no-recreate", "--scale", "proxy=1", "--scale", "replica-host=1")
    assert result["failures"] == 0, result


HELD = """
import sys

import numpy
from sklearn.neighbors import KNeighborsRegressor

import muster as serve


@serve.deployment(ray_actor_options={"num_cpus": 0.1})
class Held:
    def __init__(self, model, version):
        self.model, self.version = model, version

    def __call__(self, request):
        return f"{self.version} {self.model.predict([[0.5] * 64])[0]:.6f}"


points = numpy.random.default_rng(0).random((40_000, 64))
model = KNeighborsRegressor(algorithm="brute").fit(points, points.sum(axis=1))
serve.run(Held.bind(model, sys.argv[1]), name="held", route_prefix="/held")
print(f"{model.predict([[0.5] * 64])[0]:.6f}")
"""
"""A class of the program itself with a fitted model of 20 MB, which no host has as a file."""


def test_a_stack_that_was_taken_down_brings_its_deployments_back(stack: Stack, tmp_path: Path) -> None:
    stack.have_digits()
    (tmp_path / "held.py").write_text(HELD)
    predicted = stack.python(tmp_path / "held.py", "v1").split()[-1]
    assert stack.python(tmp_path / "held.py", "v2").split()[-1] == predicted
    assert stack.get("/held") == f"v2 {predicted}"

    stack.run("down")
    stack.up()
    stack.wait_until_healthy("default/digits")
    result = stack.evaluate()
    assert result["failures"] == 0, result
    stack.wait_until_healthy("held/Held")
    assert stack.get("/held") == f"v2 {predicted}", "neither the program nor its upload is there any more"
    stack.muster("app", "rollback", "held")
    assert stack.get("/held") == f"v1 {predicted}"
    stack.muster("app", "delete", "held")

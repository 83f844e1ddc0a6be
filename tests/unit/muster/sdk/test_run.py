"""What `serve.run` waits for, which stack it finds within a replica, and the words of `serve.status`."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

import muster as serve
from muster.client.admin import Stack
from muster.config import HTTPOptions
from muster.exceptions import RayServeException
from muster.schema import (
    ApplicationStatus,
    DeploymentStatus,
    DeploymentStatusTrigger,
    ProxyStatus,
    ReplicaState,
)
from muster.sdk import client as client_module
from muster.sdk import run as run_module
from muster.sdk.build import build_app
from muster.sdk.client import find_address
from muster.sdk.run import DeployFailed, wait_serving
from muster.sdk.states import view_status
from serve_common.api.views import (
    HEALTH_CHECKS_FAILED,
    ApplicationView,
    DeploymentView,
    GoalStatus,
    HostView,
    ProxyView,
    ReplicaView,
    StatusView,
)
from serve_common.api.views import DeploymentStatus as Health
from serve_common.config.autoscaling import AutoscalingConfig
from serve_common.config.backend import BackendConfig, ReplicaConfig
from serve_common.errors import BusUnavailable
from serve_common.names import BackendTag, GoalId, ReplicaTag
from serve_common.runtime.request_context import CurrentReplica, set_replica_context
from serve_common.runtime.settings import BusSettings

REPLICA = ReplicaView(replica_tag="shop/a#0", state="running", host_id="h1", version=None)
DEPLOYMENT = DeploymentView(
    name="shop/a",
    status=Health.HEALTHY,
    message="",
    route_prefix="/",
    methods=["GET"],
    version=None,
    code_version=1,
    backend_config=BackendConfig(start_timeout_s=1.0),
    replica_config=ReplicaConfig(import_path="m:A"),
    goal_id=GoalId("goal-1"),
    goal_status=GoalStatus.SUCCEEDED,
    replicas=[REPLICA],
    application="shop",
    started_at=5.0,
)
PROXY = ProxyView(proxy_id="p1", status="live", report_age_s=0.1, address="", applied_snapshot_id=7)
HOST = HostView(host_id="h1", status="live", report_age_s=0.1, resources={}, num_replicas=1)
STATUS = StatusView(
    controller_id="c",
    epoch=1,
    store_available=True,
    snapshot_id=7,
    deployments=[DEPLOYMENT],
    hosts=[HOST],
    proxies=[PROXY],
)
APPLICATION = ApplicationView(
    name="shop",
    status=Health.HEALTHY,
    message="",
    route_prefix="/",
    ingress="shop/a",
    deployments=["shop/a"],
    goal_id=GoalId("goal-1"),
    goal_status=GoalStatus.SUCCEEDED,
    deployed_at=9.0,
)


def changed(**changes: Any) -> StatusView:
    """The status with another state of its one deployment."""
    return msgspec.structs.replace(STATUS, deployments=[msgspec.structs.replace(DEPLOYMENT, **changes)])


class Admin:
    """Gives one status after the other, the last one for ever."""

    def __init__(self, *statuses: StatusView) -> None:
        self.statuses = list(statuses)
        self.queries = 0

    async def fetch_status(self) -> StatusView:
        self.queries += 1
        return self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]


@serve.deployment
def a() -> None:
    pass


async def wait(*statuses: StatusView) -> Admin:
    admin = Admin(*statuses)
    stack = cast("Stack", type("AdminOnly", (), {"admin": admin}))
    async with asyncio.timeout(30):
        await wait_serving(stack, build_app(a.bind(), name="shop", route_prefix="/"), "Deploying failed")
    return admin


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "_STATUS_PAUSE_S", 0.001)


@pytest.mark.parametrize(
    "not_yet",
    [
        changed(status=Health.UNHEALTHY, message="0 of 1 replicas serve"),
        changed(status=Health.UPDATING),
        msgspec.structs.replace(STATUS, hosts=[msgspec.structs.replace(HOST, status="suspect")]),
        msgspec.structs.replace(STATUS, hosts=[]),
        msgspec.structs.replace(STATUS, proxies=[msgspec.structs.replace(PROXY, applied_snapshot_id=6)]),
    ],
)
async def test_an_application_that_was_deployed_before_is_waited_for_until_it_serves(
    not_yet: StatusView,
) -> None:
    assert (await wait(STATUS)).queries == 1
    assert (await wait(not_yet, not_yet, STATUS)).queries == 3


async def test_a_proxy_that_left_is_not_waited_for() -> None:
    lost = msgspec.structs.replace(PROXY, proxy_id="p2", status="lost", applied_snapshot_id=1)
    assert (await wait(msgspec.structs.replace(STATUS, proxies=[PROXY, lost]))).queries == 1


async def test_what_never_serves_or_is_gone_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "START_SLACK_S", -1.0)
    down = changed(status=Health.UNHEALTHY, message="0 of 1 replicas serve: no host has room")
    with pytest.raises(
        DeployFailed, match=r"Deploying failed: .* does not serve: shop/a is unhealthy: .* no host"
    ):
        await wait(down)
    for gone in (msgspec.structs.replace(STATUS, deployments=[]), changed(status=Health.DELETING)):
        with pytest.raises(DeployFailed, match="deleted meanwhile"):
            await wait(gone)


# -- in a replica --


@pytest.fixture
def in_replica(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    for name in client_module._ADMINS_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("MUSTER_NATS_URL", raising=False)
    monkeypatch.chdir(tmp_path)
    bus = BusSettings(servers=["nats://here:4222"], user="", inbox_prefix="_I", subject_prefix="own")
    context = CurrentReplica(
        replica_tag=ReplicaTag("shop/a#0"),
        backend_tag=BackendTag("shop/a"),
        bus=bus,
        code_version=1,
        peer_versions={},
    )
    set_replica_context(context)
    yield tmp_path
    set_replica_context(None)


@pytest.mark.parametrize(
    "use",
    [
        lambda: serve.run(a.bind()),
        serve.status,
        serve.shutdown,
        serve.start,
        lambda: serve.delete("shop"),
    ],
)
def test_a_replica_without_an_admins_credentials_is_told_what_to_do(in_replica: Path, use: Any) -> None:
    with pytest.raises(
        RayServeException, match=r"give it an admin's credentials in env_vars .* MUSTER_NATS_CREDS_FILE"
    ):
        use()


def test_a_replica_with_credentials_finds_its_own_stack_or_the_one_that_is_named(
    in_replica: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = in_replica / "admin.creds"
    file.touch()
    monkeypatch.setenv("MUSTER_NATS_CREDS_FILE", str(file))
    address = find_address()
    assert (address.urls, address.credentials_file, address.subject_prefix) == (
        ("nats://here:4222",),
        str(file),
        "own",
    )
    monkeypatch.setenv("MUSTER_NATS_URL", "nats://elsewhere:4222")
    assert find_address().urls == ("nats://elsewhere:4222",)


def test_a_replica_never_starts_a_stack(in_replica: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUSTER_STATE_DIR", str(in_replica / "nothing"))
    with pytest.raises(BusUnavailable, match="no stack was found"):
        serve.run(a.bind())
    client_module.close_client()


# -- status --


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({}, ApplicationStatus.RUNNING),
        ({"goal_status": GoalStatus.PENDING, "status": Health.UPDATING}, ApplicationStatus.DEPLOYING),
        ({"goal_status": GoalStatus.FAILED}, ApplicationStatus.DEPLOY_FAILED),
        ({"status": Health.UNHEALTHY}, ApplicationStatus.UNHEALTHY),
        ({"status": Health.DELETING}, ApplicationStatus.DELETING),
    ],
)
def test_an_application_has_ray_serves_words(changes: dict[str, Any], status: ApplicationStatus) -> None:
    view = msgspec.structs.replace(APPLICATION, message="why", **changes)
    shown = view_status(STATUS, [view])
    assert shown.target_capacity is None
    assert shown.applications["shop"].status == status
    assert shown.applications["shop"].message == "why"
    assert shown.applications["shop"].last_deployed_time_s == 9.0


SCALED = BackendConfig(num_replicas=2, autoscaling_config=AutoscalingConfig(max_replicas=5))


@pytest.mark.parametrize(
    ("changes", "status", "trigger"),
    [
        ({}, DeploymentStatus.HEALTHY, DeploymentStatusTrigger.CONFIG_UPDATE_COMPLETED),
        (
            {"status": Health.UPDATING},
            DeploymentStatus.UPDATING,
            DeploymentStatusTrigger.CONFIG_UPDATE_STARTED,
        ),
        (
            {"goal_status": GoalStatus.FAILED},
            DeploymentStatus.DEPLOY_FAILED,
            DeploymentStatusTrigger.REPLICA_STARTUP_FAILED,
        ),
        (
            {"status": Health.UNHEALTHY},
            DeploymentStatus.UNHEALTHY,
            DeploymentStatusTrigger.HEALTH_CHECK_FAILED,
        ),
        ({"status": Health.DELETING}, DeploymentStatus.UPDATING, DeploymentStatusTrigger.DELETING),
        ({"backend_config": SCALED}, DeploymentStatus.UPSCALING, DeploymentStatusTrigger.AUTOSCALING),
        (
            {"backend_config": SCALED, "replicas": [REPLICA] * 3},
            DeploymentStatus.DOWNSCALING,
            DeploymentStatusTrigger.AUTOSCALING,
        ),
    ],
)
def test_a_deployment_has_ray_serves_words(
    changes: dict[str, Any], status: DeploymentStatus, trigger: DeploymentStatusTrigger
) -> None:
    shown = (
        view_status(changed(message="why", **changes), [APPLICATION]).applications["shop"].deployments["a"]
    )
    assert (shown.status, shown.status_trigger) == (status, trigger)
    if status is DeploymentStatus.DEPLOY_FAILED:
        assert shown.message.startswith("The deployment failed to start 3 times in a row.")
        assert shown.message.endswith("Error:\nwhy")
    else:
        assert shown.message == "why"


@pytest.mark.parametrize(
    ("state", "message", "status"),
    [
        ("should_stop", HEALTH_CHECKS_FAILED, "UNHEALTHY"),
        ("stopping", HEALTH_CHECKS_FAILED, "UNHEALTHY"),
        ("should_stop", "", "HEALTHY"),
        ("stopping", "has been stopping for too long", "HEALTHY"),
        ("running", "odd", "HEALTHY"),
    ],
)
def test_a_deployment_is_unhealthy_while_a_failed_replica_stops(
    state: str, message: str, status: str
) -> None:
    other = msgspec.structs.replace(REPLICA, replica_tag="shop/a#1", state=state, message=message)
    app = view_status(changed(replicas=[REPLICA, other]), [APPLICATION]).applications["shop"]
    assert app.deployments["a"].status == status
    assert app.status == ("UNHEALTHY" if status == "UNHEALTHY" else "RUNNING")


def test_an_application_that_failed_names_its_failed_deployments() -> None:
    failed = msgspec.structs.replace(APPLICATION, message="why", goal_status=GoalStatus.FAILED)
    shown = view_status(changed(goal_status=GoalStatus.FAILED), [failed])
    assert shown.applications["shop"].message == "Failed to update the deployments ['a']."


def test_replicas_and_proxies_have_ray_serves_words() -> None:
    states = ["should_start", "starting", "running", "updating", "unhealthy", "should_stop", "stopping"]
    replicas = [msgspec.structs.replace(REPLICA, state=state) for state in states]
    proxies = [
        msgspec.structs.replace(PROXY, proxy_id=state, status=state) for state in ("live", "leaving", "lost")
    ]
    status = msgspec.structs.replace(changed(replicas=replicas), proxies=proxies)
    shown = view_status(status, [APPLICATION])
    assert shown.applications["shop"].deployments["a"].replica_states == {
        ReplicaState.STARTING: 2,
        ReplicaState.RUNNING: 2,
        ReplicaState.UPDATING: 1,
        ReplicaState.STOPPING: 2,
    }
    assert shown.proxies == {
        "live": ProxyStatus.HEALTHY,
        "leaving": ProxyStatus.DRAINING,
        "lost": ProxyStatus.UNHEALTHY,
    }


def test_an_application_that_no_name_allows_is_not_there_to_delete(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr("muster.sdk.run.get_client", lambda: asked.append(1))
    serve.delete("never there")
    assert not asked, "no stack is looked for"


def test_a_certificate_is_whole_and_clients_are_not_asked_for_theirs() -> None:
    assert HTTPOptions(ssl_keyfile="k", ssl_certfile="c").ssl_certfile == "c"
    for half in ({"ssl_keyfile": "k"}, {"ssl_certfile": "c"}):
        with pytest.raises(ValueError, match="Both ssl_keyfile and ssl_certfile must be provided together"):
            HTTPOptions(**half)
    with pytest.raises(ValueError, match="ssl_ca_certs is not supported: let a load balancer"):
        HTTPOptions(ssl_keyfile="k", ssl_certfile="c", ssl_ca_certs="ca")


class FakeRay:
    """As much of Ray as a program's stack asks of it."""

    def __init__(self, cpus: float) -> None:
        self.cpus, self.inits, self.is_up = cpus, list[dict[str, str]](), False

    def init(self, **options: str) -> None:
        self.inits.append(options)
        self.is_up = True

    def is_initialized(self) -> bool:
        return self.is_up

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": self.cpus}

    def get_runtime_context(self) -> SimpleNamespace:
        return SimpleNamespace(gcs_address=f"127.0.0.1:{len(self.inits)}")


@pytest.mark.parametrize(("cpus", "offered"), [(2.0, 8), (36.0, 36)])
def test_a_programs_ray_is_used_with_its_cpus_and_missed_when_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cpus: float, offered: int
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ray = FakeRay(cpus)
    monkeypatch.setitem(sys.modules, "ray", ray)
    embedded = client_module._Embedded(HTTPOptions())
    assert ray.inits == [{"namespace": "serve"}]
    options = embedded._stack._options
    assert (options.ray_address, options.num_cpus) == ("127.0.0.1:1", offered)
    assert not embedded.has_lost_ray
    ray.is_up = False
    assert embedded.has_lost_ray
    ray.init()
    assert embedded.has_lost_ray, "it is another"


def test_a_program_that_does_not_import_ray_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    embedded = client_module._Embedded(HTTPOptions())
    assert (embedded._stack._options.ray_address, embedded._stack._options.num_cpus) == ("", None)
    assert not embedded.has_lost_ray

"""Every command in one table: arguments to request, how its end is told, `--json`, `--dry-run` and exit codes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import Result

from muster.cli.config_options import BACKEND_CHANGES, BACKEND_OPTIONS, CODE_OPTIONS
from muster.cli.endpoint_options import ENDPOINT_CHANGES, ENDPOINT_OPTIONS
from muster.cli.endpoints import HTTP_CHANGES
from muster.cli.parsing import group_text
from muster.client.requests import UnknownError
from serve_common.api.commands import (
    ChangeReply,
    ControlRollout,
    CreateBackend,
    CreateEndpoint,
    DeleteApplication,
    DeleteBackend,
    DeleteDeployment,
    DeleteEndpoint,
    Deploy,
    DrainHost,
    PauseAutoscaling,
    Request,
    ResumeAutoscaling,
    Rollback,
    RolloutAction,
    Scale,
    SetCapture,
    SetEndpointOptions,
    SetHttpOptions,
    SetTraffic,
    ShadowTraffic,
    Shutdown,
    ShutdownReply,
    StartRollout,
    UndrainHost,
    UpdateBackendConfig,
)
from serve_common.api.queries import (
    COMMANDS,
    QUERIES,
    GetAllApplications,
    GetAllBackends,
    GetAllEndpoints,
    GetAutoscaling,
    GetBackendConfig,
    GetCaptures,
    GetDeploymentInfo,
    GetEvents,
    GetHistory,
    GetHosts,
    GetHttpConfig,
    GetHttpProxies,
    GetRevisions,
    GetRollouts,
    GetStatus,
    ListDeployments,
    Query,
    WaitForGoal,
)
from serve_common.api.rollout_views import GateView, PassedStepView, RolloutView
from serve_common.api.views import (
    ApplicationView,
    AutoscalingView,
    BackendConfigView,
    BackendView,
    CaptureView,
    DeploymentStatus,
    EndpointView,
    EventView,
    GoalStatus,
    GoalView,
    HistoryView,
    HostView,
    PlannedAction,
    PlannedReplica,
    PlanView,
    ReplicaView,
    RevisionView,
)
from serve_common.config.autoscaling import AggregationFunction, AutoscalingConfig
from serve_common.config.backend import (
    METHODS,
    BackendConfig,
    BackpressureConfig,
    CircuitBreaker,
    EndpointOptions,
    HttpOptions,
    LogEncoding,
    LoggingConfig,
    OnFailure,
    OutlierEjection,
    Placement,
    RayActorOptions,
    ReplicaConfig,
    ReplicaPolicyName,
)
from serve_common.config.capture import CaptureConfig
from serve_common.config.rollout import RolloutConfig
from serve_common.errors import (
    BadField,
    BusAuthorizationFailed,
    BusUnavailable,
    Conflict,
    DeadlineExceeded,
    NotFound,
    PermanentError,
    ServeError,
    StoreUnavailable,
    TransientError,
    UserCodeRaised,
)
from serve_common.names import GoalId
from tests.unit.muster.cli.conftest import DEPLOYMENT, GOAL, HOST, PROXY, STATUS

Muster = Callable[..., Result]
V1, V2 = "default/v1", "default/v2"
CODE = ReplicaConfig(import_path="digits:Digits")
SERVED_CODE = ReplicaConfig(import_path="digits:Digits", app_dir="/apps", init_args=[1])
CONFIG = BackendConfig(num_replicas=2, user_config={"threshold": 0.5})
REPLICAS = [
    ReplicaView(replica_tag="default/digits#1", state="running", host_id="host-1", version="v1"),
    ReplicaView(replica_tag="default/digits#2", state="starting", host_id=None, version="v1", message="[1]"),
]
UPDATING = msgspec.structs.replace(
    DEPLOYMENT,
    status=DeploymentStatus.UPDATING,
    message="1 of 2 replicas serve",
    backend_config=CONFIG,
    replica_config=SERVED_CODE,
    goal_status=GoalStatus.PENDING,
    replicas=REPLICAS,
    application="shop",
    is_ingress=True,
    ended_at=1_700_000_060.0,
)
DRAINED = msgspec.structs.replace(HOST, resources={"CPU": 2.0}, draining=True)
PROXIES = [PROXY, msgspec.structs.replace(PROXY, proxy_id="proxy-2", applied_snapshot_id=7)]


ROLLOUT = RolloutView(
    backend_tag="default/digits",
    goal_id=GoalId("g7"),
    version="v2",
    state="running",
    outcome="",
    reason="errors: 0 of 80 failed",
    steps=["5% 30s", "25% 30s", "50% 30s", "100%"],
    step=1,
    is_in_force=True,
    in_force_at=1_700_000_030.0,
    gates=[
        GateView(
            kind="errors", status="unknown", text="0 of 80 failed", canary_requests=80, requests_needed=400
        )
    ],
    passed=[PassedStepView(step="5% 30s", passed_at=1_700_000_030.0, requests=900, why="errors: 1 of 900")],
    replica_failures={},
    started_at=1_700_000_000.0,
    decided_at=None,
    ended_at=None,
)


COMMAND_LINES: list[tuple[str, Request, str]] = [
    (
        "deploy digits:Digits --name digits --version v2 --prev-version v1",
        Deploy(name="default/digits", replica_config=CODE, version="v2", prev_version="v1"),
        "digits is deployed: 1 replica, version v1",
    ),
    (
        "scale digits 0",
        Scale(backend_tag="default/digits", num_replicas=0),
        "digits is scaled to 0",
    ),
    (
        "autoscaling pause digits",
        PauseAutoscaling(backend_tag="default/digits"),
        "digits keeps its number of replicas",
    ),
    (
        "autoscaling resume shop/digits",
        ResumeAutoscaling(backend_tag="shop/digits"),
        "shop/digits follows its load again",
    ),
    (
        "update v1 --autoscaling-config off",
        UpdateBackendConfig(backend_tag=V1, config={"autoscaling_config": None}),
        "backend v1 is updated",
    ),
    (
        "capture set digits 1% --bodies --redact $.user --redact $..mail --redact-header X-Team --redact-query q",
        SetCapture(
            endpoint="default/digits",
            share=0.01,
            bodies=True,
            redact=["$.user", "$..mail"],
            redact_headers=["X-Team"],
            redact_query=["q"],
        ),
        "capture of digits is set",
    ),
    (
        "capture set shop/digits 0.5",
        SetCapture(endpoint="shop/digits", share=0.5),
        "capture of shop/digits is set",
    ),
    ("capture off digits", SetCapture(endpoint="default/digits", share=0), "capture of digits is off"),
    (
        'rollout start digits --to digits:Digits --version v2 --steps 5%,100% --limits {"cool_down_s":60}',
        StartRollout(
            name="default/digits",
            replica_config={"import_path": "digits:Digits", "code": ""},
            version="v2",
            rollout_fields={"cool_down_s": 60, "steps": ["5%", "100%"]},
        ),
        "digits runs the new version v2: every step passed: 1 replica, version v1",
    ),
    (
        "rollout start digits --again --num-cpus 0.5 --max-concurrent-queries 4",
        StartRollout(
            name="default/digits",
            replica_config={"ray_actor_options": {"num_cpus": 0.5}},
            backend_config={"max_concurrent_queries": 4},
            again=True,
        ),
        "digits runs the new version: every step passed: 1 replica, version v1",
    ),
    (
        "update digits --user-config 1 --no-rollout",
        UpdateBackendConfig(backend_tag="default/digits", config={"user_config": 1}, skips_rollout=True),
        "backend digits is updated",
    ),
    (
        "rollout pause digits",
        ControlRollout(name="default/digits", action=RolloutAction.PAUSE),
        "digits stays at its step",
    ),
    (
        "rollout resume digits",
        ControlRollout(name="default/digits", action=RolloutAction.RESUME),
        "digits goes on",
    ),
    (
        "rollout step digits",
        ControlRollout(name="default/digits", action=RolloutAction.STEP),
        "digits goes to its next step",
    ),
    (
        "rollout promote digits",
        ControlRollout(name="default/digits", action=RolloutAction.PROMOTE),
        "digits is promoted",
    ),
    (
        "rollout abort digits --reason odd",
        ControlRollout(name="default/digits", action=RolloutAction.ABORT, reason="odd"),
        "digits is aborted",
    ),
    ("rollback digits", Rollback(name="default/digits"), "digits is rolled back to what it was before"),
    ("rollback digits --to-version 3", Rollback(name="default/digits", to="3"), "digits is rolled back to 3"),
    (
        "rollback shop/digits --to-revision 3",
        Rollback(name="shop/digits", to=3),
        "shop/digits is rolled back to revision 3",
    ),
    ("delete digits", DeleteDeployment(name="default/digits"), "digits is deleted"),
    ("app delete shop", DeleteApplication(name="shop"), "application shop is deleted"),
    (
        "backend create v1 digits:Digits",
        CreateBackend(backend_tag=V1, replica_config=CODE),
        "backend v1 is created",
    ),
    ("backend delete v1", DeleteBackend(backend_tag=V1), "backend v1 is deleted"),
    (
        "backend delete v1 --force-kill",
        DeleteBackend(backend_tag=V1, force_kill=True),
        "backend v1 is deleted",
    ),
    (
        "update v1 --num-replicas 3 --placement pack --on-failure go-back",
        UpdateBackendConfig(
            backend_tag=V1, config={"num_replicas": 3, "placement": "pack", "on_failure": "go_back"}
        ),
        "backend v1 is updated",
    ),
    (
        "endpoint create digits v1=0.75 v2=0.25 --route-prefix /digits/ --methods get",
        CreateEndpoint(
            endpoint="default/digits", traffic={V1: 0.75, V2: 0.25}, route="/digits", methods=["GET"]
        ),
        "endpoint digits is created",
    ),
    (
        "endpoint create digits v1",
        CreateEndpoint(endpoint="default/digits", traffic={V1: 1.0}),
        "endpoint digits is created",
    ),
    (
        "endpoint create digits v1 --shard-key-header X-User --backend-header X-To --relative-slo-ms 250",
        CreateEndpoint(
            endpoint="default/digits",
            traffic={V1: 1.0},
            options=EndpointOptions(shard_key_header="X-User", backend_header="X-To", relative_slo_ms=250.0),
        ),
        "endpoint digits is created",
    ),
    (
        "endpoint update digits --shard-key-header X-User",
        SetEndpointOptions(endpoint="default/digits", options={"shard_key_header": "X-User"}),
        "options of digits are changed",
    ),
    ("endpoint delete digits", DeleteEndpoint(endpoint="default/digits"), "endpoint digits is deleted"),
    (
        "traffic set digits v1=0.9 v2=0.1",
        SetTraffic(endpoint="default/digits", weights={V1: 0.9, V2: 0.1}),
        "traffic of digits is set",
    ),
    (
        "traffic shadow digits v2 0.1",
        ShadowTraffic(endpoint="default/digits", backend_tag=V2, proportion=0.1),
        "shadow traffic of digits to v2 is set",
    ),
    (
        "traffic shadow digits v2 0",
        ShadowTraffic(endpoint="default/digits", backend_tag=V2, proportion=0.0),
        "shadow traffic of digits to v2 is ended",
    ),
    ("host drain host-1", DrainHost(host_id="host-1"), "host host-1 is drained"),
    ("host undrain host-1", UndrainHost(host_id="host-1"), "host host-1 takes replicas again"),
    (
        "http update --request-timeout-s 30 --body-bytes-max 1000 --middlewares a:b --middlewares c:d",
        SetHttpOptions(
            options={"request_timeout_s": 30.0, "body_bytes_max": 1000, "middlewares": ["a:b", "c:d"]}
        ),
        "options of all proxies are changed",
    ),
    (
        "http update --header-timeout-s 2 --body-rate-min 0 --keep-alive-timeout-s 3.5",
        SetHttpOptions(options={"header_timeout_s": 2.0, "body_rate_min": 0, "keep_alive_timeout_s": 3.5}),
        "options of all proxies are changed",
    ),
    (
        "http update --access-log",
        SetHttpOptions(options={"access_log": True}),
        "options of all proxies are changed",
    ),
    (
        "http update --no-access-log",
        SetHttpOptions(options={"access_log": False}),
        "options of all proxies are changed",
    ),
    ("delete-all --yes", Shutdown(confirm="everything"), "everything is deleted"),
]
CREATED_AND_DELETED = "2023-11-14 22:13:20Z 2023-11-14 22:14:20Z"
QUERY_LINES: list[tuple[str, Query, Any, list[str]]] = [
    (
        "status --format table",
        GetStatus(),
        msgspec.structs.replace(STATUS, deployments=[UPDATING]),
        ["digits updating v1 /digits 1/2 1 of 2 replicas serve"],
    ),
    (
        "status digits",
        GetDeploymentInfo(name="default/digits"),
        UPDATING,
        ["status updating", "digits#2 starting - v1 [1]", "1 of 2 replicas serve"],
    ),
    (
        "info shop/digits",
        GetDeploymentInfo(name="shop/digits"),
        UPDATING,
        [
            "application shop (its ingress)",
            "created 2023-11-14 22:13:20Z",
            "deleted 2023-11-14 22:14:20Z",
            "import_path digits:Digits",
            'user_config {"threshold":0.5}',
            "placement spread",
            "health_check_failure_threshold 3",
            "digits#1 running host-1 v1",
        ],
    ),
    (
        "capture list",
        GetCaptures(limit=500),
        [
            CaptureView(
                endpoint_tag="default/digits",
                capture=CaptureConfig(share=0.015, bodies=True, redact=["$.user"], redact_query=["q"]),
                goal_id=GoalId("g1"),
            ),
            CaptureView(endpoint_tag="shop/a", capture=CaptureConfig(share=1), goal_id=GoalId("g2")),
        ],
        ["endpoint share bodies redacted", "digits 1.5% yes $.user, query q", "shop/a 100% no -"],
    ),
    (
        "rollout list",
        GetRollouts(limit=500),
        [ROLLOUT],
        ["name version step state why", "digits v2 2/4 (25% 30s) running errors: 0 of 80 failed"],
    ),
    (
        "autoscaling list",
        GetAutoscaling(limit=500),
        [
            AutoscalingView(
                backend_tag="default/digits",
                verdict="waits_up",
                seen=9.04,
                wanted=4.5,
                num_replicas=2,
                min_replicas=1,
                max_replicas=8,
                why="9 requests seen over 30 s",
            ),
            AutoscalingView(
                backend_tag="shop/a",
                paused="scale",
                num_replicas=3,
                min_replicas=0,
                max_replicas=3,
                why="paused by scale",
            ),
        ],
        [
            "digits 2 1-8 9.0 4.5 waits_up 9 requests seen over 30 s",
            "shop/a 3 0-3 - - paused paused by scale",
        ],
    ),
    (
        "list",
        ListDeployments(limit=500),
        [UPDATING],
        [f"digits updating v1 /digits 1/2 digits:Digits {CREATED_AND_DELETED} 1 of 2 replicas serve"],
    ),
    (
        "list --deleted",
        ListDeployments(limit=500, include_deleted=True),
        [msgspec.structs.replace(UPDATING, status=DeploymentStatus.DELETED, replicas=[], message="")],
        [f"digits deleted v1 /digits 0/2 digits:Digits {CREATED_AND_DELETED}"],
    ),
    (
        "app list",
        GetAllApplications(limit=500),
        [
            ApplicationView(
                name="shop",
                status=DeploymentStatus.HEALTHY,
                message="",
                route_prefix="/shop",
                ingress="front",
                deployments=["front", "model"],
                goal_id=GOAL,
                goal_status=GoalStatus.SUCCEEDED,
            )
        ],
        ["shop healthy /shop front front, model"],
    ),
    (
        "backend list",
        GetAllBackends(limit=500),
        [
            BackendView(
                backend_tag="default/v1",
                backend_config=CONFIG,
                replica_config=SERVED_CODE,
                replicas=REPLICAS,
                status=DeploymentStatus.UNHEALTHY,
                message="RuntimeError",
            )
        ],
        ["v1 unhealthy 1/2 digits:Digits RuntimeError"],
    ),
    (
        "backend show v1",
        GetBackendConfig(backend_tag="default/v1"),
        BackendConfigView(
            backend_tag="default/v1", backend_config=CONFIG, replica_config=SERVED_CODE, version=None
        ),
        [
            *("backend v1", "version (none)", "app_dir /apps", "init_args [1]", "num_replicas 2"),
            "replica_policy power_of_two_choices",
            "outlier_ejection consecutive_failures=5,ejection_time_s=10.0,max_ejected_percent=50.0",
            "backpressure_config status_code=503,retry_after_s=null",
        ],
    ),
    (
        "endpoint list",
        GetAllEndpoints(limit=500),
        [
            EndpointView(
                endpoint_tag="default/digits",
                route=None,
                methods=["GET", "POST"],
                traffic={"default/v2": 0.1, "default/v1": 0.9},
                shadows={"shop/v3": 0.5},
                options=EndpointOptions(backend_header="X-To", relative_slo_ms=250.0),
            ),
            EndpointView(
                endpoint_tag="default/asgi", route="/", methods=sorted(METHODS), traffic={"default/v1": 1.0}
            ),
        ],
        [
            "digits - GET, POST v1=0.9, v2=0.1 shop/v3=0.5 backend_header=X-To, relative_slo_ms=250.0",
            "asgi / all v1=1 - -",
        ],
    ),
    ("host list", GetHosts(limit=500), [DRAINED], ["host-1 live, drained 2 2 CPU 0.2 s ago"]),
    (
        "proxy list",
        GetHttpProxies(limit=500),
        PROXIES,
        ["proxy-1 live 0.0.0.0:8000 9 0.5 s ago", "proxy-2 live 0.0.0.0:8000 7 of 9 0.5 s ago"],
    ),
    (
        "http show",
        GetHttpConfig(),
        HttpOptions(request_timeout_s=30.0, middlewares=["a:b"]),
        [
            *("request_timeout_s 30.0", "body_bytes_max 10485760", 'middlewares ["a:b"]'),
            *("header_timeout_s 10.0", "body_rate_min 500", "keep_alive_timeout_s 90.0"),
            "access_log false",
        ],
    ),
    (
        "events digits --limit 2",
        GetEvents(limit=2, subject="digits"),
        [
            EventView(
                at=1_700_000_000.0,
                kind="replica",
                subject="default/digits#1",
                message="[died]\nmore",
                state="stopped",
            )
        ],
        ["2023-11-14 22:13:20Z replica digits#1 stopped [died] … more"],
    ),
    (
        "history digits --limit 1 --before 9",
        GetHistory(limit=1, subject="digits", before=9),
        [
            HistoryView(
                id=8,
                at=1_700_000_000.0,
                principal="ada@desk",
                epoch=3,
                verb="deploy",
                subject="default/digits",
                goal_id=GOAL,
                request={"name": "digits"},
            )
        ],
        ["8 2023-11-14 22:13:20Z ada@desk deploy digits goal-1", "older ones: --before 8"],
    ),
    (
        "revisions digits",
        GetRevisions(name="default/digits"),
        [
            RevisionView(
                revision=number,
                at=1_700_000_000.0,
                goal_id=GOAL,
                status=GoalStatus.SUCCEEDED,
                is_current=number == 2,
                version=version,
                import_path="digits:Digits",
                num_replicas=1,
                route_prefix="/digits",
            )
            for number, version in ((2, "v2"), (1, None))
        ],
        [
            "2 (now) 2023-11-14 22:13:20Z succeeded v2 digits:Digits 1 /digits",
            "1 2023-11-14 22:13:20Z succeeded - digits:Digits 1 /digits",
            "'muster rollback digits --to-revision N' goes back to one",
        ],
    ),
    (
        "goal wait goal-1",
        WaitForGoal(goal_id=GOAL, timeout_s=1.0),
        GoalView(goal_id=GOAL, status=GoalStatus.SUCCEEDED),
        ["goal-1 succeeded"],
    ),
]

CHANGES = pytest.mark.parametrize("line", [line for line, *_ in COMMAND_LINES])
LISTS = [
    *("list", "app list", "backend list", "endpoint list", "host list", "proxy list"),
    *("events", "history", "revisions digits"),
]


def test_every_command_of_the_table_is_tried_here_or_with_files() -> None:
    assert {type(request) for _line, request, _told in COMMAND_LINES} == {
        request
        for verb, request in COMMANDS.items()
        if verb not in ("deploy_application", "record_build_failure", "restore", "upload_code")
    }


@pytest.mark.parametrize(("line", "request_", "told"), COMMAND_LINES)
def test_a_command_sends_what_was_given_waits_and_tells_the_end(
    muster: Muster, controller: Any, line: str, request_: Request, told: str
) -> None:
    result = muster(*line.split())
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(told)
    _verb, sent = controller.asked[0]
    if getattr(sent, "request_id", None):
        sent = msgspec.structs.replace(sent, request_id=None)
    assert sent == request_
    assert controller.asked_of("wait_for_goal")


@CHANGES
def test_as_json_the_outcome_is_one_document(muster: Muster, line: str) -> None:
    result = muster(*line.split(), "--json")
    assert result.exit_code == 0
    outcome = json.loads(result.stdout)
    assert outcome["result"] == "succeeded"
    assert outcome["goal_id"] == "goal-1"
    assert outcome["took_s"] >= 0


@CHANGES
def test_no_wait_returns_with_the_goal(muster: Muster, controller: Any, line: str) -> None:
    result = muster(*line.split(), "--no-wait")
    assert result.exit_code == 0
    assert result.stdout.startswith("accepted as goal-1")
    as_json = json.loads(muster(*line.split(), "--no-wait", "--json").stdout)
    assert as_json["result"] == "accepted"
    assert as_json["goal_id"] in result.stdout
    assert not controller.asked_of("wait_for_goal")


@CHANGES
def test_a_dry_run_plans_and_changes_nothing(muster: Muster, controller: Any, line: str) -> None:
    result = muster("plan", *line.split())
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("nothing to do: ")
    assert result.stdout.endswith("this was a dry run; nothing was changed\n")
    [(verb, plan)] = controller.asked
    assert verb == "plan"
    wanted = next(request for each, request, _told in COMMAND_LINES if each == line)
    assert COMMANDS[plan.command_verb] is type(wanted)
    assert msgspec.json.decode(plan.request, type=type(wanted)) == wanted

    assert muster(*line.split(), "--dry-run").stdout == result.stdout


FAILED = GoalView(goal_id=GOAL, status=GoalStatus.FAILED, error="RuntimeError: no model")


@pytest.mark.parametrize(
    ("status", "code", "told"),
    [
        (GoalStatus.SUCCEEDED, 0, ""),
        (GoalStatus.FAILED, 1, "the change failed:\nRuntimeError: no model"),
        (GoalStatus.SUPERSEDED, 1, "another change of {subject} came after this one: RuntimeError"),
        (GoalStatus.PENDING, 5, "{subject}: not done after 0 s: needs 4 CPU"),
    ],
)
@pytest.mark.parametrize(
    ("line", "subject"),
    [
        ("traffic set digits v1", "traffic of digits"),
        ("deploy digits:Digits --name digits", "digits"),
        ("delete digits", "digits"),
    ],
)
def test_how_a_goal_ended_decides_the_exit_code(
    muster: Muster, controller: Any, line: str, subject: str, status: GoalStatus, code: int, told: str
) -> None:
    controller.goal = msgspec.structs.replace(FAILED, status=status, message="needs 4 CPU")
    line += " --timeout-s 0"
    result = muster(*line.split())
    assert result.exit_code == code
    assert told.format(subject=subject) in result.stderr
    as_json = muster(*line.split(), "--json")
    assert as_json.exit_code == code
    assert json.loads(as_json.stdout)["result"] == status.value


def test_an_abort_is_made_once_the_goal_of_the_rollout_has_failed(muster: Muster, controller: Any) -> None:
    controller.goal = GoalView(goal_id=GOAL, status=GoalStatus.FAILED, error="by command: odd")
    done = muster("rollout", "abort", "digits", "--reason", "odd")
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.startswith("digits is aborted (")
    controller.goal = GoalView(goal_id=GOAL, status=GoalStatus.SUPERSEDED, error="replaced by g9")
    assert muster("rollout", "abort", "digits").exit_code == 1


@CHANGES
def test_a_refusal_is_one_plain_line(muster: Muster, controller: Any, line: str) -> None:
    error = BadField("weights", "sum to 2; they must sum to 1")
    controller.answers.update(dict.fromkeys((*COMMANDS, "plan"), error))
    for more in ((), ("--dry-run",)):
        result = muster(*line.split(), *more)
        assert result.exit_code == 2
        assert result.stderr == "error: weights: sum to 2; they must sum to 1\n"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (BadField("version", "must have 1 to 200 characters"), 2),
        (Conflict("route_prefix: taken"), 2),
        (NotFound("name: there is no deployment 'x'"), 4),
        (TransientError("no controller answers at nats://stack.example:4222"), 3),
        (StoreUnavailable("Postgres does not answer"), 3),
        (BusUnavailable("NATS at nats://stack.example:4222 does not answer"), 3),
        (BusAuthorizationFailed("NATS refused the user 'admin'"), 3),
        (DeadlineExceeded("no answer"), 5),
        (PermanentError("a person must look"), 1),
        (UserCodeRaised("ValueError"), 1),
        (ServeError("something of a later version"), 1),
        (RuntimeError("a bug of ours"), 1),
    ],
)
@pytest.mark.parametrize(
    "line",
    [
        *("deploy digits:Digits --name digits", "status", "call digits", "delete digits"),
        *("traffic set digits v1", "plan traffic set digits v1"),
    ],
)
def test_every_error_is_a_plain_line_with_its_exit_code_and_json_when_asked(
    muster: Muster, controller: Any, line: str, error: Exception, code: int
) -> None:
    controller.raises = error
    result = muster(*line.split())
    assert result.exit_code == code
    assert str(error) in result.stderr
    assert "Traceback" not in result.output
    assert result.stdout == ""

    as_json = muster(*line.split(), "--json")
    assert as_json.exit_code == code
    assert str(error) in json.loads(as_json.stdout)["error"]["message"]


def test_an_error_of_the_users_code_keeps_its_code(muster: Muster, controller: Any) -> None:
    controller.raises = UnknownError("bad_image", "body: is not an image")
    result = muster("call", "digits", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["error"] == {"code": "bad_image", "message": "body: is not an image"}


@CHANGES
def test_nothing_to_do_is_a_success(muster: Muster, controller: Any, line: str) -> None:
    controller.answers.update(dict.fromkeys(COMMANDS, ChangeReply(goal_id=None, updating=False)))
    controller.answers["shutdown"] = ShutdownReply(goal_ids=[])
    result = muster(*line.split())
    assert result.exit_code == 0
    assert result.stdout.startswith("nothing to do: ")
    assert not controller.asked_of("wait_for_goal")


def test_nothing_to_do_mentions_that_the_last_change_failed(muster: Muster, controller: Any) -> None:
    controller.answers["create_backend"] = ChangeReply(goal_id=GOAL, updating=False)
    controller.goal = GoalView(goal_id=GOAL, status=GoalStatus.FAILED, error="no model")
    result = muster("backend", "create", "v1", "digits:Digits")
    assert result.exit_code == 0
    assert "its last change, goal-1, failed: no model" in result.stdout

    controller.answers["wait_for_goal"] = NotFound("goal_id: is unknown")
    assert muster("backend", "create", "v1", "digits:Digits").exit_code == 0


def test_nothing_to_do_waits_for_the_same_change_that_is_under_way(muster: Muster, controller: Any) -> None:
    controller.answers["create_backend"] = ChangeReply(goal_id=GOAL, updating=False)
    controller.goal = GoalView(goal_id=GOAL, status=GoalStatus.PENDING, message="0 of 1")
    assert muster("backend", "create", "v1", "digits:Digits", "--timeout-s", "0").exit_code == 5


def test_an_endpoint_with_a_route_says_where_it_is_reached(muster: Muster, controller: Any) -> None:
    result = muster("endpoint", "create", "digits", "v1", "--route-prefix", "/digits", "--methods", "POST")
    assert "  curl -X POST http://stack.example:8000/digits" in result.stdout
    controller.answers["get_http_proxies"] = TransientError("only a convenience")
    assert muster("endpoint", "create", "digits", "v1", "--route-prefix", "/digits").exit_code == 0


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ("scale digits 10001", "REPLICAS: is 10001"),
        ("scale digits many", "N"),
        ("scale a/b/c 1", "name: "),
        ("rollback digits --to-version v1 --to-revision 1", "--to-revision: "),
        ("rollback digits --to-revision 0", "--to-revision"),
        ("app delete a/b", "APP: "),
        ("backend create v#1 digits:Digits", "BACKEND: "),
        ("backend create v1 digits", "import_path: "),
        ("backend create v1 a:b --num-cpus -1", "--ray-actor-options.num_cpus: "),
        ("backend create v1 a:b --max-replicas-per-host 0", "--max-replicas-per-host: "),
        ("backend create v1 a:b --max-surge-percent 0 --max-unavailable-percent 0", "--max-surge-percent: "),
        ("backend create v1 a:b --placement everywhere", "--placement"),
        ("backend create v1 a:b --on-failure explode", "--on-failure"),
        ("backend create v1 a:b --user-config {", "--user-config: is not JSON"),
        ("update v1", "options: nothing is given"),
        ("update v1 --fields []", "--fields: must be an object"),
        ("update v1 --fields @absent.json", "absent.json"),
        ('update v1 --fields {"num_cats":3}', "--num-cats: is unknown"),
        ('update v1 --fields {"num_replicas":"3"}', "--num-replicas: "),
        ("update v1 --num-replicas -3", "--num-replicas: is -3"),
        ("endpoint create digits", "BACKEND=WEIGHT"),
        ("endpoint create digits v1=much", "BACKEND=WEIGHT: 'v1=much' must read"),
        ("endpoint create digits v1=1.5", "BACKEND=WEIGHT v1: is 1.5"),
        ("endpoint create digits v1=nan", "BACKEND=WEIGHT v1: is nan"),
        ("endpoint create digits v1=0.5 default/v1=0.5", "default/v1 is given twice"),
        ("endpoint create digits v1 --route-prefix digits", "--route-prefix: "),
        ("traffic set digits =1", "BACKEND=WEIGHT: "),
        ("traffic set a#b v1", "ENDPOINT: "),
        ("traffic shadow digits v1 2", "SHARE: is 2"),
        ("traffic shadow digits v1 some", "SHARE"),
        ("host drain a/b", "HOST: "),
        ("endpoint create digits v1 --shard-key-header a:b", "--shard-key-header: 'a:b' cannot be"),
        ("endpoint create digits v1 --relative-slo-ms 0", "--relative-slo-ms: is 0"),
        ("endpoint update digits", "options: nothing is given"),
        ("endpoint update digits --backend-header a:b", "--backend-header: 'a:b' cannot be"),
        (
            "update v1 --circuit-breaker window_s",
            "--circuit-breaker: 'window_s' must read NAME=VALUE",
        ),
        (
            "update v1 --circuit-breaker window=5",
            "--circuit-breaker: has no 'window'; it has failure",
        ),
        ("update v1 --circuit-breaker window_s=x", "--circuit-breaker.window_s: Expected `float`"),
        ("update v1 --circuit-breaker window_s=0", "--circuit-breaker.window_s: is 0"),
        ("update v1 --circuit-breaker window_s=1,window_s=2", "window_s is given twice"),
        ("update v1 --packing-num 0", "--packing-num: "),
        (
            "deploy a:B --name a --outlier-ejection ejection_time_s=true",
            "--outlier-ejection.ejection_time_s: ",
        ),
        ("http update --keep-alive-timeout-s 0", "--keep-alive-timeout-s: "),
        ("http update", "options: nothing is given"),
        ("http update --request-timeout-s 0", "--request-timeout-s: "),
        ("http update --body-bytes-max 0", "--body-bytes-max: "),
        ("http update --middlewares nocolon", "--middlewares[0]: "),
        ("plan", "plan: needs a command"),
        ("plan status", "'status' has no --dry-run"),
        ("plan backend list", "'backend list' has no --dry-run"),
        ("plan explode", "No such command 'explode'"),
        ("plan scale digits", "N"),
        ("status a/b/c", "name: "),
        ("info digits#1", "name: "),
        ("backend show a/b/c", "BACKEND: "),
        ("events --limit 0", "--limit"),
        ("events --limit 1001", "--limit"),
        ("history --limit 501", "--limit"),
        ("history --before 0", "--before"),
        ("revisions a/b/c", "name: "),
        ("goal wait", "ID"),
        ("goal wait goal-1 --timeout-s -1", "--timeout-s"),
        ("host", "drain"),
        ("explode", "explode"),
        ("deploy digits:Digits --name digits --num-replicas -1", "--num-replicas: is -1"),
        ("deploy digits:Digits --name digits --route-prefix digits", "--route-prefix"),
        ("deploy digits:Digits --name digits --user-config {", "--user-config"),
        ("deploy digits:Digits --name digits --user-config @absent.yaml", "absent.yaml"),
        ("deploy digits:Digits --name digits --init-args {}", "--init-args"),
        ("deploy digits:Digits --name digits --init-kwargs []", "--init-kwargs"),
        ('deploy digits:Digits --name digits --ray-actor-options {"cpus":1}', "--ray-actor-options"),
        ("deploy digits:Digits --name digits --app a/b", "--name"),
        ("deploy digits:Digits --name digits --app-dir absent", "--app-dir"),
        ("deploy digits:Digits --name digits --num-replicas many", "--num-replicas"),
    ],
)
def test_bad_input_is_refused_by_name_before_anything_is_sent(
    muster: Muster, controller: Any, line: str, field: str
) -> None:
    result = muster(*line.split())
    assert result.exit_code == 2, result.output
    assert field in result.output
    assert controller.reached is None
    assert controller.asked == []


def test_a_plan_shows_which_replicas_would_be_touched_and_why(muster: Muster, controller: Any) -> None:
    view = PlanView(
        updating=True,
        replicas=[
            PlannedReplica(
                action=PlannedAction.START, backend_tag=V1, replica_tag=None, why="3 are wanted, [1] runs"
            ),
            PlannedReplica(
                action=PlannedAction.STOP, backend_tag=V1, replica_tag=f"{V1}#7", why="another code version"
            ),
        ],
        notes=["2 of 3 would fit: needs 4 CPU; the freest host has 2"],
    )
    controller.answers["plan"] = view
    lines = muster("plan", "scale", "v1", "3").stdout.splitlines()
    assert lines[0] == "v1: 1 to start, 1 to stop"
    assert [line.split() for line in lines if line.startswith(("start", "stop"))] == [
        ["start", "v1", "(new)", "3", "are", "wanted,", "[1]", "runs"],
        ["stop", "v1", "v1#7", "another", "code", "version"],
    ]
    assert "note: 2 of 3 would fit: needs 4 CPU; the freest host has 2" in lines

    as_json = muster("plan", "scale", "v1", "3", "--json")
    assert msgspec.json.decode(as_json.stdout, type=PlanView) == view

    controller.answers["plan"] = msgspec.structs.replace(view, replicas=[])
    assert "no replica is touched" in muster("scale", "v1", "3", "--dry-run").stdout


def test_a_planned_command_may_ask_for_its_own_help(muster: Muster, controller: Any) -> None:
    result = muster("plan", "traffic", "set", "--help")
    assert result.exit_code == 0
    assert "Set which share of an endpoint's requests each backend gets" in result.stdout
    assert controller.asked == []


def test_delete_all_asks_first(muster: Muster, controller: Any) -> None:
    refused = muster("delete-all", given="n\n")
    assert refused.exit_code == 1
    assert "Delete every application" in refused.stderr
    assert refused.stderr.endswith("Aborted!\n")
    assert controller.asked == []

    nobody = muster("delete-all", given="")
    assert nobody.exit_code == 2
    assert "--yes: is needed when input is not interactive" in nobody.stderr
    assert controller.asked == []

    agreed = muster("delete-all", given="y\n")
    assert agreed.exit_code == 0
    assert "everything is deleted" in agreed.stdout
    waits = [request.goal_id for request in controller.asked_of("wait_for_goal")]
    assert waits == ["goal-1", "goal-2"]


def test_every_field_of_a_configuration_has_its_option(muster: Muster, controller: Any) -> None:
    assert [each.name for each in BACKEND_OPTIONS] == [each.name for each in BACKEND_CHANGES]
    assert {each.name for each in BACKEND_OPTIONS} == set(BackendConfig.__struct_fields__)
    uploaded = {"code", "working_dir", "py_modules"}
    code = {*ReplicaConfig.__struct_fields__, "num_cpus", "num_gpus"} - {"import_path"} - uploaded
    assert {each.name for each in CODE_OPTIONS} == code
    assert [each.name for each in ENDPOINT_OPTIONS] == [each.name for each in ENDPOINT_CHANGES]
    assert {each.name for each in ENDPOINT_OPTIONS} == set(EndpointOptions.__struct_fields__)
    assert {each.name for each in HTTP_CHANGES} == set(HttpOptions.__struct_fields__)


def test_all_options_of_a_backend_arrive(muster: Muster, controller: Any) -> None:
    config = BackendConfig(
        num_replicas=2,
        autoscaling_config=AutoscalingConfig(
            min_replicas=1, max_replicas=4, aggregation_function=AggregationFunction.MAX
        ),
        max_concurrent_queries=3,
        may_call=("shop", "bank/ledger"),
        logging_config=LoggingConfig(
            encoding=LogEncoding.JSON,
            log_level="DEBUG",
            enable_access_log=False,
            additional_log_standard_attrs=("funcName",),
            logs_dir="/logs",
        ),
        max_queued_requests=-1,
        user_config={"a": [1]},
        graceful_shutdown_timeout_s=4.0,
        health_check_period_s=5.0,
        health_check_timeout_s=6.0,
        health_check_failure_threshold=7,
        start_timeout_s=8.0,
        max_constructor_retry_count=9,
        on_failure=OnFailure.GO_BACK,
        max_surge_percent=11.0,
        max_unavailable_percent=12.0,
        placement=Placement.PACK,
        max_replicas_per_host=13,
        replica_policy=ReplicaPolicyName.ROUND_ROBIN,
        packing_num=14,
        backpressure_config=BackpressureConfig(status_code=429, retry_after_s=1.5),
        outlier_ejection=OutlierEjection(
            consecutive_failures=16, ejection_time_s=17.0, max_ejected_percent=18.0
        ),
        retry_budget_percent=19.0,
        circuit_breaker=CircuitBreaker(
            failure_percent=20.0, requests_min=21, window_s=22.0, open_time_s=23.0
        ),
        rollout=RolloutConfig(steps=("5% 30s", "100%")),
    )
    given = msgspec.to_builtins(config)
    given |= {"user_config": '{"a": [1]}', "on_failure": "go-back", "replica_policy": "round-robin"}
    given["may_call"] = "shop, bank/ledger"
    given |= {
        "autoscaling_config": msgspec.json.encode(config.autoscaling_config).decode(),
        "backpressure_config": "status_code=429, retry_after_s=1.5",
        "outlier_ejection": '{"consecutive_failures": 16, "ejection_time_s": 17, "max_ejected_percent": 18}',
        "circuit_breaker": "failure_percent=20,requests_min=21,window_s=22,open_time_s=23",
        "logging_config": "logs_dir=/logs,encoding=JSON,log_level=DEBUG,enable_access_log=false,"
        'additional_log_standard_attrs=["funcName"]',
        "rollout": "5% 30s, 100%",
    }
    options = [
        text
        for name, value in given.items()
        for text in (f"--{name.replace('_', '-')}", value if isinstance(value, str) else str(value))
    ]
    code = ("--num-cpus", "0.5", "--num-gpus", "1", "--init-args", "[1]", "--init-kwargs", '{"a": 2}')
    for line in (("backend", "create", "v1", "a:B"), ("deploy", "a:B", "--name", "v1")):
        controller.asked.clear()
        assert muster(*line, *options, *code).exit_code == 0
        request = controller.asked[0][1]
        assert request.backend_config == config
        assert request.replica_config == ReplicaConfig(
            import_path="a:B",
            init_args=[1],
            init_kwargs={"a": 2},
            ray_actor_options=RayActorOptions(num_cpus=0.5, num_gpus=1.0),
        )
    assert muster("update", "v1", *options).exit_code == 0
    wanted = {**msgspec.to_builtins(config), "may_call": ["shop", "bank/ledger"]}
    wanted["logging_config"]["additional_log_standard_attrs"] = ["funcName"]
    wanted["rollout"] = {"steps": ["5% 30s", "100%"]}
    assert controller.asked_of("update_backend_config")[0].config == wanted


def test_of_a_group_only_what_was_given_is_sent_with_an_update(muster: Muster, controller: Any) -> None:
    line = ("update", "v1", "--outlier-ejection", "consecutive_failures=3")
    assert muster(*line).exit_code == 0
    assert muster(*line, "--fields", '{"outlier_ejection": {"ejection_time_s": 2}}').exit_code == 0
    first, second = controller.asked_of("update_backend_config")
    assert first.config == {"outlier_ejection": {"consecutive_failures": 3}}
    assert second.config == {"outlier_ejection": {"consecutive_failures": 3, "ejection_time_s": 2}}


def test_what_is_shown_of_a_group_can_be_given_again(muster: Muster, controller: Any) -> None:
    shown = group_text(BackendConfig().backpressure_config)
    assert muster("update", "v1", "--backpressure-config", shown).exit_code == 0
    [request] = controller.asked_of("update_backend_config")
    assert request.config == {"backpressure_config": {"status_code": 503, "retry_after_s": None}}


def test_options_of_an_endpoint_come_with_a_deploy_and_are_taken_back_as_json(
    muster: Muster, controller: Any
) -> None:
    assert muster("deploy", "a:B", "--name", "a", "--relative-slo-ms", "100").exit_code == 0
    [deploy] = controller.asked_of("deploy")
    assert deploy.endpoint_options == EndpointOptions(relative_slo_ms=100.0)
    assert deploy.methods == list(METHODS)
    line = ("endpoint", "update", "a", "--fields", '{"relative_slo_ms": null}')
    assert muster(*line, "--shard-key-header", "").exit_code == 0
    [request] = controller.asked_of("set_endpoint_options")
    assert request.options == {"relative_slo_ms": None, "shard_key_header": ""}


def test_options_go_over_the_fields_of_an_update(muster: Muster, controller: Any) -> None:
    line = ("update", "v1", "--fields", '{"max_replicas_per_host": null, "num_replicas": 1}')
    assert muster(*line, "--num-replicas", "2").exit_code == 0
    [request] = controller.asked_of("update_backend_config")
    assert request.config == {"max_replicas_per_host": None, "num_replicas": 2}


def test_no_middlewares_can_be_said(muster: Muster, controller: Any) -> None:
    assert muster("http", "update", "--middlewares", "").exit_code == 0
    assert controller.asked_of("set_http_options")[0].options == {"middlewares": []}


@pytest.mark.parametrize(
    ("line", "where"),
    [
        ("traffic set digits v1", "muster endpoint list"),
        ("deploy digits:Digits --name digits", "muster status digits"),
    ],
)
def test_ctrl_c_while_waiting_says_where_to_look(
    muster: Muster, controller: Any, line: str, where: str
) -> None:
    controller.answers["wait_for_goal"] = KeyboardInterrupt()
    result = muster(*line.split())
    assert result.exit_code == 130
    assert f"the change goes on: '{where}'" in result.stderr


def words(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines()]


def test_every_query_is_tried_here() -> None:
    assert {query.verb for _line, query, *_ in QUERY_LINES} == QUERIES.keys() - {
        "plan",
        "get_backup",  # 'muster backup', which writes a file
        "get_snapshot",  # for programs; people have 'muster list --deleted'
        "get_schemas",  # for programs in other languages
        "get_load",  # counts that only two of them make sense of: 'muster top'
    }


@pytest.mark.parametrize(("line", "query", "answer", "shown"), QUERY_LINES)
def test_a_query_asks_what_was_given_and_shows_the_answer(
    muster: Muster, controller: Any, line: str, query: Query, answer: Any, shown: list[str]
) -> None:
    controller.answers[query.verb] = answer
    result = muster(*line.split())
    assert result.exit_code == 0, result.output
    assert [request for _verb, request in controller.asked] == [query]
    assert set(shown) <= set(words(result.stdout)), result.stdout

    as_json = muster(*line.split(), "--json")
    assert as_json.exit_code == 0
    assert msgspec.json.decode(as_json.stdout, type=query.reply_type()) == answer


@pytest.mark.parametrize("line", [line for line, *_ in QUERY_LINES])
def test_a_query_that_fails_tells_why_with_its_exit_code(muster: Muster, controller: Any, line: str) -> None:
    for error, code in (
        (NotFound("name: there is none"), 4),
        (BadField("limit", "is 0"), 2),
        (TransientError("no controller answers"), 3),
        (StoreUnavailable("Postgres does not answer"), 3),
    ):
        controller.answers.update(dict.fromkeys(QUERIES, error))
        result = muster(*line.split())
        assert result.exit_code == code
        assert result.stderr == f"error: {error}\n"
        assert result.stdout == ""
    as_json = muster(*line.split(), "--json")
    assert json.loads(as_json.stdout)["error"]["message"] == "Postgres does not answer"


@pytest.mark.parametrize("line", LISTS)
def test_an_empty_list_says_so(muster: Muster, controller: Any, line: str) -> None:
    controller.answers.update({verb: [] for verb in QUERIES})
    result = muster(*line.split())
    assert result.exit_code == 0
    assert result.stdout.endswith(": none\n")
    assert json.loads(muster(*line.split(), "--json").stdout) == []


@pytest.mark.parametrize(
    ("status", "code", "told"),
    [
        (GoalStatus.FAILED, 1, "goal-1 failed:\nno model"),
        (GoalStatus.SUPERSEDED, 1, "another change came after goal-1: no model"),
        (GoalStatus.PENDING, 5, "goal-1 is not done yet: needs 4 CPU"),
    ],
)
def test_a_goal_that_did_not_succeed_has_its_exit_code(
    muster: Muster, controller: Any, status: GoalStatus, code: int, told: str
) -> None:
    controller.goal = GoalView(goal_id=GOAL, status=status, error="no model", message="needs 4 CPU")
    result = muster("goal", "wait", "goal-1", "--timeout-s", "0")
    assert result.exit_code == code
    assert told in result.stderr
    as_json = muster("goal", "wait", "goal-1", "--timeout-s", "0", "--json")
    assert as_json.exit_code == code
    assert json.loads(as_json.stdout)["status"] == status.value


def test_a_long_list_is_shown_whole(muster: Muster, controller: Any) -> None:
    def answer(query: Any) -> list[HostView]:
        numbers = [9999] if query.after else range(500)
        return [msgspec.structs.replace(HOST, host_id=f"host-{number:04}") for number in numbers]

    controller.answers["get_hosts"] = answer
    assert "host-9999" in muster("host", "list").stdout


def test_settings_of_rollouts_are_read_from_a_file(muster: Muster, controller: Any, tmp_path: Path) -> None:
    (tmp_path / "rollout.yaml").write_text("steps: [5%, 100%]\nmax_latency_ratio: 2\n")
    assert muster("update", "digits", "--rollout", "@rollout.yaml").exit_code == 0
    (sent,) = controller.asked_of("update_backend_config")
    assert sent.config == {"rollout": {"steps": ["5%", "100%"], "max_latency_ratio": 2}}


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("--outlier-ejection", {"outlier_ejection": {"consecutive_failures": 0}}),
        ("--circuit-breaker", {"circuit_breaker": {"failure_percent": 0.0}}),
        ("--autoscaling-config", {"autoscaling_config": None}),
        ("--rollout", {"rollout": None}),
    ],
)
def test_what_protects_can_be_switched_off(
    muster: Muster, controller: Any, option: str, expected: dict[str, Any]
) -> None:
    assert muster("update", "digits", option, "off").exit_code == 0
    (sent,) = controller.asked_of("update_backend_config")
    assert sent.config == expected

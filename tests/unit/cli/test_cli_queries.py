"""Every looking command: arguments to request, its table, `--json`, and exit codes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from typer.testing import Result

from serve_common.api.queries import (
    GetAllApplications,
    GetAllBackends,
    GetAllEndpoints,
    GetAutoscaling,
    GetBackendConfig,
    GetDeploymentInfo,
    GetEvents,
    GetHistory,
    GetHosts,
    GetHttpConfig,
    GetHttpProxies,
    GetRevisions,
    GetSnapshot,
    GetStatus,
    ListDeployments,
    Query,
    WaitForGoal,
)
from serve_common.api.verbs import QUERIES
from serve_common.api.views import (
    ApplicationView,
    AutoscalingView,
    BackendConfigView,
    BackendView,
    DeploymentStatus,
    DeploymentView,
    EndpointView,
    EventView,
    GoalStatus,
    GoalView,
    HistoryView,
    HostView,
    ProxyView,
    ReplicaView,
    RevisionView,
    SnapshotView,
    StatusView,
)
from serve_common.config.backend import BackendConfig
from serve_common.config.endpoint import METHODS, EndpointOptions, HttpOptions
from serve_common.config.replica import ReplicaConfig
from serve_common.errors import BadField, NotFound, StoreUnavailable, TransientError
from serve_common.names import GoalId

Muster = Callable[..., Result]
GOAL = GoalId("goal-1")
CODE = ReplicaConfig(import_path="digits:Digits", app_dir="/apps", init_args=[1])
CONFIG = BackendConfig(num_replicas=2, user_config={"threshold": 0.5})
REPLICAS = [
    ReplicaView(replica_tag="default/digits#1", state="running", host_id="host-1", version="v1"),
    ReplicaView(replica_tag="default/digits#2", state="starting", host_id=None, version="v1", message="[1]"),
]
DEPLOYMENT = DeploymentView(
    name="default/digits",
    status=DeploymentStatus.UPDATING,
    message="1 of 2 replicas serve",
    route_prefix="/digits",
    methods=["GET", "POST"],
    version="v1",
    code_version=1,
    backend_config=CONFIG,
    replica_config=CODE,
    goal_id=GOAL,
    goal_status=GoalStatus.PENDING,
    replicas=REPLICAS,
    application="shop",
    is_ingress=True,
    started_at=1_700_000_000.0,
    ended_at=1_700_000_060.0,
)
HOST = HostView(
    host_id="host-1",
    status="live",
    report_age_s=0.25,
    resources={"CPU": 2.0},
    num_replicas=2,
    draining=True,
)
PROXIES = [
    ProxyView(proxy_id=name, status="live", report_age_s=0.5, address="a:80", applied_snapshot_id=applied)
    for name, applied in (("proxy-1", 9), ("proxy-2", 7))
]
STATUS = StatusView(
    controller_id="controller-1",
    epoch=3,
    store_available=True,
    snapshot_id=9,
    deployments=[DEPLOYMENT],
    hosts=[HOST],
    proxies=PROXIES,
)

QUERY_LINES: list[tuple[str, Query, Any, list[str]]] = [
    ("status", GetStatus(), STATUS, ["digits updating v1 /digits 1/2 1 of 2 replicas serve"]),
    (
        "status digits",
        GetDeploymentInfo(name="default/digits"),
        DEPLOYMENT,
        ["status updating", "digits#2 starting - v1 [1]", "1 of 2 replicas serve"],
    ),
    (
        "info shop/digits",
        GetDeploymentInfo(name="shop/digits"),
        DEPLOYMENT,
        [
            "application shop (its ingress)",
            "since 2023-11-14 22:13:20Z",
            "until 2023-11-14 22:14:20Z",
            "import_path digits:Digits",
            'user_config {"threshold":0.5}',
            "placement spread",
            "health_check_failure_threshold 3",
            "digits#1 running host-1 v1",
        ],
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
        [DEPLOYMENT],
        ["digits updating v1 /digits 1/2 1 of 2 replicas serve"],
    ),
    (
        "list --deleted",
        ListDeployments(limit=500, include_deleted=True),
        [msgspec.structs.replace(DEPLOYMENT, status=DeploymentStatus.DELETED, replicas=[], message="")],
        ["digits deleted v1 /digits 0/2"],
    ),
    (
        "snapshot",
        GetSnapshot(limit=500),
        [
            SnapshotView(
                name="default/digits",
                class_name="Digits",
                version="Unversioned",
                route="/digits",
                status=DeploymentStatus.HEALTHY,
                start_time=1_700_000_000.0,
                end_time=None,
            )
        ],
        ["digits Digits Unversioned /digits healthy 2023-11-14 22:13:20Z -"],
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
                replica_config=CODE,
                replicas=REPLICAS,
                status=DeploymentStatus.UNHEALTHY,
                message="RuntimeError",
            )
        ],
        ["v1 unhealthy 1/2 digits:Digits RuntimeError"],
    ),
    (
        "backend config v1",
        GetBackendConfig(backend_tag="default/v1"),
        BackendConfigView(backend_tag="default/v1", backend_config=CONFIG, replica_config=CODE, version=None),
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
    ("host list", GetHosts(limit=500), [HOST], ["host-1 live, drained 2 2 CPU 0.2 s ago"]),
    (
        "proxy list",
        GetHttpProxies(limit=500),
        PROXIES,
        ["proxy-1 live a:80 9 0.5 s ago", "proxy-2 live a:80 7 of 9 0.5 s ago"],
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
                who="ada@desk",
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
EACH = pytest.mark.parametrize("line", [line for line, *_ in QUERY_LINES])


def verb_of(query: Query) -> str:
    return next(verb for verb, (request_type, _reply) in QUERIES.items() if request_type is type(query))


def answer_all(controller: Any) -> None:
    controller.answers.update({verb_of(query): answer for _line, query, answer, _shown in QUERY_LINES})


def words(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines()]


def test_every_query_of_the_table_is_tried_here() -> None:
    assert {verb_of(query) for _line, query, *_ in QUERY_LINES} == QUERIES.keys() - {
        "plan",
        "get_backup",  # 'muster backup', which writes a file
        "get_load",  # counts that only two of them make sense of: 'muster top'
    }


@pytest.mark.parametrize(("line", "query", "answer", "shown"), QUERY_LINES)
def test_a_query_asks_what_was_given_and_shows_the_answer(
    muster: Muster, controller: Any, line: str, query: Query, answer: Any, shown: list[str]
) -> None:
    controller.answers[verb_of(query)] = answer
    result = muster(*line.split())
    assert result.exit_code == 0, result.output
    assert [request for _verb, request in controller.asked] == [query]
    assert set(shown) <= set(words(result.stdout)), result.stdout

    as_json = muster(*line.split(), "--json")
    assert as_json.exit_code == 0
    assert msgspec.json.decode(as_json.stdout, type=QUERIES[verb_of(query)][1]) == answer


@EACH
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


@pytest.mark.parametrize(
    "line",
    [
        *("list", "snapshot", "app list", "backend list", "endpoint list", "host list", "proxy list"),
        *("events", "history", "revisions digits"),
    ],
)
def test_an_empty_list_says_so(muster: Muster, controller: Any, line: str) -> None:
    controller.answers.update({verb: [] for verb in QUERIES})
    result = muster(*line.split())
    assert result.exit_code == 0
    assert result.stdout.endswith(": none\n")
    assert json.loads(muster(*line.split(), "--json").stdout) == []


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ("status a/b/c", "name: "),
        ("info digits#1", "name: "),
        ("backend config a/b/c", "BACKEND: "),
        ("events --limit 0", "--limit"),
        ("events --limit 1001", "--limit"),
        ("history --limit 501", "--limit"),
        ("history --before 0", "--before"),
        ("revisions a/b/c", "name: "),
        ("goal wait", "GOAL"),
        ("goal wait goal-1 --timeout-s -1", "--timeout-s"),
        ("host", "drain"),
        ("explode", "explode"),
    ],
)
def test_bad_input_is_refused_before_anything_is_asked(
    muster: Muster, controller: Any, line: str, field: str
) -> None:
    result = muster(*line.split())
    assert result.exit_code == 2, result.output
    assert field in result.output
    assert controller.asked == []


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
    hosts = [msgspec.structs.replace(HOST, host_id=f"host-{number:04}") for number in range(500)]
    controller.answers["get_hosts"] = hosts
    original = controller.request

    async def request(subject: str, body: bytes, **more: Any) -> Any:
        if msgspec.json.decode(body, type=GetHosts).after:
            controller.answers["get_hosts"] = [msgspec.structs.replace(HOST, host_id="host-9999")]
        return await original(subject, body, **more)

    controller.request = request
    assert "host-9999" in muster("host", "list").stdout

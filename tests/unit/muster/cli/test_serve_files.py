"""Ray Serve's files on the command line: what they may say, what is sent, and how it is told what is wrong in them."""

from __future__ import annotations

import asyncio
import io
import json
import os
import sys
import zipfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from typer.testing import Result

from muster.cli.serve_config import check_config
from muster.cli.yaml_file import YamlFile
from serve_common.api.commands import ChangeReply, DeployApplication, UploadCodeReply
from serve_common.api.views import ApplicationView, DeploymentStatus, GoalStatus, GoalView, PlanView
from serve_common.config.backend import HttpOptions, LogEncoding, LoggingConfig
from serve_common.errors import Conflict, LimitReached
from serve_common.names import GoalId

Muster = Callable[..., Result]
APP = """
from pydantic import BaseModel

import muster as serve
import {module}_helper


ENVIRONMENT = {{"env_vars": {{"A": "code"}}}}


@serve.deployment(max_ongoing_requests=7, ray_actor_options={{"num_cpus": 0.5, "runtime_env": ENVIRONMENT}})
class Model:
    def __init__(self, words):
        self.words = words

    def __call__(self, request):
        return {module}_helper.join(self.words)


@serve.deployment(autoscaling_config={{"min_replicas": 2, "max_replicas": 9}})
class Front:
    def __init__(self, model):
        self.model = model

    async def __call__(self, request):
        return await self.model.remote(request)


class Args(BaseModel):
    word: str = "none"
    count: int = 1


def typed(args: Args):
    return Front.bind(Model.bind([args.word] * args.count))


def plain(args):
    return Front.bind(Model.bind(sorted(args.items())))


def broken(args):
    raise RuntimeError("no luck today")


def leaves(args):
    raise SystemExit(0)


def returned(args) -> serve.Application:
    return Front.bind(Model.bind([]))


app = Front.bind(Model.bind(["a", "b"]))
"""


ONE = "applications:\n- import_path: a:b\n  deployments:\n  - name: M\n"


@pytest.fixture
def module(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    """The name of a module with applications in the directory of the command."""
    name = f"served_{abs(hash(request.node.name)) % 10**8}"
    (tmp_path / f"{name}.py").write_text(APP.format(module=name))
    (tmp_path / f"{name}_helper.py").write_text("def join(words):\n    return ' '.join(words)\n")
    before = list(sys.path)
    yield name
    sys.path[:] = before
    for each in (name, f"{name}_helper"):
        sys.modules.pop(each, None)


@pytest.fixture(autouse=True)
def stored(controller: Any) -> None:
    controller.answers["upload_code"] = UploadCodeReply(is_stored=True)
    controller.answers["get_all_applications"] = []


class QuietFeed:
    """Log lines of a stack where nothing is logged."""

    async def receive(self, within_s: float | None = None) -> None:
        await asyncio.sleep(60 if within_s is None else within_s)

    async def publish(self, subject: str, payload: bytes) -> None:
        raise AssertionError(subject)

    @classmethod
    @asynccontextmanager
    async def listen(cls, address: Any, subjects: Any) -> AsyncIterator[QuietFeed]:
        yield cls()


@pytest.fixture
def run(muster: Muster) -> Muster:
    """`muster run --non-blocking`, and its arguments."""
    return partial(muster, "run", "--non-blocking", listen=QuietFeed.listen)


def view(name: str, route: str | None, app_config: dict[str, Any] | None) -> ApplicationView:
    return ApplicationView(
        name=name,
        status=DeploymentStatus.HEALTHY,
        message="",
        route_prefix=route,
        ingress=f"{name}/Front",
        deployments=[f"{name}/Front"],
        goal_id=GoalId("goal-1"),
        goal_status=GoalStatus.SUCCEEDED,
        app_config=app_config,
    )


def write(tmp_path: Path, text: str) -> str:
    (tmp_path / "f.yaml").write_text(text)
    return "f.yaml"


def sent(controller: Any) -> dict[str, DeployApplication]:
    return {each.name: each for each in controller.asked_of("deploy_application")}


def test_a_file_deploys_all_its_applications_with_its_options_over_those_of_the_code(
    muster: Muster, controller: Any, module: str, tmp_path: Path
) -> None:
    file = write(
        tmp_path,
        f"""
        applications:
          - name: one
            route_prefix: /one
            import_path: {module}:typed
            args: {{word: hello, count: "3"}}
            runtime_env: {{env_vars: {{A: app, B: app}}}}
            deployments:
              - name: Model
                num_replicas: auto
                ray_actor_options: {{num_cpus: 2, runtime_env: {{env_vars: {{B: file}}}}}}
              - name: Front
                num_replicas: 4
                user_config: {{threshold: 0.5}}
          - name: two
            route_prefix: null
            import_path: {module}.app
        """,
    )
    result = muster("deploy", file)
    assert result.exit_code == 0, result.output
    one, two = sent(controller)["one"], sent(controller)["two"]
    model, front = one.deployments
    assert (one.route_prefix, one.ingress, two.route_prefix) == ("/one", "Front", None)
    assert (model.name, front.name) == ("Model", "Front")
    assert model.replica_config.ray_actor_options.num_cpus == 2
    assert model.replica_config.ray_actor_options.runtime_env == {"env_vars": {"A": "app", "B": "file"}}
    assert front.replica_config.ray_actor_options.runtime_env == {"env_vars": {"A": "app", "B": "app"}}
    assert model.backend_config.autoscaling_config is not None
    assert model.backend_config.autoscaling_config.max_replicas == 100
    assert model.backend_config.max_concurrent_queries == 7
    assert (front.backend_config.num_replicas, front.backend_config.autoscaling_config) == (4, None)
    assert front.backend_config.user_config == {"threshold": 0.5}
    unchanged, _ = two.deployments
    assert unchanged.replica_config.ray_actor_options.runtime_env == {"env_vars": {"A": "code"}}
    assert one.app_config is not None
    assert one.app_config["args"] == {"word": "hello", "count": "3"}
    uploaded = {request.digest for request in controller.asked_of("upload_code")}
    assert {each.replica_config.code for each in (*one.deployments, *two.deployments)} <= uploaded
    assert "application one is deployed" in result.stdout
    assert "application two is deployed" in result.stdout


def test_the_runtime_env_of_a_run_is_the_default_of_the_applications_in_its_file(
    run: Muster, controller: Any, module: str, tmp_path: Path
) -> None:
    for name in ("defaults", "own"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.txt").write_text(name)
    (tmp_path / "files").mkdir()
    (tmp_path / "files/f.yaml").write_text(
        f"""
        applications:
          - {{name: bare, route_prefix: /bare, import_path: '{module}:app'}}
          - name: own
            route_prefix: /own
            import_path: {module}:app
            runtime_env: {{working_dir: ../own, env_vars: {{C: app}}}}
        """
    )
    controller.answers["upload_code"] = lambda request: UploadCodeReply(is_stored=request.pages > 0)
    environment = {"working_dir": "nowhere", "env_vars": {"A": "run", "B": "run", "C": "run"}}
    result = run(
        *("--runtime-env-json", json.dumps(environment), "--working-dir", "defaults"), "files/f.yaml"
    )
    assert result.exit_code == 0, result.output
    assert "ignored" not in result.stderr
    assert result.stdout.startswith("Running config file: 'files/f.yaml'.\n")
    assert result.stdout.endswith("\nSubmitted deploy config successfully.\n")
    bare, own = (command.deployments for _name, command in sorted(sent(controller).items()))
    environments = [
        {each.name: each.replica_config.ray_actor_options.runtime_env for each in deployments}
        for deployments in (bare, own)
    ]
    assert environments[0]["Front"]["env_vars"] == {"A": "run", "B": "run", "C": "run"}
    assert environments[0]["Model"]["env_vars"] == {"A": "code", "B": "run", "C": "run"}
    assert environments[1]["Front"]["env_vars"] == {"A": "run", "B": "run", "C": "app"}
    uploaded = {each.digest: each.data for each in controller.asked_of("upload_code") if each.pages == 1}
    names = []
    for deployments in (bare, own):
        working_dir = deployments[0].replica_config.working_dir
        with zipfile.ZipFile(io.BytesIO(uploaded[working_dir])) as archive:
            names.append(archive.namelist())
    assert names == [["defaults.txt"], ["own.txt"]]
    configs = [command.app_config or {} for command in sent(controller).values()]
    assert [each.get("runtime_env") for each in configs] == [
        None,
        {"working_dir": "../own", "env_vars": {"C": "app"}},
    ]


def test_each_application_is_imported_with_its_own_variables(
    muster: Muster, controller: Any, tmp_path: Path
) -> None:
    name = f"by_variable_{tmp_path.name[-6:].replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(
        "import os\nimport muster as serve\n"
        "Model = serve.deployment(name=os.environ.get('MODEL_NAME', 'Unset'))(lambda _: 'x')\napp = Model.bind()\n"
    )
    file = write(
        tmp_path,
        f"""
        applications:
        - {{name: a, route_prefix: /a, import_path: '{name}:app', runtime_env: {{env_vars: {{MODEL_NAME: A}}}}}}
        - {{name: b, route_prefix: /b, import_path: '{name}:app', runtime_env: {{env_vars: {{MODEL_NAME: B}}}}}}
        - {{name: c, route_prefix: /c, import_path: '{name}:app'}}
        """,
    )
    assert muster("deploy", file).exit_code == 0
    names = {app: [part.name for part in command.deployments] for app, command in sent(controller).items()}
    assert names == {"a": ["A"], "b": ["B"], "c": ["Unset"]}


def test_a_runtime_env_of_a_run_with_an_unknown_field_is_refused(
    run: Muster, controller: Any, module: str, tmp_path: Path
) -> None:
    file = write(tmp_path, f"applications: [{{import_path: '{module}:app'}}]")
    result = run("--runtime-env-json", '{"conda": "base"}', file)
    assert result.exit_code == 1
    assert "--runtime-env: runtime_env: 'conda' is not supported by Muster" in result.stderr
    assert controller.asked == []


def test_logging_of_a_deployment_is_before_that_of_its_application_and_of_the_file(
    muster: Muster, controller: Any, module: str, tmp_path: Path
) -> None:
    file = write(
        tmp_path,
        f"""
        logging_config: {{log_level: ERROR}}
        applications:
          - name: one
            route_prefix: /one
            import_path: {module}:app
            logging_config: {{log_level: 10, encoding: JSON, additional_log_standard_attrs: [lineno]}}
            deployments:
              - name: Model
                logging_config: {{log_level: WARNING, enable_access_log: false}}
          - name: two
            route_prefix: /two
            import_path: {module}:app
        """,
    )
    result = muster("deploy", file)
    assert result.exit_code == 0, result.output
    model, front = (each.backend_config.logging_config for each in sent(controller)["one"].deployments)
    assert model == LoggingConfig(log_level="WARNING", enable_access_log=False)
    assert front == LoggingConfig(
        log_level="DEBUG", encoding=LogEncoding.JSON, additional_log_standard_attrs=("lineno",)
    )
    recorded = sent(controller)["two"].app_config
    assert recorded is not None
    assert recorded["logging_config"] == {"log_level": "ERROR"}
    of_the_file = {each.backend_config.logging_config for each in sent(controller)["two"].deployments}
    assert of_the_file == {LoggingConfig(log_level="ERROR")}


def test_a_run_logs_requests_unless_a_logging_config_says_otherwise(
    muster: Muster, run: Muster, controller: Any, module: str, tmp_path: Path
) -> None:
    def logging_of(words: tuple[str, ...]) -> set[LoggingConfig | None]:
        controller.asked.clear()
        assert (run if words[0] == "run" else muster)(*words[words[0] == "run" :]).exit_code == 0
        [command] = sent(controller).values()
        return {each.backend_config.logging_config for each in command.deployments}

    file = write(tmp_path, f"applications: [{{import_path: '{module}:app'}}]")
    assert logging_of(("run", f"{module}:app")) == {LoggingConfig()}
    assert LoggingConfig().enable_access_log
    assert logging_of(("run", file)) == {LoggingConfig()}
    assert logging_of(("deploy", file)) == {None}
    assert logging_of(("deploy", f"{module}:app")) == {None}
    file = write(
        tmp_path,
        f"logging_config: {{enable_access_log: false}}\napplications: [{{import_path: '{module}:app'}}]\n",
    )
    assert logging_of(("run", file)) == {LoggingConfig(enable_access_log=False)}


def test_auto_puts_its_limits_under_the_codes_own(
    muster: Muster, controller: Any, module: str, tmp_path: Path
) -> None:
    file = write(
        tmp_path,
        f"applications: [{{import_path: '{module}:app', deployments: [{{name: Front, num_replicas: auto}}]}}]",
    )
    assert muster("deploy", file).exit_code == 0
    limits = sent(controller)["default"].deployments[1].backend_config.autoscaling_config
    assert (limits.min_replicas, limits.max_replicas) == (2, 9)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("applications: [", ["f.yaml: is not YAML"]),
        ("[]", ["f.yaml:1: must have the field 'applications'"]),
        ("import_path: a:b\n", ["f.yaml:1: import_path: belongs into the list 'applications'"]),
        ("applications:\n  - name: a\n", ["f.yaml:2: applications[0].import_path: is missing"]),
        (
            "applications:\n- import_path: a:b\n  deployments:\n  - name: M\n    num_replica: 2\n    user_confg: {}\n",
            [
                "f.yaml:5: applications[0].deployments[0].num_replica: is unknown; did you mean 'num_replicas'?",
                "f.yaml:6: applications[0].deployments[0].user_confg: is unknown; did you mean 'user_config'?",
            ],
        ),
        (
            f"{ONE}    ray_actor_options:\n      num_cpu: 1\n",
            ["f.yaml:6: applications[0].deployments[0].ray_actor_options.num_cpu", "did you mean 'num_cpus'"],
        ),
        (
            f"{ONE}    autoscaling_config: {{max_replica: 1}}\n",
            ["autoscaling_config.max_replica: is unknown; did you mean 'max_replicas'?"],
        ),
        (
            "applications:\n- import_path: a:b\n- import_path: a:c\n",
            ["f.yaml:1: applications: Found multiple configs for application"],
        ),
        (
            "applications:\n- import_path: a:b\n  name: x\n  name: y\n",
            ["f.yaml:4: applications[0].name: is there twice"],
        ),
        (
            "applications:\n- import_path: nothing\n",
            ["f.yaml:2: applications[0].import_path: Got invalid import path"],
        ),
        (
            "applications:\n- import_path: a:b\n  route_prefix: shop\n",
            ["f.yaml:3: applications[0].route_prefix: Invalid route_prefix"],
        ),
        (
            "applications:\n- import_path: a:b\n  deployments:\n  - {name: M, max_ongoing_requests: many}\n",
            [
                "f.yaml:4: applications[0].deployments[0].max_ongoing_requests: Input should be a valid integer"
            ],
        ),
        (
            "applications:\n- import_path: a:b\n  deployments:\n  - name: M\n    placement_group_bundles: [{CPU: 1}]\n",
            ["f.yaml:5: applications[0].deployments[0].placement_group_bundles", "not supported by Muster"],
        ),
        (
            "applications:\n- import_path: a:b\n  runtime_env: {conda: x}\n",
            ["f.yaml:3: applications[0].runtime_env: runtime_env: 'conda' is not supported"],
        ),
        (
            f"{ONE}  - name: M\n    num_replicas: 2\n",
            ["f.yaml:5: applications[0].deployments[1].name: has options already: 'M' is listed twice"],
        ),
        ("target_capacity: 50\napplications: []\n", ["f.yaml:1: target_capacity: is not supported"]),
    ],
)
def test_a_bad_file_is_refused_with_path_and_line_before_anything_is_sent(
    muster: Muster, controller: Any, tmp_path: Path, text: str, words: list[str]
) -> None:
    for command, code in (("deploy", 2), ("run", 1)):  # that of `run` is Ray Serve's
        result = muster(command, write(tmp_path, text))
        assert result.exit_code == code
        for word in words:
            assert word in result.stderr
    assert controller.asked == []


@pytest.mark.parametrize(
    ("import_path", "more", "words"),
    [
        ("nowhere:app", "", "f.yaml:1: applications[0].import_path: nowhere:app: No module named 'nowhere'"),
        ("{module}:appl", "", "has no attribute 'appl'"),
        (
            "{module}:Model",
            "",
            "but got: {module}:Model, a <class 'muster.sdk.deployments.Deployment'>; name what",
        ),
        (
            "{module}:Args",
            "",
            "Expected a built Serve application or an application builder function but got: {module}:Args",
        ),
        ("{module}:broken", "", "no luck today"),
        ("{module}:app", "args: {x: 1}", "applications[0].args: Arguments can only be passed"),
        ("{module}:typed", "args: {count: many}", "applications[0].args: of {module}:typed"),
        (
            "{module}:app",
            "deployments: [{name: Modl}]",
            "deployments[0].name: 'Modl' is none of the deployments",
        ),
    ],
)
def test_what_cannot_be_imported_or_built_fails_by_itself_and_the_others_are_deployed(
    muster: Muster,
    run: Muster,
    controller: Any,
    module: str,
    tmp_path: Path,
    import_path: str,
    more: str,
    words: str,
) -> None:
    controller.answers["get_all_applications"] = [
        view("bad", "/bad", {"import_path": "a:b"}),
        view("old", "/old", {"import_path": "a:b"}),
    ]
    text = (
        f"applications: [{{name: bad, import_path: '{import_path.format(module=module)}', {more}}}, "
        f"{{name: good, route_prefix: /good, import_path: '{module}:app'}}]"
    )
    file = write(tmp_path, text)
    result = muster("deploy", file)
    assert result.exit_code == 0
    assert "error: application bad: the change failed:" in result.stderr
    assert words.format(module=module) in result.stderr
    assert "application good is deployed" in result.stdout
    assert "Sent deploy request successfully." in result.stdout
    assert list(sent(controller)) == ["good"]
    [failure] = controller.asked_of("record_build_failure")
    assert failure.name == "bad"
    assert words.format(module=module).rpartition("applications[0].")[2] in failure.error
    assert failure.app_config["import_path"] == import_path.format(module=module)
    assert [each.name for each in controller.asked_of("delete_application")] == ["old"]

    assert muster("deploy", file, "--fail").exit_code == 1
    reported = muster("deploy", file, "--json", "--no-wait")
    assert reported.exit_code == 1
    assert {each["what"]: each["outcome"]["result"] for each in json.loads(reported.stdout)} == {
        "application bad": "failed",
        "application good": "accepted",
        "application old": "accepted",
    }

    controller.asked.clear()
    for command in (muster, "plan", "deploy"), (muster, "diff"), (run,):
        refused = command[0](*command[1:], file)
        assert refused.exit_code == (2 if "diff" in command else 1)
        assert words.format(module=module) in refused.stderr
    assert controller.asked == []


def test_a_failed_build_that_cannot_be_recorded_is_told_all_the_same(
    muster: Muster, controller: Any, module: str, tmp_path: Path
) -> None:
    controller.answers["record_build_failure"] = LimitReached("too many")
    file = write(tmp_path, "applications: [{import_path: 'nowhere:app'}]")
    result = muster("deploy", file, "--fail")
    assert result.exit_code == 1
    assert "No module named 'nowhere'" in result.stderr
    assert "Its status does not show that: too many" in result.stderr


@pytest.mark.parametrize("name", ["broken", "leaves", "absent", "Model"])
def test_an_import_path_that_cannot_be_imported_or_built_is_exit_code_1(
    muster: Muster, run: Muster, controller: Any, module: str, name: str
) -> None:
    words = {
        "broken": "RuntimeError: no luck today",
        "leaves": "SystemExit: 0",
        "absent": "has no attribute 'absent'",
        "Model": "application builder function but got",
    }
    for result in (
        run(f"{module}:{name}"),
        muster("deploy", f"{module}:{name}", "x=y"),
        run("nowhere:app"),
        muster("build", "nowhere:app"),
    ):
        assert result.exit_code == 1
        assert "error: import_path: " in result.stderr
    assert words[name] in run(f"{module}:{name}").stderr
    assert run(f"{module}:app", "--no-such-option").exit_code == 2
    assert controller.asked == []


def test_what_has_no_effect_is_one_line(muster: Muster, controller: Any, module: str, tmp_path: Path) -> None:
    file = write(
        tmp_path,
        "proxy_location: HeadOnly\nhttp_options: {host: 127.0.0.2, port: 8001, request_timeout_s: 5}\n"
        f"grpc_options: {{port: 9000}}\napplications: [{{import_path: '{module}:app'}}]\n",
    )
    result = muster("deploy", file)
    notes = [line for line in result.stderr.splitlines() if line.startswith("note:")]
    assert len(notes) == 1
    assert notes[0].startswith(
        "note: f.yaml: without effect in Muster: proxy_location, grpc_options, http_options.host, http_options.port;"
    )
    assert controller.asked_of("set_http_options")[0].options == {"request_timeout_s": 5.0}


def test_applications_of_earlier_files_that_are_left_out_go_away_and_others_stay(
    muster: Muster, controller: Any, module: str, tmp_path: Path
) -> None:
    controller.answers["get_all_applications"] = [
        view("old", "/old", {"import_path": "a:b"}),
        view("programs", "/programs", None),
    ]
    file = write(tmp_path, f"applications: [{{import_path: '{module}:app'}}]")
    result = muster("deploy", file)
    assert [each.name for each in controller.asked_of("delete_application")] == ["old"]
    assert "application old is deleted: the file leaves it out" in result.stdout
    controller.asked.clear()
    assert muster("deploy", f"{module}:app").exit_code == 0
    assert not controller.asked_of("delete_application"), "an import path is no file"


def test_a_route_is_freed_before_it_is_taken(
    muster: Muster, controller: Any, module: str, tmp_path: Path
) -> None:
    controller.answers["get_all_applications"] = [
        view("old", "/", {"import_path": "a:b"}),
        view("b", "/b", {"import_path": "a:b"}),
    ]
    file = write(
        tmp_path,
        f"applications: [{{name: a, route_prefix: /b, import_path: '{module}:app'}}, "
        f"{{name: b, route_prefix: /, import_path: '{module}:app'}}]",
    )
    assert muster("deploy", file).exit_code == 0
    changes = [(verb, request.name) for verb, request in controller.asked if verb.endswith("_application")]
    assert changes == [
        ("delete_application", "old"),
        ("deploy_application", "b"),
        ("deploy_application", "a"),
    ]
    controller.answers["get_all_applications"] = [view("a", "/", {}), view("b", "/b", {})]
    controller.asked.clear()
    result = muster("deploy", file)
    assert result.exit_code == 2
    assert "applications exchange /, /b" in result.stderr
    assert not controller.asked_of("deploy_application")


def test_what_the_controller_refuses_is_refused_before_anything_changes(
    muster: Muster, controller: Any, module: str, tmp_path: Path
) -> None:
    controller.answers["plan"] = Conflict("route_prefix: '/' belongs to the endpoint 'default/digits'")
    result = muster("deploy", write(tmp_path, f"applications: [{{import_path: '{module}:app'}}]"))
    assert result.exit_code == 2
    assert "belongs to the endpoint" in result.stderr
    assert not controller.asked_of("deploy_application")


def test_one_application_that_fails_leaves_the_others_alone(
    muster: Muster, controller: Any, module: str, tmp_path: Path
) -> None:
    def deploy(request: DeployApplication) -> ChangeReply:
        return ChangeReply(goal_id=GoalId(f"goal-{request.name}"), updating=True)

    def wait(query: Any) -> GoalView:
        bad = query.goal_id == "goal-bad"
        return GoalView(
            goal_id=query.goal_id,
            status=GoalStatus.FAILED if bad else GoalStatus.SUCCEEDED,
            error="Traceback\nValueError: no weights" if bad else "",
        )

    controller.answers.update(deploy_application=deploy, wait_for_goal=wait)
    file = write(
        tmp_path,
        f"applications: [{{name: bad, import_path: '{module}:app'}}, "
        f"{{name: good, route_prefix: /good, import_path: '{module}:app'}}]",
    )
    result = muster("deploy", file)
    assert result.exit_code == 0
    assert muster("deploy", file, "--fail").exit_code == 1
    assert "no weights" in result.stderr
    assert "application good is deployed" in result.stdout
    parsed = json.loads(muster("deploy", file, "--json").stdout)
    assert {each["what"]: each["outcome"]["result"] for each in parsed} == {
        "application bad": "failed",
        "application good": "succeeded",
    }


def test_a_dry_run_shows_all_changes_and_makes_none(
    muster: Muster, controller: Any, module: str, tmp_path: Path
) -> None:
    controller.answers["plan"] = PlanView(updating=True, replicas=[], notes=["the plan's note"])
    file = write(tmp_path, f"applications: [{{import_path: '{module}:app'}}]")
    result = muster("plan", "deploy", file)
    assert result.exit_code == 0, result.output
    assert "application default: would change" in result.stdout
    assert "the plan's note" in result.stdout
    assert {verb for verb, _ in controller.asked} == {"get_all_applications", "plan"}


def test_a_diff_tells_what_a_deploy_of_the_file_would_change(
    muster: Muster, controller: Any, module: str, tmp_path: Path
) -> None:
    changes = PlanView(updating=True, replicas=[], notes=[])
    controller.answers.update(
        plan=changes,
        list_deployments=[],
        get_all_applications=[view("old", "/old", {"import_path": "a:b"})],
        get_http_config=HttpOptions(request_timeout_s=60.0),
    )
    file = write(
        tmp_path, f"http_options: {{request_timeout_s: 5}}\napplications: [{{import_path: '{module}:app'}}]\n"
    )
    result = muster("diff", file)
    assert result.exit_code == 1, result.output
    lines = result.stdout.splitlines()
    assert f"+ Model.replica_config.import_path: {module}:Model" in lines
    assert "+ Model.backend_config.max_concurrent_queries: 7" in lines
    assert lines.index("application default: would change; no replica is touched") < lines.index(
        "- route_prefix: /old"
    )
    assert "application old: would change; no replica is touched" in lines
    assert "note: the file leaves it out" in lines
    assert "~ request_timeout_s: 60.0 -> 5.0" in lines
    assert {verb for verb, _ in controller.asked} == {
        "get_all_applications", "list_deployments", "plan", "get_http_config",
    }  # fmt: skip
    whats = [each["what"] for each in json.loads(muster("diff", file, "--json").stdout)]
    assert whats == ["application default", "application old", "HTTP options"]
    controller.answers["plan"] = msgspec.structs.replace(changes, updating=False)
    assert muster("diff", file).exit_code == 0
    refused = muster("diff", write(tmp_path, "applications: [{import_pat: a:b}]"))
    assert refused.exit_code == 2
    assert "did you mean 'import_path'?" in refused.stderr


def test_an_import_path_without_a_name_is_an_application(
    muster: Muster, controller: Any, module: str, tmp_path: Path
) -> None:
    (tmp_path / "env.yaml").write_text("env_vars: {X: y}\n")
    result = muster(
        *("deploy", f"{module}:plain", "word=a", "flag=b=c", "--route-prefix", "/plain"),
        *("--runtime-env", "env.yaml"),
    )
    assert result.exit_code == 0, result.output
    command = sent(controller)["default"]
    assert command.route_prefix == "/plain"
    assert command.app_config is not None
    assert command.app_config["args"] == {"word": "a", "flag": "b=c"}
    assert command.deployments[0].replica_config.ray_actor_options.runtime_env["env_vars"]["X"] == "y"
    for words, field, code in (
        (("deploy", f"{module}:app", "word"), "KEY=VALUE", 2),
        (("deploy", f"{module}:app", "--num-replicas", "2"), "--num-replicas", 2),
        (("deploy", f"{module}:app", "--name", "b", "x=y"), "args", 1),
        (("deploy", f"{module}:plain", "--name", "b", "x=y", "--version", "1"), "--version", 2),
        (
            ("deploy", f"{module}:app", "--runtime-env", "env.yaml", "--runtime-env-json", "{}"),
            "--runtime-env-json",
            2,
        ),
    ):
        refused = muster(*words)
        assert refused.exit_code == code
        assert f"error: {field}:" in refused.stderr


@pytest.mark.parametrize("words", [("app",), ("plain", "word=a"), ("returned",)])
def test_an_import_path_of_an_application_has_its_name(
    muster: Muster, controller: Any, module: str, words: tuple[str, ...]
) -> None:
    result = muster(
        "deploy", f"{module}:{words[0]}", *words[1:], "--name", "shop", "-a", "http://localhost:8265"
    )
    assert result.exit_code == 0, result.output
    assert "without effect in Muster: --address" in result.stderr
    assert result.stdout.startswith(f"Deploying from import path: '{module}:{words[0]}'.\n")
    assert result.stdout.endswith(
        "Sent deploy request successfully.\n"
        " * Use `muster status` to check applications' statuses.\n"
        " * Use `muster config` to see the current application config(s).\n\n"
    )
    assert list(sent(controller)) == ["shop"]
    assert not controller.asked_of("deploy")


def test_a_class_with_a_name_is_a_single_deployment_that_is_not_imported_here(
    muster: Muster, controller: Any, tmp_path: Path
) -> None:
    (tmp_path / "single.py").write_text("raise SystemExit\nclass Model: ...\napp = FastAPI()\n")
    for attribute in ("Model", "app", "absent"):
        assert muster("deploy", f"single:{attribute}", "--name", attribute).exit_code == 0
    assert [each.name for each in controller.asked_of("deploy")] == [
        f"default/{attribute}" for attribute in ("Model", "app", "absent")
    ]


def test_a_file_takes_no_arguments(muster: Muster, controller: Any, module: str, tmp_path: Path) -> None:
    file = write(tmp_path, f"applications: [{{import_path: '{module}:app'}}]")
    result = muster("deploy", file, "word=a")
    assert result.exit_code == 2
    assert "Application arguments cannot be specified for a config file." in result.stderr
    assert not sent(controller)


def test_a_stack_of_ones_own_listens_where_the_file_says() -> None:
    options = "{host: 0.0.0.0, port: 8001, root_path: /in/, ssl_keyfile_password: x}"
    text = f"http_options: {options}\napplications: [{{import_path: 'a:b'}}]"
    config = check_config(YamlFile(text, "f.yaml"), Path())
    assert config.listen == {"http_host": "0.0.0.0", "http_port": 8001}
    assert config.http_options == {"root_path": "/in"}
    without = config.note(has_listen=True) or ""
    assert "http_options.ssl_keyfile_password" in without
    assert "http_options.root_path" not in without
    assert "http_options.port" not in without
    assert "http_options.port" in (config.note() or "")


def test_status_in_a_pipe_is_rays_form_unless_a_table_is_wanted(muster: Muster, controller: Any) -> None:
    controller.answers["get_all_applications"] = [view("a", "/a", None)]
    assert set(yaml.safe_load(muster("status", "-a", "auto").stdout)) == {
        "applications",
        "proxies",
        "target_capacity",
    }
    assert "leads in term" in muster("status", "--format", "table").stdout


def test_build_refuses_a_function(muster: Muster, module: str) -> None:
    result = muster("build", f"{module}:plain")
    assert result.exit_code == 1
    assert "to be an Application but got <class 'function'>" in result.stderr


def test_an_application_in_musters_own_form_is_told_by_what_the_file_holds(
    muster: Muster, controller: Any, tmp_path: Path
) -> None:
    file = write(
        tmp_path,
        "name: shop\ningress: front\ndeployments: [{name: front, replica_config: {import_path: 'shop:Front'}}]\n",
    )
    result = muster("deploy", file)
    assert result.exit_code == 0, result.output
    assert sent(controller)["shop"].deployments[0].replica_config.import_path == "shop:Front"


def test_what_build_writes_deploys_what_the_code_says(
    muster: Muster, controller: Any, module: str, tmp_path: Path
) -> None:
    assert muster("build", f"{module}:app", "-o", "built.yaml").exit_code == 0
    built = yaml.safe_load((tmp_path / "built.yaml").read_text())
    [app] = built["applications"]
    assert (app["name"], app["route_prefix"], app["import_path"]) == ("default", "/", f"{module}:app")
    model, front = app["deployments"]
    assert model == {
        "name": "Model",
        "max_ongoing_requests": 7,
        "ray_actor_options": {"num_cpus": 0.5, "runtime_env": {"env_vars": {"A": "code"}}},
    }
    assert front["autoscaling_config"] == {"min_replicas": 2, "max_replicas": 9}
    assert built["http_options"] == {"host": "0.0.0.0", "port": 8000}
    deployed = muster("deploy", "built.yaml")
    assert deployed.exit_code == 0
    assert "without effect" not in deployed.stderr
    assert muster("deploy", f"{module}:app").exit_code == 0
    from_file, from_code = controller.asked_of("deploy_application")
    logging = built["logging_config"]
    assert (logging["encoding"], logging["enable_access_log"]) == ("TEXT", True)
    logs = LoggingConfig(enable_access_log=True)
    assert [each.backend_config.logging_config for each in from_file.deployments] == [logs, logs]
    assert from_file.deployments == [
        msgspec.structs.replace(
            each, backend_config=msgspec.structs.replace(each.backend_config, logging_config=logs)
        )
        for each in from_code.deployments
    ]
    several = yaml.safe_load(muster("build", f"{module}:app", f"{module}.app").stdout)
    assert [(each["name"], each["route_prefix"]) for each in several["applications"]] == [
        ("app1", "/app1"),
        ("app2", "/app2"),
    ]
    refused = muster("build", f"{module}:nothing")
    assert refused.exit_code == 1


def test_paths_of_a_runtime_env_are_relative_to_the_directory_of_the_command(
    muster: Muster, controller: Any, module: str, tmp_path: Path
) -> None:
    source = tmp_path / "src"
    source.mkdir()
    for each in tmp_path.glob("*.py"):
        each.rename(source / each.name)
    (source / "data.txt").write_text("hello")
    result = muster("deploy", f"{module}:app", "--app-dir", "src", "--working-dir", "./src")
    assert result.exit_code == 0, result.output
    assert "default" in sent(controller)


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_an_application_is_imported_from_the_zip_that_is_its_working_dir(
    muster: Muster, controller: Any, module: str, tmp_path: Path, scheme: str
) -> None:
    with zipfile.ZipFile(tmp_path / "code.zip", "w") as archive:
        for each in tmp_path.glob("*.py"):
            archive.write(each, each.name)
            each.unlink()
    file = write(
        tmp_path,
        f"applications:\n- import_path: {module}:app\n"
        f"  runtime_env: {{working_dir: '{scheme}{tmp_path / 'code.zip'}'}}\n",
    )
    result = muster("deploy", file)
    assert result.exit_code == 0, result.output
    assert "default" in sent(controller)


def test_an_application_may_import_its_py_modules_and_read_its_variables(
    muster: Muster, controller: Any, module: str, tmp_path: Path
) -> None:
    (tmp_path / "lib/own").mkdir(parents=True)
    (tmp_path / "lib/own/__init__.py").write_text(f"NAME = {module!r}\n")
    with zipfile.ZipFile(tmp_path / "more.zip", "w") as archive:
        archive.writestr("more/zipped_module.py", "LIMIT = 3\n")
    (tmp_path / "uses_modules.py").write_text(
        "import os\nimport muster as serve\nimport own, zipped_module\nassert os.environ['MODEL'] == 'seven'\n"
        "app = serve.deployment(max_ongoing_requests=zipped_module.LIMIT)(lambda request: own.NAME).bind()\n"
    )
    modules = f"[./lib/own, 'file://{tmp_path}/more.zip']"
    file = write(
        tmp_path,
        f"applications: [{{import_path: 'uses_modules:app', runtime_env: "
        f"{{py_modules: {modules}, env_vars: {{MODEL: seven}}}}}}]\n",
    )
    result = muster("deploy", file)
    assert result.exit_code == 0, result.output
    assert "MODEL" not in os.environ
    assert sent(controller)["default"].deployments[0].backend_config.max_concurrent_queries == 3


def test_a_module_finds_the_files_of_its_working_dir_when_it_is_imported(
    muster: Muster, controller: Any, module: str, tmp_path: Path
) -> None:
    before = Path.cwd()
    code = tmp_path / "code"
    code.mkdir()
    (code / "limit.txt").write_text("7")
    (code / "with_file.py").write_text(
        "import muster as serve\n"
        "from pathlib import Path\nLIMIT = int(Path('limit.txt').read_text())\n"
        "app = serve.deployment(max_ongoing_requests=LIMIT)(lambda request: LIMIT).bind()\n"
    )
    (tmp_path / "two.yaml").write_text(
        "applications:\n"
        "- {name: a, route_prefix: /a, import_path: 'with_file:app', runtime_env: {working_dir: code}}\n"
        f"- {{name: b, route_prefix: /b, import_path: '{module}:app'}}\n"
    )
    result = muster("deploy", str(tmp_path / "two.yaml"))
    assert result.exit_code == 0, result.output
    (deployment,) = sent(controller)["a"].deployments
    assert deployment.backend_config.max_concurrent_queries == 7
    assert "b" in sent(controller)
    assert Path.cwd() == before


def test_parts_of_a_file_that_only_anchors_name_are_left_alone(
    muster: Muster, controller: Any, module: str, tmp_path: Path
) -> None:
    file = write(
        tmp_path, f"x-base: &base {{import_path: '{module}:app'}}\napplications:\n- <<: *base\n  name: one\n"
    )
    assert muster("deploy", file).exit_code == 0
    assert "one" in sent(controller)


def test_an_argument_without_a_value_is_refused_in_ray_serves_words(muster: Muster, module: str) -> None:
    result = muster("run", "--non-blocking", f"{module}:typed", "word")
    assert result.exit_code == 1
    assert "Invalid application argument 'word', must be of the form '<key>=<val>'." in result.stderr


def test_config_shows_what_files_have_deployed(muster: Muster, controller: Any) -> None:
    assert muster("config").stdout == "No configuration was found.\n"
    text = "first\nsecond\n"
    controller.answers["get_all_applications"] = [
        view("a", "/", {"name": "a", "import_path": "a:b", "args": {"text": text}}),
        view("b", "/b", {"name": "b", "import_path": "c:d"}),
        view("c", "/c", None),
        view("d", None, {"name": "d", "runtime_env": {"env_vars": {"API_TOKEN": "s3cret"}}}),
    ]
    assert "s3cret" not in muster("config", "-n", "d").stdout + muster("app", "list", "--json").stdout
    assert "s3cret" in muster("config", "-n", "d", "--show-env").stdout
    del controller.answers["get_all_applications"][-1]
    assert list(yaml.safe_load_all(muster("config").stdout)) == [
        {"name": "a", "import_path": "a:b", "args": {"text": text}},
        {"name": "b", "import_path": "c:d"},
    ]
    assert yaml.safe_load(muster("config", "--name", "b").stdout) == {"name": "b", "import_path": "c:d"}
    assert 'No config has been deployed for application "c".' in muster("config", "-n", "c").stdout


def test_status_in_rays_form(muster: Muster, controller: Any) -> None:
    failing = msgspec.structs.replace(
        view("b", None, None), message="\x1b[31mTraceback\x1b[0m\nboom", goal_status=GoalStatus.FAILED
    )
    controller.answers["get_all_applications"] = [view("default", "/", None), failing]
    status = yaml.safe_load(muster("status", "--format", "ray").stdout)
    assert status["proxies"] == {"proxy-1": "HEALTHY"}
    assert {name: app["status"] for name, app in status["applications"].items()} == {
        "default": "RUNNING",
        "b": "DEPLOY_FAILED",
    }
    one = muster("status", "--name", "b")
    assert yaml.safe_load(one.stdout)["message"] == "Traceback\nboom"
    assert "message: |-\n  Traceback\n  boom\n" in one.stdout
    assert (
        json.loads(muster("status", "-n", "b", "--format", "ray", "--json").stdout)["status"]
        == "DEPLOY_FAILED"
    )
    unknown = muster("status", "--name", "nope", "--format", "ray")
    assert unknown.exit_code == 0
    assert 'Application "nope" does not exist.' in unknown.stderr
    assert muster("status", "digits", "--name", "b").exit_code == 2


def test_the_status_of_an_application_that_cannot_be_built_is_deploy_failed(
    muster: Muster, controller: Any
) -> None:
    error = "import_path: a:b raised:\nValueError: no weights"
    served = msgspec.structs.replace(view("a", "/a", None), build_error=error)
    leaving = msgspec.structs.replace(served, name="b", status=DeploymentStatus.DELETING)
    controller.answers["get_all_applications"] = [served, leaving]
    shown = yaml.safe_load(muster("status").stdout)["applications"]
    assert shown["a"]["status"] == "DEPLOY_FAILED"
    assert shown["a"]["message"] == f"Deploying app 'a' failed with exception:\n{error}"
    assert shown["b"]["status"] == "DELETING"


def test_shutdown_asks_and_deletes_everything(muster: Muster, controller: Any) -> None:
    refused = muster("shutdown", given="n\n")
    assert refused.exit_code == 1
    assert refused.stderr.startswith(
        'This will shut down Serve on the cluster at address "nats://stack.example:4222" and delete all applications '
        "there. Do you want to continue? [y/N]:"
    )
    assert refused.stderr.endswith("Aborted!\n")
    assert not controller.asked_of("shutdown")
    result = muster("shutdown", "-y")
    assert result.exit_code == 0
    assert (
        "Sent shutdown request; applications will be deleted asynchronously. Everything is deleted"
        in result.stdout
    )
    assert controller.asked_of("shutdown")[0].confirm == "everything"


def test_start_says_that_a_stack_runs_already(muster: Muster, controller: Any) -> None:
    result = muster("start", "--proxy-location", "EveryNode")
    assert result.exit_code == 0, result.output
    assert "a stack runs already" in result.stdout
    assert "without effect on a stack that runs: --proxy-location" in result.stderr
    refused = muster("start", "--proxy-location", "Nowhere")
    assert refused.exit_code == 2
    assert "Nowhere" in refused.stderr

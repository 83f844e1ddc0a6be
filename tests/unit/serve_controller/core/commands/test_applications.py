"""Applications: deployments with one ingress, changed together or not at all."""

from __future__ import annotations

import msgspec
import pytest

from serve_common.api.commands import (
    DeleteApplication,
    DeleteDeployment,
    DeployApplication,
    RecordBuildFailure,
    Rollback,
    Shutdown,
    UpdateBackendConfig,
)
from serve_common.api.views import ApplicationView, DeploymentStatus, GoalStatus
from serve_common.errors import BadField, Conflict, LimitReached
from serve_common.names import BackendTag
from serve_common.protocol.snapshots import BackendSnapshot, EndpointSnapshot, Snapshot
from serve_common.protocol.subjects import backend_key
from serve_controller.core.commands import applications
from serve_controller.core.commands.restoring import RestoreFrom
from serve_controller.core.forecast import forecast
from serve_controller.core.reconcile import PublishSnapshot
from serve_controller.core.views.deployments import view_applications, view_deployment, view_deployments
from tests.support.control_loop.closed_loop import Loop, check_converged
from tests.support.control_loop.orders import (
    BAD_CODE,
    application,
    create_backend,
    create_endpoint,
    deploy,
    spec,
)
from tests.support.control_loop.pure_host import PureHost


def loop_of(cpus: float = 16) -> Loop:
    return Loop(PureHost("host-1", cpus=cpus))


def shown(loop: Loop) -> ApplicationView:
    (view,) = view_applications(loop.checkpoint)
    return view


def versions(loop: Loop) -> dict[str, str | None]:
    return {d.name: d.version for d in view_deployments(loop.checkpoint)}


# -- one change --------------------------------------------------------------------------------------------------------


def test_an_application_is_its_deployments_and_one_route_to_its_ingress() -> None:
    loop = loop_of()
    goal_id = loop.done(application(spec("front"), spec("model", num=2), route="/shop"))
    assert shown(loop) == ApplicationView(
        name="app",
        status=DeploymentStatus.HEALTHY,
        message="",
        route_prefix="/shop",
        ingress="app/front",
        deployments=["app/front", "app/model"],
        goal_id=goal_id,
        goal_status=GoalStatus.SUCCEEDED,
        deployed_at=loop.checkpoint.goals[goal_id].created_at,
    )
    assert shown(loop).deployed_at > 0
    front, model = view_deployments(loop.checkpoint)
    assert (front.application, front.is_ingress, front.route_prefix) == ("app", True, "/shop")
    assert (model.application, model.is_ingress, model.route_prefix) == ("app", False, None)
    check_converged(loop)


def ingresses(loop: Loop) -> set[str]:
    """The endpoints that routers know as ingresses."""
    snapshots = [record.snapshot.content for record in loop.checkpoint.snapshots.values()]
    return {each.endpoint_tag for each in snapshots if isinstance(each, EndpointSnapshot) and each.is_ingress}


def test_routers_know_the_ingress_of_an_application_that_has_no_route() -> None:
    loop = loop_of()
    loop.done(application(spec("front"), spec("model")))
    assert ingresses(loop) == {"app/front"}
    loop.done(deploy("app/front", version="v2"))
    loop.done(deploy("app/model", version="v2"))
    assert ingresses(loop) == {"app/front"}
    loop.done(application(spec("front"), spec("model"), ingress="model"))
    assert ingresses(loop) == {"app/model"}
    loop.done(deploy("alone"))
    assert ingresses(loop) == {"app/model"}
    check_converged(loop)


def test_an_application_has_one_goal_that_ends_when_all_of_it_runs() -> None:
    loop = loop_of(cpus=1)
    goal_id = loop.ask(application(spec("front"), spec("model"))).goal_id
    loop.steps(5)
    assert len(loop.checkpoint.goals) == 1
    assert loop.goal_status(goal_id) is GoalStatus.PENDING
    assert "0 of 1 replicas of app/model run" in loop.waiting_for(goal_id)
    assert shown(loop).status is DeploymentStatus.UPDATING
    loop.hosts.append(PureHost("host-2"))
    loop.settle()
    assert loop.goal_status(goal_id) is GoalStatus.SUCCEEDED


def test_the_same_again_is_nothing_to_do() -> None:
    loop = loop_of()
    command = application(spec("front"), spec("model"), route="/shop")
    first = loop.ask(command)
    again = loop.command(command)
    assert (again.reply.goal_id, again.reply.updating, bool(again.changes)) == (first.goal_id, False, False)
    loop.settle()
    assert not loop.command(command).changes


def test_a_retry_of_an_unversioned_one_is_answered_with_its_goal() -> None:
    loop = loop_of()
    command = application(spec("front", version=None), request_id="r1")
    assert loop.ask(command) == loop.ask(command)
    assert len(loop.checkpoint.goals) == 1


def test_only_the_deployments_that_changed_are_touched() -> None:
    loop = loop_of()
    loop.done(application(spec("front"), spec("model", num=2)))
    before = loop.running("app/model")
    loop.done(application(spec("front", version="v2"), spec("model", num=2)))
    assert loop.running("app/model") == before
    assert versions(loop) == {"app/front": "v2", "app/model": "v1"}


def test_deployments_dropped_from_it_go_away_once_the_rest_runs() -> None:
    loop = loop_of()
    loop.done(application(spec("front"), spec("old")))
    loop.hosts[0].hangs_in_starting = True
    goal_id = loop.ask(application(spec("front"), spec("new"))).goal_id
    loop.steps(5)
    assert loop.running("app/old"), "the old front may still call it"
    loop.hosts[0].hangs_in_starting = False
    loop.hosts[0].held.clear()
    loop.hosts[0].spent.clear()
    loop.settle()
    assert loop.goal_status(goal_id) is GoalStatus.SUCCEEDED
    assert loop.running("app/old") == set()
    assert shown(loop).deployments == ["app/front", "app/new"]
    assert loop.bucket["endpoints.app.old"].content is None
    check_converged(loop)


def test_what_a_file_has_for_it_is_shown_and_restarts_nothing() -> None:
    loop = loop_of()
    command = application(spec("front"), route="/shop")
    loop.done(command)
    assert shown(loop).app_config is None
    before = loop.running("app/front")
    from_file = msgspec.structs.replace(command, app_config={"import_path": "shop:app"})
    loop.done(from_file)
    assert shown(loop).app_config == {"import_path": "shop:app"}
    assert not loop.command(from_file).changes
    broken = application(spec("front", version="v2", code=BAD_CODE, retries=1), route="/shop")
    loop.ask(msgspec.structs.replace(broken, app_config={"import_path": "shop:broken"}))
    loop.settle()
    assert shown(loop).app_config == {"import_path": "shop:app"}, "it goes back with the code"
    assert loop.running("app/front") == before
    huge = msgspec.structs.replace(command, app_config={"args": "x" * applications.APP_CONFIG_BYTES_MAX})
    with pytest.raises(LimitReached, match="app_config"):
        loop.command(huge)


# -- all or nothing ----------------------------------------------------------------------------------------------------


def test_when_one_deployment_fails_all_of_them_go_back() -> None:
    loop = loop_of()
    loop.done(application(spec("front"), spec("model"), route="/shop"))
    goal_id = loop.ask(
        application(
            spec("front", version="v2"),
            spec("model", version="v2", code=BAD_CODE),
            spec("more"),
            route="/new",
        )
    ).goal_id
    loop.settle()
    goal = loop.goal(goal_id)
    assert goal.status is GoalStatus.FAILED
    assert goal.error.startswith("app/model: ")
    assert "RuntimeError: no" in goal.error
    assert versions(loop) == {"app/front": "v1", "app/model": "v1"}
    assert (shown(loop).route_prefix, shown(loop).deployments) == ("/shop", ["app/front", "app/model"])
    assert loop.running("app/more") == set(), "what was new goes away"
    assert "RuntimeError: no" in shown(loop).message
    check_converged(loop)


def test_also_what_had_changed_already_goes_back() -> None:
    """By default a failed update keeps what serves of it; an application is all or nothing."""
    loop = loop_of()
    loop.done(application(spec("front", num=2), spec("model")))
    loop.ask(
        application(spec("front", num=2, version="v2"), spec("model", version="v2", code=BAD_CODE, retries=8))
    )
    loop.steps(10)
    assert versions(loop)["app/front"] == "v2"
    loop.steps(100, 1.0)
    loop.settle()
    assert versions(loop) == {"app/front": "v1", "app/model": "v1"}
    assert all(r.version == "v1" for r in view_deployment(loop.checkpoint, "app/front").replicas)
    check_converged(loop)


def test_a_first_application_that_fails_serves_nothing_and_may_be_deployed_again() -> None:
    loop = loop_of()
    failed = loop.ask(application(spec("front"), spec("model", code=BAD_CODE), route="/shop"))
    loop.settle()
    assert loop.goal_status(failed.goal_id) is GoalStatus.FAILED
    assert loop.all_replicas() == []
    assert shown(loop).status is DeploymentStatus.UNHEALTHY
    refusing = [loop.bucket[backend_key(BackendTag(f"app/{name}"))].content for name in ("front", "model")]
    assert all(isinstance(content, BackendSnapshot) and content.is_stopped for content in refusing)
    loop.done(application(spec("front"), spec("model"), route="/shop"))
    check_converged(loop)


def test_what_was_dropped_stays_when_the_change_fails() -> None:
    loop = loop_of()
    loop.done(application(spec("front"), spec("old")))
    goal_id = loop.ask(application(spec("front", version="v2", code=BAD_CODE))).goal_id
    loop.settle()
    assert loop.goal_status(goal_id) is GoalStatus.FAILED
    assert shown(loop).deployments == ["app/front", "app/old"]
    assert loop.running("app/old")
    check_converged(loop)


def test_a_newer_change_of_the_application_supersedes_the_pending_one() -> None:
    loop = loop_of()
    first = loop.ask(application(spec("front"), spec("model")))
    second = loop.ask(application(spec("front", version="v2"), spec("other")))
    assert loop.goal_status(first.goal_id) is GoalStatus.SUPERSEDED
    loop.settle()
    assert loop.goal_status(second.goal_id) is GoalStatus.SUCCEEDED
    assert versions(loop) == {"app/front": "v2", "app/other": "v1"}
    assert "app/model" not in loop.checkpoint.backends, "what only the replaced change had made goes away"
    check_converged(loop)


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "field"),
    [
        (application(spec("front"), name="a/b"), "name"),
        (application(spec("front"), name=""), "name"),
        (application(spec("front"), ingress="nobody"), "ingress"),
        (application(spec("front"), spec("front")), "deployments[1].name"),
        (application(spec("front"), spec("a/b")), "deployments[1].name"),
        (application(spec("front"), spec("m", num=-1)), "deployments[1].backend_config.num_replicas"),
        (application(spec("m", code="nothing")), "deployments[0].replica_config.import_path"),
        (application(spec("m", version="")), "deployments[0].version"),
        (application(spec("m"), route="shop"), "route_prefix"),
        (application(spec("m"), request_id="a b"), "request_id"),
        (DeployApplication(name="app", deployments=[], ingress="m"), "deployments"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_value_is_refused_with_its_path_and_nothing_changes(
    command: DeployApplication, field: str
) -> None:
    loop = loop_of()
    with pytest.raises(BadField) as refused:
        loop.command(command)
    assert refused.value.field == field
    assert not loop.checkpoint.backends


def test_the_route_of_another_endpoint_is_refused() -> None:
    loop = loop_of()
    loop.done(deploy("a", route="/shop"))
    with pytest.raises(Conflict, match=r"route_prefix: '/shop' belongs to the endpoint 'default/a'$"):
        loop.command(application(spec("front"), route="/shop"))
    loop.done(application(spec("front"), route="/other"))
    words = (
        r"'/other' belongs to the endpoint 'app/front'\. Prefix /other is being used by application \"app\"$"
    )
    with pytest.raises(Conflict, match=words):
        loop.command(deploy("b", route="/other"))


def test_the_names_of_backends_and_endpoints_are_not_taken_over() -> None:
    loop = loop_of()
    loop.done(create_backend("app/model"))
    with pytest.raises(Conflict, match=r"deployments\[1\].name: 'app/model' is a backend"):
        loop.command(application(spec("front"), spec("model")))
    loop.done(create_endpoint("app/front", **{"app/model": 1.0}))
    with pytest.raises(Conflict, match=r"deployments\[0\].name: 'app/front' is an endpoint"):
        loop.command(application(spec("front")))


def test_a_deployment_of_the_applications_name_that_it_leaves_out_is_refused() -> None:
    """It would have a deployment that nobody meant to be part of it."""
    loop = loop_of()
    loop.done(deploy("app/stranger"))
    with pytest.raises(Conflict, match="'app/stranger' has this application's name and is not part of it"):
        loop.command(application(spec("front")))
    before = loop.running("app/stranger")
    loop.done(application(spec("stranger"), spec("front")))
    assert loop.running("app/stranger") == before, "the same version: it is taken over as it is"
    assert view_deployment(loop.checkpoint, "app/stranger").application == "app"


def test_the_application_default_is_beside_what_has_bare_names() -> None:
    loop = loop_of()
    loop.done(deploy("before"))
    loop.done(application(spec("front"), name="default"))
    loop.done(deploy("after"))
    loop.done(application(spec("front", version="v2"), name="default"))
    for name, app in (("before", ""), ("after", ""), ("front", "default")):
        assert view_deployment(loop.checkpoint, name).application == app
        assert loop.running(f"default/{name}")
    loop.done(DeleteApplication(name="default"))
    assert loop.running("default/before")
    assert loop.running("default/after")
    assert not loop.running("default/front")


def test_an_application_has_a_limited_number_of_deployments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(applications, "DEPLOYMENTS_MAX", 1)
    with pytest.raises(LimitReached):
        loop_of().command(application(spec("a"), spec("b")))


def test_a_dropped_deployment_that_another_endpoint_uses_is_named() -> None:
    loop = loop_of()
    loop.done(application(spec("front"), spec("model")))
    loop.done(create_endpoint("e", **{"app/model": 1.0}))
    with pytest.raises(Conflict, match="'app/model' is used by the endpoint 'default/e'"):
        loop.command(application(spec("front")))
    with pytest.raises(Conflict, match="'app/model' is used by the endpoint 'default/e'"):
        loop.command(DeleteApplication(name="app"))


# -- parts of it -------------------------------------------------------------------------------------------------------


def test_a_deployment_of_an_application_may_be_deployed_by_itself() -> None:
    loop = loop_of()
    loop.done(application(spec("front"), spec("model")))
    loop.done(deploy("app/model", version="v2"))
    assert versions(loop) == {"app/front": "v1", "app/model": "v2"}
    assert view_deployment(loop.checkpoint, "app/model").application == "app"
    assert shown(loop).deployments == ["app/front", "app/model"]


def test_a_change_of_one_part_while_the_whole_is_pending_becomes_a_goal_of_the_whole() -> None:
    loop = loop_of()
    first = loop.ask(application(spec("front"), spec("model")))
    second = loop.ask(UpdateBackendConfig(backend_tag="app/model", config={"num_replicas": 3}))
    assert loop.goal_status(first.goal_id) is GoalStatus.SUPERSEDED
    assert loop.goal(second.goal_id).subject == "app"
    loop.settle()
    assert loop.goal_status(second.goal_id) is GoalStatus.SUCCEEDED
    assert (len(loop.running("app/front")), len(loop.running("app/model"))) == (1, 3)


def test_a_deployment_that_is_deployed_under_its_name_joins_it_and_leaves_with_it() -> None:
    loop = loop_of()
    loop.done(application(spec("front")))
    loop.done(deploy("app/extra"))
    assert shown(loop).deployments == ["app/extra", "app/front"]
    loop.done(DeleteDeployment(name="app/extra"))
    assert shown(loop).deployments == ["app/front"]
    loop.done(deploy("app/extra"))
    loop.done(application(spec("front")))
    assert shown(loop).deployments == ["app/front"], "and is dropped like any other"
    assert loop.running("app/extra") == set()


def test_the_ingress_is_not_deleted_alone() -> None:
    loop = loop_of()
    loop.done(application(spec("front"), spec("model")))
    with pytest.raises(
        Conflict, match="'app/front' is the ingress of the application 'app'; delete the application"
    ):
        loop.command(DeleteDeployment(name="app/front"))
    loop.done(DeleteDeployment(name="app/model"))
    loop.done(DeleteDeployment(name="app/front"))
    assert view_applications(loop.checkpoint) == []


def test_one_deployment_of_an_application_may_be_rolled_back() -> None:
    loop = loop_of()
    loop.done(application(spec("front"), spec("model")))
    loop.done(application(spec("front"), spec("model", version="v2")))
    loop.done(Rollback(name="app/model"))
    assert versions(loop) == {"app/front": "v1", "app/model": "v1"}


# -- delete ------------------------------------------------------------------------------------------------------------


def test_a_deleted_application_leaves_nothing() -> None:
    loop = loop_of()
    loop.done(application(spec("front"), spec("model", num=2), route="/shop"))
    loop.done(deploy("other"))
    goal_id = loop.ask(DeleteApplication(name="app")).goal_id
    assert shown(loop).status is DeploymentStatus.DELETING
    loop.settle()
    assert loop.goal_status(goal_id) is GoalStatus.SUCCEEDED
    assert view_applications(loop.checkpoint) == []
    assert versions(loop) == {"default/other": "v1"}
    assert {d.name for d in view_deployments(loop.checkpoint, include_deleted=True)} == {
        "app/front",
        "app/model",
        "default/other",
    }
    check_converged(loop)


def test_deleting_an_unknown_application_or_one_that_goes_already_is_a_success() -> None:
    loop = loop_of()
    nobody = loop.ask(DeleteApplication(name="nobody"))
    assert (nobody.goal_id, nobody.updating) == (None, False)
    loop.done(application(spec("front")))
    first = loop.ask(DeleteApplication(name="app"))
    again = loop.command(DeleteApplication(name="app"))
    assert (again.reply.goal_id, bool(again.changes)) == (first.goal_id, False)


def test_deploying_it_again_while_it_goes_brings_all_of_it_back() -> None:
    loop = loop_of()
    command = application(spec("front"), spec("model"), route="/shop")
    loop.done(command)
    deleted = loop.ask(DeleteApplication(name="app"))
    loop.step()
    again = loop.ask(command)
    assert loop.goal_status(deleted.goal_id) is GoalStatus.SUPERSEDED
    loop.settle()
    assert loop.goal_status(again.goal_id) is GoalStatus.SUCCEEDED
    assert shown(loop).status is DeploymentStatus.HEALTHY
    check_converged(loop)


# -- builds that failed ------------------------------------------------------------------------------------------------


def failure(name: str = "app", error: str = "Traceback\nValueError: no weights") -> RecordBuildFailure:
    return RecordBuildFailure(name=name, error=error, app_config={"import_path": "a:b"})


def test_an_application_that_was_never_built_is_shown_with_its_error_until_it_is_deployed() -> None:
    loop = loop_of()
    reply = loop.ask(failure())
    assert loop.goal_status(reply.goal_id) is GoalStatus.FAILED
    view = shown(loop)
    assert (view.name, view.status, view.goal_status) == (
        "app",
        DeploymentStatus.UNHEALTHY,
        GoalStatus.FAILED,
    )
    assert (view.build_error, view.app_config) == (failure().error, {"import_path": "a:b"})
    assert (view.deployments, view.route_prefix, view.goal_id) == ([], None, reply.goal_id)
    assert view.deployed_at == loop.checkpoint.goals[view.goal_id].created_at
    check_converged(loop)
    loop.done(application(spec("front"), route="/shop"))
    assert (shown(loop).build_error, shown(loop).status) == ("", DeploymentStatus.HEALTHY)
    assert not loop.checkpoint.build_failures
    check_converged(loop)


def test_a_build_that_fails_leaves_what_runs_and_the_same_deploy_again_only_clears_it() -> None:
    loop = loop_of()
    command = application(spec("front"), spec("model"), route="/shop")
    loop.done(command)
    before = loop.checkpoint
    loop.ask(failure())
    loop.settle()
    after = loop.checkpoint
    assert (after.backends, after.endpoints, after.replicas) == (
        before.backends,
        before.endpoints,
        before.replicas,
    )
    view = shown(loop)
    assert (view.status, view.goal_status) == (DeploymentStatus.HEALTHY, GoalStatus.FAILED)
    assert view.message == f"the last change failed: {failure().error}"
    assert (view.route_prefix, view.deployments) == ("/shop", ["app/front", "app/model"])
    assert forecast(after, after.applied(loop.command(command).changes), loop.observed, 0.0).updating
    again = loop.ask(command)
    assert not again.updating
    assert (shown(loop).build_error, shown(loop).goal_status) == ("", GoalStatus.SUCCEEDED)
    assert loop.checkpoint.backends == before.backends
    check_converged(loop)


def test_a_build_that_fails_during_a_deploy_leaves_that_deploy_alone() -> None:
    loop = loop_of()
    goal_id = loop.ask(application(spec("front"))).goal_id
    loop.ask(failure())
    assert loop.goal_status(goal_id) is GoalStatus.PENDING
    loop.settle()
    assert loop.goal_status(goal_id) is GoalStatus.SUCCEEDED
    assert shown(loop).build_error == failure().error


def test_the_same_failure_again_is_nothing_to_do_and_another_replaces_it() -> None:
    loop = loop_of()
    first = loop.ask(failure())
    again = loop.command(failure())
    assert (again.reply.goal_id, again.reply.updating, bool(again.changes)) == (first.goal_id, False, False)
    second = loop.ask(failure(error="x" * 9_000 + "the end"))
    assert second.goal_id != first.goal_id
    assert len(shown(loop).build_error) == 8_000
    assert shown(loop).build_error.endswith("the end")


@pytest.mark.parametrize("is_running", [False, True])
def test_deleting_an_application_deletes_its_failure(is_running: bool) -> None:
    loop = loop_of()
    if is_running:
        loop.done(application(spec("front")))
    loop.ask(failure())
    assert loop.ask(DeleteApplication(name="app")).updating
    if is_running:
        loop.ask(failure())
        assert loop.ask(DeleteApplication(name="app")).updating
    loop.settle()
    assert view_applications(loop.checkpoint) == []
    assert not loop.checkpoint.build_failures
    check_converged(loop)


def test_a_restore_deletes_failures() -> None:
    loop = loop_of()
    loop.done(application(spec("front")))
    saved = loop.checkpoint
    loop.ask(failure())
    loop.ask(failure("another"))
    loop.command(RestoreFrom(saved=saved, summary=""))
    loop.settle()
    assert (shown(loop).name, shown(loop).build_error) == ("app", "")
    assert not loop.checkpoint.build_failures


def test_a_shutdown_deletes_failures() -> None:
    loop = loop_of()
    loop.ask(failure())
    loop.command(Shutdown(confirm="everything"))
    assert view_applications(loop.checkpoint) == []


def test_failures_are_bounded_and_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = loop_of()
    monkeypatch.setattr(applications, "BUILD_FAILURES_MAX", 1)
    loop.ask(failure())
    loop.ask(failure(error="another"))
    for command, error, text in (
        (failure("other"), LimitReached, "1 applications could not be built already"),
        (failure("a/b"), BadField, "^name: "),
        (failure(error=" "), BadField, "^error: must not be empty"),
        (
            RecordBuildFailure(name="app", error="x", app_config={"a": "b" * 70_000}),
            LimitReached,
            "app_config",
        ),
    ):
        with pytest.raises(error, match=text):
            loop.command(command)


# An application's ingress changes and keeps its route: nobody is ever without it, and what fails leaves it.


FRONT, MODEL = "app/front", "app/model"


@pytest.fixture
def loop() -> Loop:
    """An application whose route leads to ``front``."""
    loop = Loop(PureHost("host-1", cpus=16))
    loop.done(application(spec("front"), spec("model"), route="/shop"))
    return loop


def holders(bucket: dict[str, Snapshot]) -> set[str]:
    contents = [snapshot.content for snapshot in bucket.values()]
    return {c.endpoint_tag for c in contents if isinstance(c, EndpointSnapshot) and c.route == "/shop"}


def follow(loop: Loop, steps: int = 60) -> list[set[str]]:
    """Whom the route leads to after each single value that was published, as far as it changes."""
    bucket, seen = dict(loop.bucket), [holders(loop.bucket)]
    for _ in range(steps):
        for action in loop.step(0.1).actions:
            if isinstance(action, PublishSnapshot):
                bucket[action.key] = action.snapshot
                if holders(bucket) != seen[-1]:
                    seen.append(holders(bucket))
    return seen


def other_ingress(version: str = "v1", **options: str) -> DeployApplication:
    return application(
        spec("front", version=version),
        spec("model", version=version),
        ingress="model",
        route="/shop",
        **options,
    )


def test_the_route_moves_to_another_deployment_and_is_never_missing(loop: Loop) -> None:
    goal_id = loop.ask(other_ingress()).goal_id
    assert follow(loop) == [{FRONT}, {FRONT, MODEL}, {MODEL}]
    assert loop.goal_status(goal_id) is GoalStatus.SUCCEEDED
    (view,) = view_applications(loop.checkpoint)
    assert (view.ingress, view.route_prefix) == (MODEL, "/shop")
    assert not loop.command(other_ingress()).changes, "the same again is nothing to do"


def test_the_route_waits_until_a_new_ingress_serves_and_the_old_one_goes_after_it(loop: Loop) -> None:
    loop.hosts[0].hangs_in_starting = True
    command = application(spec("door"), spec("model"), route="/shop")
    goal_id = loop.ask(command).goal_id
    assert follow(loop, 10) == [{FRONT}]
    assert not loop.command(command).changes, "it is under way"
    (view,) = view_applications(loop.checkpoint)
    assert (view.ingress, view.route_prefix) == ("app/door", "/shop")
    loop.hosts[0].hangs_in_starting = False
    loop.hosts[0].held.clear()
    loop.hosts[0].spent.clear()
    assert follow(loop, 200) == [{FRONT}, {FRONT, "app/door"}, {"app/door"}]
    loop.settle()
    assert loop.goal_status(goal_id) is GoalStatus.SUCCEEDED
    assert loop.running(FRONT) == set()
    check_converged(loop)


def test_an_update_that_fails_leaves_the_route_where_it_was(loop: Loop) -> None:
    command = application(spec("door", code=BAD_CODE, retries=1), spec("model", version="v2"), route="/shop")
    goal_id = loop.ask(command).goal_id
    assert follow(loop) == [{FRONT}]
    loop.settle()
    assert loop.goal_status(goal_id) is GoalStatus.FAILED
    (view,) = view_applications(loop.checkpoint)
    assert (view.ingress, view.route_prefix, view.deployments) == (FRONT, "/shop", [FRONT, MODEL])
    check_converged(loop)


def test_a_failure_after_the_route_moved_brings_it_back(loop: Loop) -> None:
    loop.ask(other_ingress())
    while holders(loop.bucket) == {FRONT}:
        loop.step()
    loop.are_proxies_slow = True
    failed = loop.ask(
        application(
            spec("front"),
            spec("model", version="v3", code=BAD_CODE, retries=1),
            ingress="model",
            route="/shop",
        )
    )
    loop.steps(5)
    loop.are_proxies_slow = False
    loop.settle()
    assert loop.goal_status(failed.goal_id) is GoalStatus.FAILED
    assert holders(loop.bucket) == {FRONT}
    check_converged(loop)


def test_it_can_be_called_off_by_deploying_the_application_as_it_was(loop: Loop) -> None:
    loop.hosts[0].hangs_in_starting = True
    loop.ask(other_ingress("v2"))
    loop.steps(3)
    loop.hosts[0].hangs_in_starting = False
    loop.done(application(spec("front"), spec("model"), route="/shop"))
    assert holders(loop.bucket) == {FRONT}


def test_meanwhile_neither_of_the_two_is_changed_by_itself(loop: Loop) -> None:
    loop.hosts[0].hangs_in_starting = True
    goal_id = loop.ask(other_ingress("v2")).goal_id
    for command in (
        deploy(FRONT, route="/shop"),
        deploy(MODEL),
        Rollback(name=MODEL, to=1),
        DeleteDeployment(name=FRONT),
    ):
        with pytest.raises(Conflict, match=f"is being moved to 'app/model' by {goal_id}"):
            loop.command(command)


def test_the_route_of_another_one_is_still_refused(loop: Loop) -> None:
    loop.done(create_endpoint("e", route="/else", **{MODEL: 1.0}))
    with pytest.raises(Conflict, match="default/e"):
        loop.command(application(spec("front"), spec("model"), ingress="model", route="/else"))
    with pytest.raises(Conflict, match=FRONT):
        loop.command(application(spec("a"), name="other", route="/shop"))


def test_deployments_that_become_an_application_hand_over_a_route_too() -> None:
    loop = Loop(PureHost("host-1", cpus=16))
    loop.done(deploy(FRONT, route="/shop"))
    loop.done(deploy(MODEL))
    loop.ask(other_ingress())
    assert follow(loop)[-1] == {MODEL}


def test_a_plan_says_when_the_route_moves(loop: Loop) -> None:
    before = loop.checkpoint
    plan = forecast(before, before.applied(loop.command(other_ingress()).changes), loop.observed, loop.now)
    assert plan.notes == ["the application app changes: its route leads to app/model once all of it runs"]

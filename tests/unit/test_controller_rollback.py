"""`rollback`: a deployment or backend becomes again what it was."""

from __future__ import annotations

import pytest

from serve_common.api.commands import DeleteBackend, DeleteDeployment, Rollback, UpdateBackendConfig
from serve_common.api.views import GoalStatus
from serve_common.errors import BadField, Conflict, NotFound
from serve_controller.core.goals import progress as succeeding
from serve_controller.core.views import view_deployment, view_revisions
from tests.simulation.closed_loop import Loop, check_converged
from tests.simulation.orders import BAD_CODE, create_backend, deploy
from tests.simulation.pure_host import PureHost


@pytest.fixture
def loop() -> Loop:
    """A deployment that was v1, then v2, and is v3."""
    loop = Loop(PureHost("host-1", cpus=8))
    for number in (1, 2, 3):
        loop.done(deploy(version=f"v{number}", code=f"m:V{number}", config=f"c{number}", route=f"/r{number}"))
    return loop


def now(loop: Loop) -> tuple[str | None, str, object, str | None]:
    view = view_deployment(loop.checkpoint, "a")
    config = view.backend_config.user_config
    return view.version, view.replica_config.import_path, config, view.route_prefix


def test_without_a_target_it_goes_to_what_last_succeeded_before_the_present(loop: Loop) -> None:
    loop.done(Rollback(name="a"))
    assert now(loop) == ("v2", "m:V2", "c2", "/r2")
    assert loop.user_configs() == ["c2"]
    check_converged(loop)


def test_it_goes_to_a_version_by_its_name(loop: Loop) -> None:
    loop.done(Rollback(name="a", to="v1"))
    assert now(loop) == ("v1", "m:V1", "c1", "/r1")


def test_it_goes_to_a_revision_by_its_number(loop: Loop) -> None:
    numbers = {r.version: r.revision for r in view_revisions(loop.checkpoint, "a")}
    loop.done(Rollback(name="a", to=numbers["v2"]))
    assert now(loop) == ("v2", "m:V2", "c2", "/r2")


def test_a_failed_version_is_never_gone_to(loop: Loop) -> None:
    failed = loop.ask(deploy(version="v4", code=BAD_CODE, route="/r4"))
    loop.settle()
    assert loop.goal_status(failed.goal_id) is GoalStatus.FAILED
    assert "v4" not in {r.version for r in view_revisions(loop.checkpoint, "a")}
    loop.done(Rollback(name="a"))
    assert now(loop)[0] == "v2", "v3 was put back by the failure: before it was v2"


def test_a_bad_update_under_way_is_rolled_back_without_waiting_for_its_end(loop: Loop) -> None:
    before = loop.running()
    pending = loop.ask(deploy(version="v4", code=BAD_CODE, retries=100, config="c3", route="/r3"))
    loop.steps(5)
    back = loop.ask(Rollback(name="a"))
    assert loop.goal_status(pending.goal_id) is GoalStatus.SUPERSEDED
    loop.settle()
    assert loop.goal_status(back.goal_id) is GoalStatus.SUCCEEDED
    assert now(loop)[0] == "v3"
    assert len(loop.running()) == len(before)


def test_the_number_of_replicas_stays_as_it_is(loop: Loop) -> None:
    """Who rolls back a bad version at night, after having scaled up for the load, must not be scaled down with it."""
    loop.done(UpdateBackendConfig(backend_tag="a", config={"num_replicas": 4}))
    loop.done(Rollback(name="a", to="v1"))
    assert now(loop)[0] == "v1"
    assert len(loop.running()) == 4


def test_scaling_alone_is_no_version_to_go_back_from(loop: Loop) -> None:
    loop.done(UpdateBackendConfig(backend_tag="a", config={"num_replicas": 4}))
    loop.done(Rollback(name="a"))
    assert now(loop)[0] == "v2"


def test_a_changed_user_config_is_rolled_back_in_place() -> None:
    loop = Loop()
    loop.done(deploy(config="one"))
    loop.done(deploy(config="two"))
    before = loop.running()
    loop.done(Rollback(name="a"))
    assert loop.user_configs() == ["one"]
    assert loop.running() == before


def test_an_unversioned_deployment_is_rolled_back_by_new_replicas() -> None:
    """Other files may have stood under the same import path."""
    loop = Loop()
    loop.done(deploy(version=None, config="one"))
    loop.done(deploy(version=None, config="two"))
    before = loop.running()
    loop.done(Rollback(name="a"))
    assert loop.user_configs() == ["one"]
    assert not before & loop.running()


def test_a_rollback_is_rolled_back_by_another(loop: Loop) -> None:
    loop.done(Rollback(name="a"))
    loop.done(Rollback(name="a"))
    assert now(loop)[0] == "v3"


def test_a_retry_of_a_rollback_does_not_go_back_twice(loop: Loop) -> None:
    first = loop.ask(Rollback(name="a", request_id="r1"))
    assert loop.ask(Rollback(name="a", request_id="r1")) == first
    loop.settle()
    assert not loop.command(Rollback(name="a", request_id="r1")).changes
    assert now(loop)[0] == "v2"


def test_going_to_where_it_is_already_is_nothing_to_do(loop: Loop) -> None:
    accepted = loop.command(Rollback(name="a", to="v3"))
    assert (accepted.reply.updating, bool(accepted.changes)) == (False, False)


def test_a_backend_by_itself_is_rolled_back_too() -> None:
    loop = Loop()
    loop.done(create_backend("b", code="m:Old"))
    loop.done(create_backend("b", code="m:New"))
    loop.done(Rollback(name="b"))
    assert loop.backend("default/b").target.replica_config.import_path == "m:Old"
    assert not loop.checkpoint.endpoints
    check_converged(loop)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (Rollback(name="nobody"), "there is no deployment or backend 'nobody'"),
        (
            Rollback(name="a", to="v9"),
            r"'default/a' has no revision 'v9'; it has 3 \(v3\), 2 \(v2\), 1 \(v1\)",
        ),
        (Rollback(name="a", to=99), "has no revision 99"),
    ],
    ids=["name", "version", "number"],
)
def test_what_is_unknown_is_not_found_and_what_there_is_is_named(
    loop: Loop, command: Rollback, message: str
) -> None:
    with pytest.raises(NotFound, match=message):
        loop.command(command)


def test_with_no_earlier_version_there_is_nothing_to_go_to() -> None:
    loop = Loop()
    loop.done(deploy())
    with pytest.raises(NotFound, match="has no earlier version that succeeded"):
        loop.command(Rollback(name="a"))
    with pytest.raises(BadField):
        loop.command(Rollback(name="a/b/c"))


def test_what_is_deleted_is_not_rolled_back(loop: Loop) -> None:
    loop.command(DeleteDeployment(name="a"))
    with pytest.raises(NotFound):
        loop.command(Rollback(name="a"))
    loop.settle()
    with pytest.raises(NotFound):
        loop.command(Rollback(name="a"))


def test_a_route_that_somebody_else_has_by_now_is_refused(loop: Loop) -> None:
    loop.done(deploy("b", route="/r2"))
    with pytest.raises(Conflict, match="to: '/r2' belongs to the endpoint 'default/b'"):
        loop.command(Rollback(name="a", to="v2"))


def test_revisions_are_remembered_within_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(succeeding, "REVISIONS_MAX", 3)
    loop = Loop()
    for number in range(6):
        loop.done(create_backend("b", num=0, code=f"m:V{number}"))
    assert [r.import_path for r in view_revisions(loop.checkpoint, "b")] == ["m:V5", "m:V4", "m:V3"]
    loop.done(DeleteBackend(backend_tag="b"))
    assert not loop.checkpoint.revisions

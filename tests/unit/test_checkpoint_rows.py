"""The rows' format: what was ever written is read, and what cannot be understood is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from serve_common.api.views import GoalStatus
from serve_common.config.backend import CircuitBreaker, ReplicaPolicyName
from serve_common.config.endpoint import EndpointOptions
from serve_common.errors import CheckpointUnreadable
from serve_common.names import BackendTag, EndpointTag, GoalId, HostId, ReplicaTag
from serve_common.protocol.snapshots import BackendProtection, BackendSnapshot, EndpointSnapshot, Snapshot
from serve_controller.adapters.checkpoint_rows import (
    KINDS_V1,
    SCHEMA_VERSION,
    Row,
    dump,
    dump_changes,
    load,
    load_checkpoint,
    load_rows,
)
from serve_controller.core.objects import (
    Backend,
    Counters,
    Deployment,
    EndpointConfig,
    EndpointRecord,
    Goal,
    GoalKind,
    HostRecord,
    ObjectChanges,
    ObjectKind,
    Replica,
    Revision,
    key_of,
)
from serve_controller.core.placement import estimate_goal_bytes, resource_needs
from serve_controller.core.snapshots import derive_endpoint

EXAMPLES = Path(__file__).parents[1] / "data" / "checkpoints"


def example_rows(version: int) -> list[Row]:
    rows: list[dict[str, Any]] = json.loads((EXAMPLES / f"v{version}.json").read_text(encoding="utf-8"))
    return [Row(row["kind"], row["key"], row["schema_version"], json.dumps(row["value"])) for row in rows]


def goal(error: str) -> Goal:
    return Goal(
        goal_id=GoalId("g1"),
        kind=GoalKind.DEPLOY,
        subject="default/a",
        owns=["backends.default.a"],
        status=GoalStatus.FAILED,
        created_at=1.0,
        error=error,
    )


HOST = dump(HostRecord(host_id=HostId("h1"), generation=3))


TAG = BackendTag("default/digits")
KINDS = {1: set(KINDS_V1), **{version: set(ObjectKind) for version in range(2, SCHEMA_VERSION + 1)}}


@pytest.mark.parametrize("version", range(1, SCHEMA_VERSION + 1))
def test_rows_of_every_version_ever_written_are_read(version):
    rows = example_rows(version)
    assert {row.kind for row in rows} == {kind.value for kind in KINDS[version]}, "an example of each kind"
    assert {row.schema_version for row in rows} == {version}
    loaded = load_rows(rows)
    keys = {(kind.value, key) for kind, key in map(key_of, loaded.checkpoint.all_objects())}
    assert keys >= {(row.kind, row.key) for row in rows}


def test_rows_of_the_current_version_are_read_as_they_are():
    loaded = load_rows(example_rows(SCHEMA_VERSION))
    assert loaded.upgraded == ()
    assert len(list(loaded.checkpoint.all_objects())) == len(example_rows(SCHEMA_VERSION))


def test_rows_of_version_2_mean_the_defaults_of_what_they_do_not_say_and_need_not_be_rewritten():
    loaded = load_rows(example_rows(2))
    assert loaded.upgraded == ()
    checkpoint = loaded.checkpoint
    config = checkpoint.backends[TAG].target.backend_config
    assert config.circuit_breaker == CircuitBreaker()
    assert (config.replica_policy, config.retry_budget_percent) == (
        ReplicaPolicyName.POWER_OF_TWO_CHOICES,
        20.0,
    )
    endpoint = checkpoint.endpoints[EndpointTag(TAG)]
    assert (endpoint.target.options, endpoint.set_alone) == (EndpointOptions(), [])
    assert all(replica.companions == {} for replica in checkpoint.replicas[TAG].values())
    revision = checkpoint.revisions[TAG][4]
    assert revision.endpoint is not None
    assert revision.endpoint.options == EndpointOptions()


def test_what_was_published_before_endpoints_had_options_is_not_published_again():
    checkpoint = load_checkpoint(example_rows(2))
    for key, record in checkpoint.snapshots.items():
        old = json.loads(next(row for row in example_rows(2) if row.key == key).value)["snapshot"]
        read = msgspec.json.decode(json.dumps(old), type=Snapshot)
        assert read == record.snapshot, "what is in the bucket since then"
        content = read.content
        if isinstance(content, BackendSnapshot):
            assert (content.protection, content.code_versions) == (BackendProtection(), {})
        if isinstance(content, EndpointSnapshot):
            assert content.options == EndpointOptions()
            assert derive_endpoint(endpoint_like(content)) == content


def endpoint_like(content):
    config = EndpointConfig(
        route=content.route, methods=content.methods, traffic=content.traffic, shadows=content.shadows
    )
    return EndpointRecord(endpoint_tag=content.endpoint_tag, target=config, last_good=None)


def test_a_version_1_goal_owns_the_backend_and_the_endpoint_of_its_deployment():
    loaded = load_checkpoint(example_rows(1)).goals[GoalId("g7")]
    assert loaded == Goal(
        goal_id=GoalId("g7"),
        kind=GoalKind.DEPLOY,
        subject=TAG,
        owns=["backends.default.digits", "endpoints.default.digits"],
        status=GoalStatus.FAILED,
        created_at=1763700000.0,
        request_id="r-1",
        error="Traceback",
        finished_at=1763700009.75,
    )


def test_a_version_1_replica_takes_what_its_version_of_the_backend_needs():
    checkpoint = load_checkpoint(example_rows(1))
    backend, replica = checkpoint.backends[TAG], checkpoint.replicas[TAG][ReplicaTag("default/digits#4")]
    assert replica.needs == resource_needs(backend.target)
    assert replica.needs["CPU"] == 0.5
    assert replica.goal_bytes == estimate_goal_bytes(backend.target) > 0
    assert checkpoint.load_of(HostId("host-1")).goal_bytes == replica.goal_bytes


def test_a_version_1_replica_of_an_older_version_takes_what_that_one_needs():
    rows = [changed(row, config_version=8) if row.kind == "replica" else row for row in example_rows(1)]
    rows = [with_last_good_cpus(row, 3.0) if row.kind == "backend" else row for row in rows]
    replica = load_checkpoint(rows).replicas[TAG][ReplicaTag("default/digits#4")]
    assert replica.needs["CPU"] == 3.0


def test_a_version_1_replica_without_its_backend_is_read_too():
    rows = [row for row in example_rows(1) if row.kind != "backend"]
    assert load_checkpoint(rows).replicas[TAG][ReplicaTag("default/digits#4")].needs == {}


def test_every_version_1_backend_was_a_deployment_since_its_first_goal():
    goal_row = next(row for row in example_rows(1) if row.kind == "goal")
    older = msgspec.structs.replace(
        changed(goal_row, goal_id="g2", created_at=5.5, request_id=None), key="g2"
    )
    assert load_checkpoint(example_rows(1)).deployments[TAG] == Deployment(tag=TAG, started_at=1763700000.0)
    assert load_checkpoint([*example_rows(1), older]).deployments[TAG].started_at == 5.5


def test_what_a_version_1_goal_made_can_be_rolled_back_to():
    rows = [changed(row, status="succeeded") if row.kind == "goal" else row for row in example_rows(1)]
    checkpoint = load_checkpoint(rows)
    backend = checkpoint.backends[TAG]
    assert backend.last_good is not None
    assert checkpoint.revisions[TAG][1] == Revision(
        backend_tag=TAG,
        revision=1,
        at=1763700009.75,
        goal_id=GoalId("g7"),
        version=backend.last_good,
        endpoint=checkpoint.endpoints[EndpointTag(TAG)].last_good,
    )
    assert backend.newest_revision == 1
    assert TAG not in load_checkpoint(example_rows(1)).revisions, "its goal failed"


def test_what_was_upgraded_is_written_with_the_next_change_and_then_current():
    loaded = load_rows(example_rows(1))
    assert {type(value) for value in loaded.upgraded} >= {Backend, Deployment, Goal, Replica}
    newer = HostRecord(host_id=HostId("host-1"), generation=13)
    gone = (ObjectKind.GOAL, "g7")
    written = dump_changes(ObjectChanges(puts=(newer,), deletes=(gone,)), loaded.upgraded)
    assert dump(newer) in written.puts
    assert [row for row in written.puts if row.kind == "goal"] == []
    again = load_rows(written.puts)
    assert again.upgraded == ()
    changes = ObjectChanges(puts=(newer,), deletes=(gone,))
    assert objects_of(again.checkpoint) == objects_of(loaded.checkpoint.applied(changes))


def test_a_version_1_row_beside_what_was_already_written_of_it_makes_nothing_twice():
    ended = Deployment(tag=TAG, started_at=1.0, ended_at=2.0)
    assert load_checkpoint([*example_rows(1), dump(ended)]).deployments[TAG] == ended


def test_a_kind_that_version_1_did_not_have_is_refused_in_it():
    row = dump(Deployment(tag=TAG, started_at=1.0))
    with pytest.raises(CheckpointUnreadable, match=r"row deployment 'default/digits': .*no such kind"):
        load(msgspec.structs.replace(row, schema_version=1))


def objects_of(checkpoint):
    return {key_of(value): value for value in checkpoint.all_objects()}


def changed(row, **fields):
    return msgspec.structs.replace(row, value=json.dumps({**json.loads(row.value), **fields}))


def with_last_good_cpus(row, cpus):
    last_good = json.loads(row.value)["last_good"]
    last_good["replica_config"]["ray_actor_options"]["num_cpus"] = cpus
    return changed(row, last_good=last_good)


def test_the_examples_show_the_current_format_to_the_letter():
    for row in example_rows(SCHEMA_VERSION):
        assert msgspec.json.decode(dump(load(row)).value) == json.loads(row.value), (
            f"the shape of {row.kind!r} changed: raise SCHEMA_VERSION, keep reading v{SCHEMA_VERSION} rows, and add "
            f"tests/data/checkpoints/v{SCHEMA_VERSION + 1}.json"
        )


@pytest.mark.parametrize("version", [SCHEMA_VERSION + 1, 0, -1])
def test_a_row_of_an_unknown_schema_version_is_refused(version):
    with pytest.raises(CheckpointUnreadable, match=rf"host 'h1'.*schema_version is {version}\b"):
        load(msgspec.structs.replace(HOST, schema_version=version))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"kind": "moon"}, "row moon 'h1': .*no such kind"),
        ({"value": '{"host_id":"h1"}'}, "row host 'h1': .*missing required field `generation`"),
        ({"value": '{"host_id":"h1","generation":"x"}'}, r"row host 'h1': .*Expected `int`.*\$\.generation"),
        ({"value": "{"}, "row host 'h1': .*truncated"),
        ({"value": "[" * 100_000}, "row host 'h1': "),
        ({"key": "h2"}, "row host 'h2': it holds the object 'h1'"),
    ],
)
def test_an_unreadable_row_is_refused_with_its_kind_key_and_reason(change, reason):
    with pytest.raises(CheckpointUnreadable, match=reason):
        load(msgspec.structs.replace(HOST, **change))


def test_one_unreadable_row_refuses_the_whole_checkpoint():
    with pytest.raises(CheckpointUnreadable, match="'h1'"):
        load_checkpoint([dump(Counters(goal=1)), msgspec.structs.replace(HOST, schema_version=99)])


def test_a_nul_in_a_text_comes_back():
    row = dump(goal("Traceback: \0 was here"))
    assert "\0" not in row.value
    assert load(row) == goal("Traceback: \0 was here")


def test_a_lone_surrogate_is_shown_as_an_escape_because_no_json_can_hold_it():
    row = dump(goal("cannot open \udcff.py ü"))
    assert load(row) == goal("cannot open \\udcff.py ü")


def test_changes_become_rows_that_name_each_key_once():
    old, new = HostRecord(host_id=HostId("h1"), generation=1), HostRecord(host_id=HostId("h1"), generation=2)
    gone = HostRecord(host_id=HostId("h2"), generation=1)
    changes = ObjectChanges(puts=(old, gone, new), deletes=((ObjectKind.HOST, "h2"), (ObjectKind.HOST, "h2")))
    rows = dump_changes(changes)
    assert rows.puts == (dump(new),)
    assert rows.deletes == (("host", "h2"),)

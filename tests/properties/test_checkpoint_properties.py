"""What must hold for every checkpoint: rows lose nothing, and changes are exactly the difference."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from serve_common.names import BackendTag, EndpointTag, GoalId, HostId, ProxyId, replica_tag
from serve_common.values import BackendConfig, RayActorOptions, ReplicaConfig
from serve_common.wires.snapshots import BackendSnapshot, EndpointSnapshot, Snapshot
from serve_common.wires.views import GoalStatus
from serve_controller.adapters.checkpoint_rows import dump, dump_changes, load, load_checkpoint
from serve_controller.core.checkpoint import COUNTERS_KEY, Changes, Checkpoint, Draft, key_of
from serve_controller.core.objects import (
    Backend,
    BackendVersion,
    CheckpointObject,
    Counters,
    Endpoint,
    EndpointConfig,
    Goal,
    GoalKind,
    HostRecord,
    ProxyRecord,
    Replica,
    ReplicaState,
    SnapshotRecord,
)

counts = st.integers(0, 2**53)
reals = st.floats(allow_nan=False, allow_infinity=False)
times = st.floats(0, 4e9)
texts = st.text(max_size=20)
backend_tags = st.sampled_from(["default/a", "default/b", "shop/a"]).map(BackendTag)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | reals | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)

replica_configs = st.builds(
    ReplicaConfig,
    import_path=texts,
    app_dir=texts,
    init_args=st.lists(json_values, max_size=2),
    init_kwargs=st.dictionaries(texts, json_values, max_size=2),
    ray_actor_options=st.builds(
        RayActorOptions,
        num_cpus=reals,
        resources=st.dictionaries(texts, reals, max_size=2),
        runtime_env=st.dictionaries(texts, json_values, max_size=2),
    ),
)
versions = st.builds(
    BackendVersion,
    code_version=counts,
    config_version=counts,
    version=st.none() | texts,
    replica_config=replica_configs,
    backend_config=st.builds(BackendConfig, num_replicas=counts, user_config=json_values),
)
backends = st.builds(
    Backend,
    backend_tag=backend_tags,
    goal_id=texts.map(GoalId),
    target=versions,
    last_good=st.none() | versions,
    others=st.lists(versions, max_size=1),
    newest_code_version=counts,
    newest_config_version=counts,
    deleting=st.booleans(),
    halted=st.booleans(),
    start_failures=counts,
    last_error=texts,
    retry_at=times,
)
endpoint_configs = st.builds(
    EndpointConfig,
    route=st.none() | texts,
    methods=st.lists(texts, max_size=3),
    traffic=st.dictionaries(backend_tags, reals, max_size=3),
)
endpoints = st.builds(
    Endpoint,
    endpoint_tag=backend_tags.map(EndpointTag),
    target=endpoint_configs,
    last_good=st.none() | endpoint_configs,
)


@st.composite
def replicas(draw: st.DrawFn) -> Replica:
    backend_tag = draw(backend_tags)
    return Replica(
        replica_tag=replica_tag(backend_tag, draw(st.integers(1, 4))),
        backend_tag=backend_tag,
        code_version=draw(counts),
        config_version=draw(counts),
        state=draw(st.sampled_from(ReplicaState)),
        since=draw(times),
        host_id=draw(st.none() | texts.map(HostId)),
        generation=draw(counts),
        message=draw(texts),
    )


goals = st.builds(
    Goal,
    goal_id=st.sampled_from(["g1", "g2", "g3"]).map(GoalId),
    kind=st.sampled_from(GoalKind),
    backend_tag=backend_tags,
    status=st.sampled_from(GoalStatus),
    created_at=times,
    request_id=st.none() | texts,
    error=texts,
    finished_at=st.none() | times,
)
hosts = st.builds(HostRecord, host_id=st.sampled_from(["h1", "h2"]).map(HostId), generation=counts)
proxies = st.builds(ProxyRecord, proxy_id=st.sampled_from(["p1", "p2"]).map(ProxyId))
replica_tags = st.builds(replica_tag, backend_tags, st.integers(1, 4))
snapshots = st.builds(
    SnapshotRecord,
    key=st.sampled_from(["endpoint.a", "backend.a"]),
    snapshot=st.builds(
        Snapshot,
        snapshot_id=counts,
        epoch=counts,
        content=st.none()
        | st.builds(
            EndpointSnapshot,
            endpoint_tag=backend_tags.map(EndpointTag),
            route=st.none() | texts,
            methods=st.lists(texts, max_size=2),
            traffic=st.dictionaries(backend_tags, reals, max_size=2),
        )
        | st.builds(
            BackendSnapshot,
            backend_tag=backend_tags,
            replicas=st.lists(replica_tags, max_size=2),
            draining=st.lists(replica_tags, max_size=2),
            max_concurrent_queries=counts,
            max_queued_requests=counts,
        ),
    ),
)
counters = st.builds(Counters, goal=counts, ordinal=counts, generation=counts, snapshot=counts)
objects: st.SearchStrategy[CheckpointObject] = (
    backends | endpoints | replicas() | goals | hosts | proxies | snapshots | counters
)
few_objects = st.lists(objects, max_size=6)
steps = st.lists(st.tuples(st.sampled_from(["put", "delete"]), objects), max_size=8)


def checkpoint_of(values: list[CheckpointObject]) -> Checkpoint:
    return Checkpoint().applied(Changes(puts=tuple(values)))


def contents(checkpoint: Checkpoint) -> dict[object, object]:
    assert all(checkpoint.replicas.values()), "a backend without replicas has no entry"
    return {key_of(value): value for value in checkpoint.all_objects()}


def carry_out(draft: Draft, moves: list[tuple[str, CheckpointObject]]) -> None:
    for verb, value in moves:
        if verb == "put" or isinstance(value, Counters):
            draft.put(value)
        else:
            draft.delete(key_of(value))


@given(objects)
def test_an_object_comes_back_from_its_row_as_it_was(value):
    row = dump(value)
    row.value.encode("utf-8")
    assert "\0" not in row.value
    assert load(row) == value
    assert dump(load(row)) == row, "types too: 1, 1.0 and true are equal in Python"


@given(few_objects)
def test_a_checkpoint_comes_back_from_its_rows_as_it_was(values):
    checkpoint = checkpoint_of(values)
    assert contents(load_checkpoint(dump(value) for value in checkpoint.all_objects())) == contents(
        checkpoint
    )


@given(few_objects, steps)
def test_the_base_with_a_drafts_changes_is_the_drafts_checkpoint(values, moves):
    base = checkpoint_of(values)
    before = contents(base)
    draft = Draft(base)
    carry_out(draft, moves)
    changes = draft.changes()

    assert contents(base.applied(changes)) == contents(draft.checkpoint())
    assert contents(base) == before, "the base itself never changes"


@given(few_objects, steps)
def test_changes_name_only_what_differs_and_each_thing_once(values, moves):
    base = checkpoint_of(values)
    draft = Draft(base)
    carry_out(draft, moves)
    changes = draft.changes()
    after = contents(draft.checkpoint())
    before = contents(base)

    touched = [key_of(value) for value in changes.puts] + list(changes.deletes)
    assert len(touched) == len(set(touched))
    assert set(touched) == {key for key in {*before, *after} if before.get(key, None) != after.get(key, None)}


@given(few_objects)
def test_what_is_put_back_as_it_was_is_no_change(values):
    base = checkpoint_of(values)
    draft = Draft(base)
    for value in base.all_objects():
        if key_of(value) != COUNTERS_KEY:
            draft.delete(key_of(value))
        draft.put(msgspec.structs.replace(value))
    assert not draft.changes()


@given(few_objects, steps)
def test_rows_of_changes_make_of_the_rows_before_the_rows_after(values, moves):
    base = checkpoint_of(values)
    rows = {(row.kind, row.key): row for row in map(dump, base.all_objects())}
    draft = Draft(base)
    carry_out(draft, moves)

    written = dump_changes(draft.changes())
    rows.update({(row.kind, row.key): row for row in written.puts})
    for key in written.deletes:
        del rows[key]
    assert contents(load_checkpoint(rows.values())) == contents(draft.checkpoint())

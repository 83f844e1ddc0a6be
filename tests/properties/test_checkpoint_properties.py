"""What must hold for every checkpoint: rows lose nothing, and changes are exactly the difference."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from serve_common.api.views import GoalStatus
from serve_common.config.backend import (
    BackendConfig,
    HttpOptions,
    OnFailure,
    Placement,
    RayActorOptions,
    ReplicaConfig,
)
from serve_common.names import BackendTag, EndpointTag, GoalId, HostId, ProxyId, replica_tag
from serve_common.protocol.snapshots import BackendSnapshot, EndpointSnapshot, HttpSnapshot, Snapshot
from serve_controller.core.checkpoint import Checkpoint, Draft
from serve_controller.core.objects import (
    COUNTERS_KEY,
    Application,
    ApplicationVersion,
    Backend,
    BackendVersion,
    CheckpointObject,
    Counters,
    Deployment,
    EndpointConfig,
    EndpointRecord,
    Goal,
    GoalKind,
    HostRecord,
    HttpRecord,
    Key,
    ObjectChanges,
    ProxyRecord,
    Replica,
    ReplicaState,
    Revision,
    SnapshotRecord,
    get_key,
)
from serve_controller.shell.checkpoint_rows import dump, dump_changes, load, load_checkpoint

counts = st.integers(0, 2**53)
reals = st.floats(allow_nan=False, allow_infinity=False)
amounts = st.floats(0, 2.0**53)
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
    backend_config=st.builds(
        BackendConfig,
        num_replicas=counts,
        user_config=json_values,
        on_failure=st.sampled_from(OnFailure),
        placement=st.sampled_from(Placement),
        max_replicas_per_host=st.none() | counts,
    ),
)
backends = st.builds(
    Backend,
    backend_tag=backend_tags,
    goal_id=texts.map(GoalId),
    target=versions,
    last_good=st.none() | versions,
    retained=st.none() | versions,
    others=st.lists(versions, max_size=1),
    newest_revision=counts,
    force_kill=st.booleans(),
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
    route=st.none() | st.sampled_from(["/a", "/b"]) | texts,
    methods=st.lists(texts, max_size=3),
    traffic=st.dictionaries(backend_tags, reals, max_size=3),
    shadows=st.dictionaries(backend_tags, reals, max_size=2),
)
endpoints = st.builds(
    EndpointRecord,
    endpoint_tag=backend_tags.map(EndpointTag),
    target=endpoint_configs,
    last_good=st.none() | endpoint_configs,
    goal_id=texts.map(GoalId),
)
deployments = st.builds(
    Deployment,
    tag=backend_tags,
    application=texts,
    started_at=times,
    ended_at=st.none() | times,
    ended_as=st.none() | versions,
    ended_route=st.none() | texts,
)
application_versions = st.builds(
    ApplicationVersion, ingress=backend_tags, deployments=st.lists(backend_tags, max_size=3)
)
applications = st.builds(
    Application,
    name=st.sampled_from(["shop", "bank"]),
    goal_id=texts.map(GoalId),
    target=application_versions,
    last_good=st.none() | application_versions,
    deleting=st.booleans(),
)
revisions = st.builds(
    Revision,
    backend_tag=backend_tags,
    revision=st.integers(1, 3),
    at=times,
    goal_id=texts.map(GoalId),
    version=versions,
    endpoint=st.none() | endpoint_configs,
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
        host_id=draw(st.none() | st.sampled_from(["h1", "h2"]).map(HostId)),
        generation=draw(counts),
        message=draw(texts),
        needs=draw(st.dictionaries(st.sampled_from(["CPU", "GPU"]), st.floats(0, 1e6), max_size=2)),
        goal_bytes=draw(st.integers(0, 2**20)),
        force_kill=draw(st.booleans()),
    )


goals = st.builds(
    Goal,
    goal_id=st.sampled_from(["g1", "g2", "g3"]).map(GoalId),
    kind=st.sampled_from(GoalKind),
    subject=texts,
    owns=st.lists(st.sampled_from(["backends.a", "endpoints.a", "hosts.h1"]), unique=True, max_size=3),
    status=st.sampled_from(GoalStatus),
    created_at=times,
    request_id=st.none() | texts,
    error=texts,
    finished_at=st.none() | times,
)
hosts = st.builds(
    HostRecord,
    host_id=st.sampled_from(["h1", "h2"]).map(HostId),
    generation=counts,
    draining=st.booleans(),
    goal_id=texts.map(GoalId),
)
http_options = st.builds(
    HttpOptions, request_timeout_s=reals, body_bytes_max=counts, middlewares=st.lists(texts, max_size=2)
)
https = st.builds(
    HttpRecord, target=http_options, last_good=st.none() | http_options, goal_id=texts.map(GoalId)
)
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
            traffic=st.dictionaries(backend_tags, amounts, max_size=2),
            shadows=st.dictionaries(backend_tags, amounts, max_size=2),
        )
        | st.builds(
            BackendSnapshot,
            backend_tag=backend_tags,
            replicas=st.lists(replica_tags, max_size=2),
            draining=st.lists(replica_tags, max_size=2),
            max_concurrent_queries=counts,
            max_queued_requests=counts,
        )
        | st.builds(HttpSnapshot, options=http_options),
    ),
)
counters = st.builds(Counters, goal=counts, ordinal=counts, generation=counts, snapshot=counts)
objects: st.SearchStrategy[CheckpointObject] = (
    backends
    | endpoints
    | deployments
    | applications
    | revisions
    | replicas()
    | goals
    | hosts
    | proxies
    | https
    | snapshots
    | counters
)
few_objects = st.lists(objects, max_size=6)
steps = st.lists(st.tuples(st.sampled_from(["put", "delete"]), objects), max_size=8)


def checkpoint_of(values: list[CheckpointObject]) -> Checkpoint:
    return Checkpoint().applied(ObjectChanges(puts=tuple(values)))


def contents(checkpoint: Checkpoint) -> dict[object, object]:
    assert all(checkpoint.replicas.values()), "a backend without replicas has no entry"
    assert all(checkpoint.revisions.values()), "a backend without revisions has no entry"
    return {get_key(value): value for value in checkpoint.all_objects()}


def carry_out(draft: Draft, moves: list[tuple[str, CheckpointObject]]) -> None:
    for verb, value in moves:
        if verb == "put" or isinstance(value, Counters):
            draft.put(value)
        else:
            draft.delete(get_key(value))


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


INDICES = ("by_host", "loads", "pending", "owners", "requests", "routes", "used_by", "unplaced")


def claims(value: CheckpointObject) -> set[tuple[str, str]]:
    """What an object has that no other may have; the core sees to that."""
    match value:
        case EndpointRecord():
            return {("route", config.route) for config in value.configs() if config.route is not None}
        case Goal(request_id=str(request_id)):
            return {("request", request_id)}
        case _:
            return set()


@st.composite
def consistent_objects(draw: st.DrawFn) -> list[CheckpointObject]:
    by_key: dict[Key, CheckpointObject] = {}
    claimed: set[tuple[str, str]] = set()
    for value in draw(st.lists(objects, max_size=12)):
        if get_key(value) not in by_key and not claims(value) & claimed:
            by_key[get_key(value)] = value
            claimed |= claims(value)
    return list(by_key.values())


@given(consistent_objects(), st.data())
def test_rows_make_the_same_checkpoint_in_whatever_order_they_come(values, data):
    rows = [dump(value) for value in values]
    shuffled = data.draw(st.permutations(rows))
    one, other = load_checkpoint(rows), load_checkpoint(shuffled)
    assert contents(one) == contents(other)
    assert [getattr(one, name) for name in INDICES] == [getattr(other, name) for name in INDICES]


@given(consistent_objects(), steps)
def test_indices_of_a_changed_checkpoint_are_those_of_one_that_is_loaded(values, moves):
    draft = Draft(checkpoint_of(values))
    for verb, value in moves:
        if verb == "delete" and not isinstance(value, Counters):
            draft.delete(get_key(value))
        elif verb == "put" and not any(
            claims(value) & claims(other) for other in draft.all_objects() if get_key(other) != get_key(value)
        ):
            draft.put(value)
    loaded = load_checkpoint(dump(value) for value in draft.all_objects())
    assert {name: getattr(draft, name) for name in INDICES} == {
        name: getattr(loaded, name) for name in INDICES
    }


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

    touched = [get_key(value) for value in changes.puts] + list(changes.deletes)
    assert len(touched) == len(set(touched))
    assert set(touched) == {key for key in {*before, *after} if before.get(key, None) != after.get(key, None)}


@given(few_objects)
def test_what_is_put_back_as_it_was_is_no_change(values):
    base = checkpoint_of(values)
    draft = Draft(base)
    for value in base.all_objects():
        if get_key(value) != COUNTERS_KEY:
            draft.delete(get_key(value))
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

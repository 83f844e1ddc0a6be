"""The rows' format: what was written is read, and what cannot be understood is refused by name."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from serve_common.api.views import GoalStatus
from serve_common.errors import CheckpointUnreadable
from serve_common.names import GoalId, HostId
from serve_controller.core.objects import (
    Counters,
    Goal,
    GoalKind,
    HostRecord,
    ObjectChanges,
    ObjectKind,
    get_key,
)
from serve_controller.shell.checkpoint_rows import (
    SCHEMA_VERSION,
    Row,
    dump,
    dump_changes,
    load,
    load_checkpoint,
)
from tests.support.paths import ROOT

EXAMPLES = ROOT / "tests/data/checkpoints"


def example_rows() -> list[Row]:
    rows: list[dict[str, Any]] = json.loads(
        (EXAMPLES / f"v{SCHEMA_VERSION}.json").read_text(encoding="utf-8")
    )
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


def test_examples_of_every_kind_are_read():
    rows = example_rows()
    assert {row.kind for row in rows} == {kind.value for kind in ObjectKind}
    keys = {(kind.value, key) for kind, key in map(get_key, load_checkpoint(rows).all_objects())}
    assert keys == {(row.kind, row.key) for row in rows}


def test_the_examples_show_the_format_to_the_letter():
    for row in example_rows():
        assert msgspec.json.decode(dump(load(row)).value) == json.loads(row.value), (
            f"the shape of {row.kind!r} changed: raise SCHEMA_VERSION, keep reading rows of {SCHEMA_VERSION}, and add "
            f"tests/data/checkpoints/v{SCHEMA_VERSION + 1}.json"
        )


def test_rows_from_before_deploys_could_be_rollouts_are_read():
    for row in example_rows():
        value = json.loads(row.value)
        if row.kind == "backend":
            del value["target"]["backend_config"]["rollout"]
        elif row.kind == "rollout":
            for name in ("deployed", "has_backends", "promoted_config_version"):
                del value[name]
        assert load(msgspec.structs.replace(row, value=json.dumps(value))) is not None


@pytest.mark.parametrize("version", [SCHEMA_VERSION + 1, 0, -1])
def test_a_row_of_an_unknown_schema_version_is_refused(version):
    with pytest.raises(
        CheckpointUnreadable, match=rf"host 'h1'.*schema_version is {version}, .* reads {SCHEMA_VERSION}\b"
    ):
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

"""What comes in as JSON and what an error reads like, without any bus."""

from __future__ import annotations

import msgspec
import pytest

from serve_common.errors import BadField, Conflict
from serve_common.wires.admin import VERBS
from serve_common.wires.commands import Deploy
from serve_common.wires.queries import ListDeployments
from serve_controller.shell.admin import error_view, parse_request
from tests.simulation.closed_loop import deploy


@pytest.mark.parametrize("verb", VERBS)
def test_every_request_that_is_encoded_is_parsed_back(verb: str) -> None:
    needed = {"name": "a", "goal_id": "g1", "replica_config": {"import_path": "m:C"}}
    fields = {f.name: needed[f.name] for f in msgspec.structs.fields(VERBS[verb][0]) if f.required}
    request = parse_request(verb, msgspec.json.encode(fields))
    assert parse_request(verb, msgspec.json.encode(request)) == request


def test_nothing_at_all_means_all_defaults() -> None:
    assert parse_request("list_deployments", b"") == ListDeployments()
    assert isinstance(parse_request("deploy", msgspec.json.encode(deploy())), Deploy)


@pytest.mark.parametrize(
    ("payload", "field"),
    [
        (b'{"nme":1}', "nme"),
        (b"{}", "name"),
        (b'{"name":7}', "name"),
        (b'{"name":"a","replica_config":{"import_path":"m:C","init_arg":1}}', "replica_config.init_arg"),
        (b'{"name":"a","replica_config":{"import_path":1}}', "replica_config.import_path"),
        (b'{"name":"a","replica_config":{"import_path":"m:C"},"methods":["GET",1]}', "methods[1]"),
        (
            b'{"name":"a","replica_config":{"import_path":"m:C","ray_actor_options":{"resources":{"x":"y"}}}}',
            "replica_config.ray_actor_options.resources[...]",
        ),
        (b"7", "request"),
        (b'{"name":"\xff"}', "request"),
        (b"[" * 50_000, "request"),
    ],
)
def test_what_is_wrong_is_named_by_its_path(payload: bytes, field: str) -> None:
    with pytest.raises(BadField) as refused:
        parse_request("deploy", payload)
    assert refused.value.field == field


def test_what_the_caller_wrote_comes_back_in_part_only() -> None:
    with pytest.raises(BadField) as refused:
        parse_request("deploy", b'{"' + b"x" * 100_000 + b'":1}')
    assert len(str(refused.value)) < 1000


def test_an_error_tells_its_code_and_field() -> None:
    view = error_view(BadField("a.b", "is odd"))
    assert (view.code, view.message, view.field) == ("bad_field", "a.b: is odd", "a.b")
    assert msgspec.json.encode(error_view(Conflict("taken"))) == b'{"code":"conflict","message":"taken"}'

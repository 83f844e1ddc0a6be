"""The forms of changes, and archives that are uploaded, without any page."""

from __future__ import annotations

import io
import re
import zipfile
from typing import Any

import pytest

from serve_common.api import commands as c
from serve_common.errors import BadField
from serve_console.core.change_kinds import CHANGES
from serve_console.core.form_values import FieldsWrong, FormValues
from serve_console.core.uploaded_archives import repack

TAG = "default/digits"


GOOD: list[tuple[str, dict[str, str], c.Command[Any]]] = [
    ("scale", {"backend_tag": "digits", "num_replicas": " 3 "}, c.Scale(backend_tag=TAG, num_replicas=3)),
    (
        "set_traffic",
        {"endpoint": TAG, f"weights.{TAG}": "90", "weights.default/new": "10", "weights.default/x": ""},
        c.SetTraffic(endpoint=TAG, weights={TAG: 0.9, "default/new": 0.1}),
    ),
    (
        "shadow_traffic",
        {"endpoint": TAG, "backend_tag": "new", "proportion": "12.5"},
        c.ShadowTraffic(endpoint=TAG, backend_tag="default/new", proportion=0.125),
    ),
    ("rollback", {"name": "digits", "to": ""}, c.Rollback(name=TAG)),
    ("rollback", {"name": "digits", "to": "7"}, c.Rollback(name=TAG, to=7)),
    ("rollback", {"name": "digits", "to": "v1"}, c.Rollback(name=TAG, to="v1")),
    (
        "start_rollout",
        {
            "name": TAG,
            "version": "v2",
            "import_path": "new:Digits",
            "app_dir": "/apps",
            "steps": "5%, 100%",
            "backend_config": '{"user_config": 1}',
            "again": "true",
            "was": '{"import_path": "digits:Digits", "app_dir": "/apps"}',
        },
        c.StartRollout(
            name=TAG,
            version="v2",
            replica_config={"import_path": "new:Digits", "code": ""},
            backend_config={"user_config": 1},
            rollout_fields={"steps": ["5%", "100%"]},
            again=True,
        ),
    ),
    (
        "control_rollout",
        {"name": TAG, "action": "abort", "reason": "wrong"},
        c.ControlRollout(name=TAG, action=c.RolloutAction.ABORT, reason="wrong"),
    ),
    ("drain_host", {"host_id": "host-1"}, c.DrainHost(host_id="host-1")),
    ("delete_application", {"name": "shop"}, c.DeleteApplication(name="shop")),
    ("delete_backend", {"backend_tag": "x"}, c.DeleteBackend(backend_tag="default/x")),
    (
        "update_backend_config",
        {
            "backend_tag": TAG,
            "max_concurrent_queries": "20",
            "user_config": '{"a": 1}',
            "config": '{"placement": "spread", "max_replicas_per_host": 2}',
            "was": '{"placement": "spread", "max_replicas_per_host": null, "max_concurrent_queries": 100}',
        },
        c.UpdateBackendConfig(
            backend_tag=TAG,
            config={"max_replicas_per_host": 2, "max_concurrent_queries": 20, "user_config": {"a": 1}},
        ),
    ),
    (
        "set_http_options",
        {"request_timeout_s": "30", "access_log": "true", "middlewares": "a:b\nc:d", "was": '{"root_path": ""}'},
        c.SetHttpOptions(options={"request_timeout_s": 30, "access_log": True, "middlewares": ["a:b", "c:d"]}),
    ),
    (
        "create_endpoint",
        {"endpoint": "trial", "route": "/trial/", "methods": "get", f"traffic.{TAG}": "100"},
        c.CreateEndpoint(endpoint="default/trial", route="/trial", methods=["GET"], traffic={TAG: 1.0}),
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("verb", "typed", "command"), GOOD, ids=lambda value: value if isinstance(value, str) else ""
)
def test_what_was_typed_becomes_the_command(
    verb: str, typed: dict[str, str], command: c.Command[Any]
) -> None:
    assert CHANGES[verb].parse(FormValues(typed)) == command


BAD: list[tuple[str, dict[str, str], str]] = [
    ("scale", {"backend_tag": "digits", "num_replicas": "many"}, "num_replicas"),
    ("scale", {"backend_tag": "digits", "num_replicas": ""}, "num_replicas"),
    ("scale", {"backend_tag": "a/b/c", "num_replicas": "1"}, "backend_tag"),
    ("set_traffic", {"endpoint": TAG, f"weights.{TAG}": "90"}, ""),
    ("set_traffic", {"endpoint": TAG, f"weights.{TAG}": "nan"}, f"weights.{TAG}"),
    ("shadow_traffic", {"endpoint": TAG, "backend_tag": "new", "proportion": "101"}, "proportion"),
    ("start_rollout", {"name": TAG, "backend_config": "{"}, "backend_config"),
    ("control_rollout", {"name": TAG, "action": "explode"}, "action"),
    ("update_backend_config", {"backend_tag": TAG, "config": "[]"}, "config"),
    ("update_backend_config", {"backend_tag": TAG, "config": '{"a": 1}', "was": '{"a": 1}'}, ""),
    ("set_http_options", {"request_timeout_s": "-1"}, "request_timeout_s"),
    ("create_endpoint", {"endpoint": "x", "route": "trial", f"traffic.{TAG}": "100"}, "route"),
    ("deploy", {"name": "x", "import_path": "digits"}, "import_path"),
    ("deploy", {"name": "x", "import_path": "a:b", "env": "NOT A VARIABLE"}, "env"),
    ("deploy", {"name": "x", "import_path": "a:b", "backend_config": '{"what": 1}'}, "backend_config"),
    ("deploy_application", {"application": '{"name": "shop"}'}, "application"),
]


@pytest.mark.parametrize(("verb", "typed", "field"), BAD)
def test_a_wrong_field_is_named(verb: str, typed: dict[str, str], field: str) -> None:
    with pytest.raises(FieldsWrong) as caught:
        CHANGES[verb].parse(FormValues(typed))
    assert list(caught.value.errors) == [field]


def test_a_deploy_has_what_the_form_says() -> None:
    typed = {
        "name": "shop/front", "import_path": "shop:Front", "app_dir": "/apps", "version": "v2", "route_prefix": "/shop",
        "min_replicas": "1", "max_replicas": "4", "num_cpus": "0.5", "memory_mib": "512", "env": "A=1\n\nB=x=y",
        "user_config": '{"a": 1}', "backend_config": '{"max_concurrent_queries": 5}',
        "endpoint_options": '{"backend_header": "X"}',
    }  # fmt: skip
    command = CHANGES["deploy"].parse(FormValues(typed))
    assert isinstance(command, c.Deploy)
    options = command.replica_config.ray_actor_options
    assert (command.name, command.route_prefix, command.version) == ("shop/front", "/shop", "v2")
    assert (options.num_cpus, options.memory) == (0.5, 512 * 2**20)
    assert options.runtime_env == {"env_vars": {"A": "1", "B": "x=y"}}
    config = command.backend_config
    assert config.autoscaling_config is not None
    assert (config.autoscaling_config.max_replicas, config.max_concurrent_queries) == (4, 5)
    assert command.endpoint_options.backend_header == "X"


def archive(**files: str) -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as written:
        for name, text in files.items():
            written.writestr(name, text)
    return target.getvalue()


def link() -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as written:
        entry = zipfile.ZipInfo("digits.py")
        entry.create_system, entry.external_attr = 3, 0o120777 << 16
        written.writestr(entry, "/etc/passwd")
    return target.getvalue()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"no zip", "is not a .zip"),
        (archive(), "has no files"),
        (archive(**{"../digits.py": ""}), "is no path within it"),
        (archive(**{"/digits.py": ""}), "is no path within it"),
        (archive(**{"digits.py": "", "other/x.py": "", "big": "0" * (33 * 2**20)}), "32 MiB"),
        (archive(**{"other.py": ""}), "has no module 'digits'; it has other.py"),
        (link(), "is a link"),
    ],
    ids=["no zip", "empty", "parent", "absolute", "large", "other module", "link"],
)
def test_archives_that_a_host_would_refuse_are_refused_at_once(data: bytes, reason: str) -> None:
    with pytest.raises(BadField, match=re.escape(reason)):
        repack(data, "digits:Digits")

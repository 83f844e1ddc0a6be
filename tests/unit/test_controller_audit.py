"""What the audit log says of a command."""

from __future__ import annotations

import msgspec

from serve_common.api.views import GoalStatus
from serve_common.config.endpoint import HttpOptions
from serve_common.names import BackendTag, HostId
from serve_controller.core.audit import AUDIT_BYTES_MAX, LEFT_OUT, audit_values
from serve_controller.core.objects import (
    Application,
    ApplicationVersion,
    Counters,
    HostRecord,
    HttpRecord,
    ObjectChanges,
    ObjectKind,
)
from tests.unit.controller_parts import (
    G1,
    TAG,
    backend_of,
    checkpoint_of,
    deployment_of,
    endpoint_of,
    goal_of,
    replica_of,
    version_of,
)

V1, V2 = version_of(), version_of(2, version="v2")


def test_what_was_made_was_not_there_before() -> None:
    values = (
        backend_of(V1),
        endpoint_of(),
        deployment_of(),
        goal_of(status=GoalStatus.PENDING),
        Counters(goal=1),
        HostRecord(host_id=HostId("h"), generation=3),
    )
    old, new = audit_values(checkpoint_of(), ObjectChanges(values))
    assert old == {"backend default/a": None, "endpoint default/a": None}
    assert new is not None
    assert list(new) == ["backend default/a", "endpoint default/a"]
    assert new["backend default/a"]["target"]["version"] == "v1"
    assert new["endpoint default/a"] == {
        "route": "/a",
        "methods": ["GET"],
        "traffic": {"default/a": 1.0},
        "shadows": {},
        "options": {"shard_key_header": "X-Serve-Shard-Key", "backend_header": "", "relative_slo_ms": None},
    }


def test_what_changed_is_told_as_it_was_and_is() -> None:
    made = ApplicationVersion(ingress=TAG, deployments=[TAG])
    application = Application(name="shop", goal_id=G1, target=made, last_good=None)
    host = HostRecord(host_id=HostId("h"), generation=1)
    before = checkpoint_of(
        backend_of(V1),
        endpoint_of(),
        application,
        HttpRecord(target=HttpOptions(), last_good=None, goal_id=G1),
        host,
        replica_of(1, V1),
    )
    changes = ObjectChanges(
        (
            backend_of(V2, deleting=True),
            msgspec.structs.replace(application, deleting=True),
            HttpRecord(target=HttpOptions(request_timeout_s=5), last_good=None, goal_id=G1),
            msgspec.structs.replace(host, draining=True, generation=2),
        ),
        ((ObjectKind.ENDPOINT, TAG), (ObjectKind.REPLICA, "default/a#1")),
    )
    old, new = audit_values(before, changes)
    assert old is not None
    assert new is not None
    titles = ["application shop", "backend default/a", "endpoint default/a", "host h", "http options"]
    assert list(old) == list(new) == titles
    assert (old["host h"], new["host h"]) == ({"draining": False}, {"draining": True})
    assert (old["http options"]["request_timeout_s"], new["http options"]["request_timeout_s"]) == (60.0, 5.0)
    assert new["endpoint default/a"] is None
    assert new["backend default/a"]["deleting"] is True
    assert "deleting" not in old["backend default/a"]
    assert new["application shop"] == {
        "ingress": TAG,
        "deployments": [TAG],
        "takes_over": None,
        "deleting": True,
    }


def test_a_change_of_nothing_that_users_decide_on_says_nothing() -> None:
    before = checkpoint_of(backend_of(V1))
    changes = ObjectChanges((backend_of(V1, goal_id="g2", start_failures=1), goal_of()))
    assert audit_values(before, changes) == (None, None)


def test_large_values_are_named_and_not_repeated() -> None:
    large = version_of(user_config={"weights": "x" * 60_000}, num_replicas=3)
    old, new = audit_values(checkpoint_of(backend_of(V1)), ObjectChanges((backend_of(large),)))
    assert old is not None
    assert new is not None
    config = new["backend default/a"]["target"]["backend_config"]
    assert config["user_config"] == "left out: 60014 bytes"
    assert config["num_replicas"] == 3
    assert old["backend default/a"]["target"]["backend_config"]["user_config"] is None


def test_each_side_is_bounded_and_says_what_is_missing() -> None:
    backends = [
        backend_of(version_of(user_config="y" * 2000), BackendTag(f"default/n{i:04}")) for i in range(500)
    ]
    before = checkpoint_of(*backends)
    changes = ObjectChanges((), tuple((ObjectKind.BACKEND, backend.backend_tag) for backend in backends))
    old, new = audit_values(before, changes)
    for side in (old, new):
        assert side is not None
        assert len(msgspec.json.encode(side)) <= AUDIT_BYTES_MAX
    assert old is not None
    assert new is not None
    count = 500 - (len(old) - 1)
    assert old[LEFT_OUT].startswith(f"{count} objects for which there is no room: backend default/n")
    assert old[LEFT_OUT].endswith(f"and {count - 5} more")
    assert LEFT_OUT not in new  # what is gone takes no room
    assert len(new) == 500

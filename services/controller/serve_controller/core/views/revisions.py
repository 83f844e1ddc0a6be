"""What a backend was, as callers see it: where a rollback can go."""

from __future__ import annotations

import msgspec
from immutables import Map

from serve_common.errors import NotFound
from serve_common.names import BackendTag, deployment_tag
from serve_common.wires.views import GoalStatus, RevisionView
from serve_controller.core.checkpoint import Checkpoint
from serve_controller.core.objects import BackendVersion, Revision


def view_revisions(checkpoint: Checkpoint, name: str) -> list[RevisionView]:
    """A deployment's or backend's revisions, the newest first. Raises `NotFound` or `BadField`."""
    tag = deployment_tag(name)
    revisions: Map[int, Revision] = checkpoint.revisions.get(tag, Map())
    if tag not in checkpoint.backends and not revisions:
        raise NotFound(f"name: there is no deployment or backend {tag!r}")
    current = _current(checkpoint, tag, revisions)
    views = []
    for number in sorted(revisions.keys(), reverse=True):
        revision = revisions[number]
        goal = checkpoint.goals.get(revision.goal_id)
        views.append(
            RevisionView(
                revision=number,
                at=revision.at,
                goal_id=revision.goal_id,
                status=GoalStatus.SUCCEEDED if goal is None else goal.status,
                is_current=number == current,
                version=revision.version.version,
                import_path=revision.version.replica_config.import_path,
                num_replicas=revision.version.backend_config.num_replicas,
                route_prefix=None if revision.endpoint is None else revision.endpoint.route,
            )
        )
    return views


def _current(checkpoint: Checkpoint, tag: BackendTag, revisions: Map[int, Revision]) -> int | None:
    """The newest revision that equals what last succeeded; None when nothing did, or it is not remembered."""
    backend = checkpoint.backends.get(tag)
    if backend is None or backend.last_good is None:
        return None
    good = _content(backend.last_good)
    return max((n for n, r in revisions.items() if _content(r.version) == good), default=None)


def _content(version: BackendVersion) -> BackendVersion:
    """The version less the number that it gets anew when a failed change is undone."""
    return msgspec.structs.replace(version, config_version=0)

"""What a deployment is once its rollout has passed: the new version, and what else its deploy changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from serve_common.names import EndpointTag
from serve_controller.core.checkpoint import Checkpoint, Draft
from serve_controller.core.objects import Backend, EndpointConfig
from serve_controller.core.rollouts.record import EndpointFields, Rollout
from serve_controller.core.scaling import scaled_config
from serve_controller.core.versions import Wanted

_Fields = TypeVar("_Fields", bound=msgspec.Struct)


def merge_since(former: _Fields, wanted: _Fields, current: _Fields) -> _Fields:
    """``current`` with the fields of ``wanted``, but for those that were changed since ``former``."""
    names = type(current).__struct_fields__
    same = {name for name in names if getattr(current, name) == getattr(former, name)}
    return msgspec.structs.replace(current, **{name: getattr(wanted, name) for name in same})


def promoted_version(backend: Backend, rollout: Rollout) -> Wanted:
    """What a deployment is to be once its rollout has passed; what was changed meanwhile, such as its number of
    replicas, stays."""
    candidate, current = rollout.candidate, backend.target.backend_config
    if rollout.deployed is None:
        config = msgspec.structs.replace(candidate.backend_config, num_replicas=current.num_replicas)
    else:
        config = merge_since(rollout.deployed.former_config, candidate.backend_config, current)
        if config.autoscaling_config is not None:
            config = msgspec.structs.replace(config, num_replicas=current.num_replicas)
            config = scaled_config(config, backend, is_new_code=True)
    keeps_code = rollout.deployed is not None and rollout.deployed.keeps_code
    return Wanted(candidate.replica_config, config, candidate.version, is_same_code=keeps_code)


def endpoint_fields(config: EndpointConfig) -> EndpointFields:
    """The fields of an endpoint that a deploy sets."""
    return EndpointFields(
        route=config.route,
        methods=config.methods,
        traffic=config.traffic,
        options=config.options,
        is_ingress=config.is_ingress,
    )


def route_conflict(checkpoint: Checkpoint, rollout: Rollout) -> str:
    """Why the endpoint cannot be as deployed: another one has its route by now; empty if it can."""
    target = _merged_endpoint(checkpoint, rollout)
    if target is None or target.route is None:
        return ""
    for other in sorted(checkpoint.routes.get(target.route, {})):
        if other != EndpointTag(rollout.backend_tag):
            return f"its route {target.route} belongs to the endpoint {other} by now"
    return ""


def put_endpoint(draft: Draft, rollout: Rollout) -> None:
    """Set the endpoint of the deployment as it was deployed."""
    target = _merged_endpoint(draft, rollout)
    if target is not None:
        record = draft.endpoints[EndpointTag(rollout.backend_tag)]
        draft.put(msgspec.structs.replace(record, target=target))


def _merged_endpoint(checkpoint: Checkpoint, rollout: Rollout) -> EndpointConfig | None:
    record, deployed = checkpoint.endpoints.get(EndpointTag(rollout.backend_tag)), rollout.deployed
    if record is None or deployed is None or deployed.endpoint is None or deployed.former_endpoint is None:
        return None
    current, former, wanted = endpoint_fields(record.target), deployed.former_endpoint, deployed.endpoint
    merged = merge_since(former, wanted, current)
    options = merge_since(former.options, wanted.options, current.options)
    fields: Mapping[str, Any] = {**msgspec.structs.asdict(merged), "options": options}
    return msgspec.structs.replace(record.target, **fields)

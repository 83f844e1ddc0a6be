"""What ``import muster as serve`` offers, what it costs, and what code learns of the replica that it runs in."""

from __future__ import annotations

import pkgutil
import subprocess
import sys

import pytest

import muster as serve
from muster.schema import ReplicaRank
from serve_common.config.backend import ReplicaConfig
from serve_common.names import BackendTag, ReplicaTag
from serve_common.protocol.reports import ReplicaGoal
from serve_common.runtime.request_context import CurrentReplica, set_replica_context
from serve_common.runtime.settings import BusSettings


def test_every_name_that_is_promised_is_there_and_documented() -> None:
    assert sorted(serve.__all__) == serve.__all__ == sorted(serve._HOME_OF)
    for name in serve.__all__:
        found = getattr(serve, name)
        assert callable(found)
        assert found.__doc__, name
    assert set(serve.__all__) <= set(dir(serve))


def test_no_module_takes_the_place_of_a_name() -> None:
    assert not {module.name for module in pkgutil.iter_modules(serve.__path__)} & set(serve.__all__)


def test_what_is_not_there_is_an_attribute_error_that_names_it() -> None:
    with pytest.raises(AttributeError, match="'muster' has no attribute 'nothing'"):
        serve.nothing  # noqa: B018 - reading it is what is tried


def test_importing_it_imports_nothing_else() -> None:
    script = (
        "from __future__ import annotations\nimport sys, importlib, typing\nbefore = set(sys.modules)\nimport muster\n"
        "print(sorted(name for name in set(sys.modules) - before if name != 'muster'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=50
    )
    assert done.stdout.strip() == "[]"


def test_the_replica_is_known_in_a_replica_only() -> None:
    with pytest.raises(serve.NotInReplica, match="may only be called from within"):
        serve.get_replica_context()
    context = CurrentReplica(
        replica_tag=ReplicaTag("shop/pricing#7"),
        backend_tag=BackendTag("shop/pricing"),
        bus=BusSettings(servers=[], user="", password="secret", inbox_prefix="", subject_prefix=""),
        code_version=3,
        peer_versions={},
        servable_object=(servable := object()),
    )
    set_replica_context(context)
    try:
        found = serve.get_replica_context()
        assert (found.app_name, found.deployment, found.code_version) == ("shop", "pricing", "3")
        assert found.replica_tag == found.replica_id == "shop/pricing#7"
        assert found.replica_id.deployment_id == ("pricing", "shop")
        assert found.replica_id.unique_id == "7"
        assert found.replica_id.to_full_id_str().endswith("#7")
        assert found.servable_object is servable
        assert "secret" not in repr(found)
        assert (found.rank, found.world_size) == (ReplicaRank(rank=0, node_rank=0, local_rank=0), 1)
        context.rank, context.world_size = ReplicaRank(rank=4, node_rank=1, local_rank=2), 5
        assert serve.get_replica_context().rank is context.rank
        assert serve.get_replica_context().world_size == 5
        assert found._deployment_config is None
        context.goal = ReplicaGoal(
            replica_tag=context.replica_tag,
            backend_tag=context.backend_tag,
            replica_config=ReplicaConfig(import_path="a:b"),
            config_version=1,
            user_config={"k": 1},
            max_concurrent_queries=7,
            graceful_shutdown_timeout_s=3,
            health_check_period_s=4,
            health_check_timeout_s=5,
            start_timeout_s=6,
            world_size=2,
        )
        config = serve.get_replica_context()._deployment_config
        assert config is not None
        assert (config.num_replicas, config.max_ongoing_requests, config.user_config) == (2, 7, {"k": 1})
        assert config.graceful_shutdown_timeout_s == 3
        assert (config.health_check_period_s, config.health_check_timeout_s) == (4, 5)
        context.backend_tag = BackendTag("bare")
        found = serve.get_replica_context()
        assert (found.app_name, found.deployment) == ("", "bare")
    finally:
        set_replica_context(None)

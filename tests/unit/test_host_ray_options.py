"""What Ray is asked for, and what is said when a replica's process has ended."""

from __future__ import annotations

import pytest

from serve_common.config.replica import RayActorOptions
from serve_replica_host.adapters.ray_options import (
    absolute_app_dir,
    actor_options,
    describe_end,
    describe_needs,
    fits_spare,
)


def test_only_what_was_asked_for_reaches_ray() -> None:
    assert actor_options(RayActorOptions()) == {"num_cpus": 1.0, "num_gpus": 0.0}
    assert actor_options(
        RayActorOptions(
            num_cpus=0.5, num_gpus=1, memory=1e9, resources={"tpu": 2}, runtime_env={"env_vars": {"A": "b"}}
        )
    ) == {
        "num_cpus": 0.5,
        "num_gpus": 1,
        "memory": 1e9,
        "resources": {"tpu": 2},
        "runtime_env": {"env_vars": {"A": "b"}},
    }


@pytest.mark.parametrize(
    ("options", "fits"),
    [
        (RayActorOptions(), True),
        (RayActorOptions(num_cpus=0), True),
        (RayActorOptions(num_cpus=1.5), True),
        (RayActorOptions(num_cpus=2), False),
        (RayActorOptions(num_gpus=0.1), False),
        (RayActorOptions(memory=1), False),
        (RayActorOptions(resources={"tpu": 1}), False),
        (RayActorOptions(runtime_env={"env_vars": {"A": "b"}}), False),
    ],
)
def test_only_a_replica_of_cpus_alone_can_be_an_actor_that_waits(
    options: RayActorOptions, fits: bool
) -> None:
    assert fits_spare(options) is fits


def test_needs_are_said_in_words() -> None:
    assert (
        describe_needs(RayActorOptions(num_cpus=4, num_gpus=0.5, resources={"tpu": 2}))
        == "4 CPU, 0.5 GPU, 2 tpu"
    )
    assert describe_needs(RayActorOptions(num_cpus=0)) == "nothing"


def test_a_relative_app_dir_begins_at_the_root() -> None:
    assert absolute_app_dir("examples", "/srv") == "/srv/examples"
    assert absolute_app_dir("/apps", "/srv") == "/apps"
    assert absolute_app_dir("", "/srv") == ""


def test_an_end_is_one_line() -> None:
    page = (
        "The actor died. The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR "
        "Worker exit detail: Worker unexpectedly exits. End of file. Some common causes include: (1) a (2) b"
    )

    assert describe_end(42, RuntimeError(page)).startswith(
        "the replica's process 42 ended unasked (SYSTEM_ERROR: Worker unexpectedly exits); "
    )
    assert describe_end(0, RuntimeError("no node")) == "the replica's process ended: no node"
    node = RuntimeError(
        "The actor died because its node has died. Node Id: ab The actor's node was terminated"
    )
    assert describe_end(42, node, "10.0.0.2").startswith(
        "the replica's process 42 on 10.0.0.2 ended with its machine"
    )
    killed = RuntimeError("died. The actor is dead because it was killed by `ray.kill`.")
    assert describe_end(42, killed) == "the replica's process 42 was killed by its host"

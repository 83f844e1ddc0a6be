"""A node of a Ray cluster as a process that ends with its standard input: ``ray_node.py DIR CPUS [GCS [NAME]]``.

Why not ``ray start``: that brings a dashboard and monitors, which take longer to start than all else.
Without the address of a GCS it is the head. With NAME it has 10 of a custom resource of that name.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import psutil
from ray._private import node as ray_node
from ray._private import parameter as ray_parameter

from serve_replica_host.adapters.ray_session import lean_ray

HEARTBEATS = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 300,
    "health_check_timeout_ms": 3_000,
    "health_check_failure_threshold": 3,
}
"""A node that was killed is found dead within about a second, not within half a minute."""


def main(directory: str, cpus: str, gcs_address: str = "", name: str = "") -> None:
    """Start it, print what tests need to know as a line of JSON, and wait."""
    untyped: Any = ray_parameter
    untyped_node: Any = ray_node
    with lean_ray():
        parameters = untyped.RayParams(
            temp_dir=directory,
            gcs_address=gcs_address or None,
            num_cpus=int(cpus),
            resources={name: 10.0} if name else {},
            object_store_memory=80 * 1024 * 1024,
            include_dashboard=False,
            _system_config=None if gcs_address else HEARTBEATS,
        )
        try:
            node = untyped_node.Node(
                parameters, head=not gcs_address, shutdown_at_exit=False, spawn_reaper=False
            )
        except BaseException:
            for child in psutil.Process().children(recursive=True):
                child.kill()
            raise
    raylet = node.all_processes["raylet"][0].process.pid
    sys.stdout.write(json.dumps({"address": node.gcs_address, "node_id": node.node_id, "raylet": raylet}))
    sys.stdout.write("\n")
    sys.stdout.flush()
    sys.stdin.read()
    node.kill_all_processes(check_alive=False, allow_graceful=False, wait=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

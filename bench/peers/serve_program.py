"""Ray Serve with everything deployed that the benchmark asks for. Run as a program, by a Python with ``ray[serve]``.

What mode it runs in is said by Ray Serve's own environment variables. It tells that it is ready by a file.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

_MODELS_DIR = Path(__file__).parents[1] / "models"
_REPLICA_CPUS = 0.1


def run(temp_dir: str, cpus: int, port: int, ready: Path) -> None:
    """Serve until SIGTERM."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray hands the driver's path on to its workers; the models must be importable there.
    sys.path.insert(0, str(_MODELS_DIR))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(_MODELS_DIR), os.environ.get("PYTHONPATH", "")])
    import ray
    from ray import serve

    models: Any = importlib.import_module("bench_models")
    ray.init(
        address="local",
        include_dashboard=False,
        num_cpus=cpus,
        object_store_memory=200 * 1024 * 1024,
        log_to_driver=False,
        logging_level=logging.ERROR,
        _temp_dir=temp_dir,
    )
    serve.start(http_options={"host": "127.0.0.1", "port": port})

    def deployment(code: Any) -> Any:
        # Ray Serve's own limit would be 5; as many as Muster allows by default.
        return serve.deployment(code, ray_actor_options={"num_cpus": _REPLICA_CPUS}, max_ongoing_requests=100)

    for path in ("noop", "echo", "upload", "tokens", "paced"):
        bound = deployment(getattr(models, path.capitalize())).bind()
        serve.run(bound, name=path, route_prefix=f"/{path}")
    chain = deployment(models.Front).bind(deployment(models.Back).bind())
    serve.run(chain, name="chain", route_prefix="/chain")
    ready.write_text("ready")
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    serve.shutdown()
    ray.shutdown()


def main() -> None:
    """Read the arguments and serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--temp-dir", required=True)
    parser.add_argument("--cpus", type=int, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--ready", type=Path, required=True)
    options = parser.parse_args()
    run(options.temp_dir, options.cpus, options.port, options.ready)


if __name__ == "__main__":
    main()

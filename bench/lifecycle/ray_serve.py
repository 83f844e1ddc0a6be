"""The same story by Ray Serve. Run as a program, by the Python of an environment that has ``ray[serve]``."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.lifecycle.answer_watch import AnswerWatch
from bench.lifecycle.story import (
    CHANGE_TIMEOUT_S,
    FIRST_DEPLOY,
    REPLICA_CPUS,
    STORY,
    WARM_UP,
    Change,
    SystemRound,
    Taken,
)

_NAME, _ROUTE = "noop", "/noop"
_MODEL_DIR = Path(__file__).parent / "model"


def measure(temp_dir: str, cpus: int, port: int, settle_s: float) -> SystemRound:
    """One round in a Ray and a Serve of their own, all options at their defaults."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray hands the driver's path on to its workers; the model must be importable there.
    sys.path.insert(0, str(_MODEL_DIR))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(_MODEL_DIR), os.environ.get("PYTHONPATH", "")])
    import ray
    from ray import serve

    model = importlib.import_module("versioned_noop").VersionedNoop

    ray.init(
        address="local",
        include_dashboard=False,
        num_cpus=cpus,
        object_store_memory=80 * 1024 * 1024,
        log_to_driver=False,
        logging_level=logging.ERROR,
        _temp_dir=temp_dir,
    )
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    deployment: Any = serve.deployment(model)

    def make(change: Change) -> None:
        if change.version is None:
            serve.delete(_NAME)
            return
        options = deployment.options(
            num_replicas=change.num_replicas, ray_actor_options={"num_cpus": REPLICA_CPUS}
        )
        serve.run(options.bind(change.version), name=_NAME, route_prefix=_ROUTE)

    with AnswerWatch(port, _ROUTE) as watch:
        for change in WARM_UP:
            _taken(watch, change, make, None)
            time.sleep(settle_s)
        taken, last = [], None
        for change in STORY:
            taken.append(_taken(watch, change, make, last))
            last = change.version
            time.sleep(settle_s)
    result = SystemRound(taken=taken, requests=watch.requests, requests_failed=watch.requests_failed)
    serve.shutdown()
    ray.shutdown()
    return result


def _taken(watch: AnswerWatch, change: Change, make: Callable[[Change], None], last: str | None) -> Taken:
    watch.must_serve = watch.must_serve and change.version is not None
    watch.expect(change.version)
    begun = time.monotonic()
    make(change)
    done_s = time.monotonic() - begun
    answered_s = watch.seen_at(CHANGE_TIMEOUT_S) - begun
    watch.must_serve = watch.must_serve or change.step == FIRST_DEPLOY
    is_new = change.version != last
    return Taken(step=change.step, done_s=done_s, answered_s=answered_s if is_new else None)


def main() -> None:
    """As a program: the round as JSON in a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--temp-dir", required=True)
    parser.add_argument("--cpus", type=int, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--settle-s", type=float, required=True)
    parser.add_argument("--result", type=Path, required=True)
    options = parser.parse_args()
    result = measure(options.temp_dir, options.cpus, options.port, options.settle_s)
    options.result.write_text(json.dumps(dataclasses.asdict(result)))


if __name__ == "__main__":
    main()

"""What is measured beside Muster, each in a Ray of its own: empty actors, and the same story by Ray Serve.

Run as a program: ``bare_ray`` by Muster's Python, ``ray_serve`` by that of an environment with ``ray[serve]``; hence
only the standard library here. Why bare actors at ordinary priority: Muster's replicas start so (`ray_main.py`), and a
limit that is measured at Ray's niceness of 15 would be easier to keep on a busy machine.
"""

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

from bench.lifecycle.story import (
    CHANGE_TIMEOUT_S,
    FIRST_DEPLOY,
    MODEL_DIR,
    NAME,
    REPLICA_CPUS,
    REPLICAS,
    ROUTE,
    STORY,
    WARM_UP,
    BareRound,
    Change,
    ResponseWatch,
    SystemRound,
    Taken,
)


def _start_ray(temp_dir: str, cpus: int) -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    ray.init(
        address="local",
        include_dashboard=False,
        num_cpus=cpus,
        object_store_memory=80 * 1024 * 1024,
        log_to_driver=False,
        logging_level=logging.ERROR,
        _temp_dir=temp_dir,
    )
    return ray


def measure_actors(temp_dir: str, cpus: int, settle_s: float) -> BareRound:
    """The least that starting replicas can cost: as many empty actors, by nothing but Ray."""
    os.environ.setdefault("RAY_worker_niceness", "0")
    ray = _start_ray(temp_dir, cpus)

    class Empty:
        def hello(self) -> int:
            return os.getpid()

    actor_class: Any = ray.remote(num_cpus=REPLICA_CPUS)(Empty)

    def start(count: int) -> tuple[list[Any], float]:
        started_at = time.monotonic()
        actors = [actor_class.remote() for _ in range(count)]
        ray.get([actor.hello.remote() for actor in actors], timeout=CHANGE_TIMEOUT_S)
        taken_s = time.monotonic() - started_at
        time.sleep(settle_s)
        return actors, taken_s

    def end(actors: list[Any]) -> None:
        for actor in actors:
            ray.kill(actor)
        time.sleep(settle_s)

    time.sleep(settle_s)
    warm_up, _ = start(1)
    end(warm_up)
    first, first_s = start(1)
    another, another_s = start(1)
    end(first + another)
    _, eight_s = start(REPLICAS)
    ray.shutdown()
    return BareRound(first_s=first_s, another_s=another_s, eight_s=eight_s)


def measure_serve(temp_dir: str, cpus: int, port: int, settle_s: float) -> SystemRound:
    """One round of a Serve with all options at their defaults."""
    # Ray hands the driver's path on to its workers; the model must be importable there.
    sys.path.insert(0, str(MODEL_DIR))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(MODEL_DIR), os.environ.get("PYTHONPATH", "")])
    ray = _start_ray(temp_dir, cpus)
    from ray import serve

    model = importlib.import_module("bench_models").VersionedNoop
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    deployment: Any = serve.deployment(model)

    def make(change: Change) -> None:
        if change.version is None:
            serve.delete(NAME)
            return
        options = deployment.options(
            num_replicas=change.num_replicas, ray_actor_options={"num_cpus": REPLICA_CPUS}
        )
        serve.run(options.bind(change.version), name=NAME, route_prefix=ROUTE)

    with ResponseWatch(port, ROUTE) as watch:
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


def _taken(watch: ResponseWatch, change: Change, make: Callable[[Change], None], last: str | None) -> Taken:
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
    """Write the round as JSON to a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program", choices=["bare_ray", "ray_serve"])
    parser.add_argument("--temp-dir", required=True)
    parser.add_argument("--cpus", type=int, required=True)
    parser.add_argument("--port", type=int, help="of Ray Serve")
    parser.add_argument("--settle-s", type=float, required=True)
    parser.add_argument("--result", type=Path, required=True)
    options = parser.parse_args()
    result: BareRound | SystemRound
    if options.program == "bare_ray":
        result = measure_actors(options.temp_dir, options.cpus, options.settle_s)
    else:
        result = measure_serve(options.temp_dir, options.cpus, options.port, options.settle_s)
    options.result.write_text(json.dumps(dataclasses.asdict(result)))


if __name__ == "__main__":
    main()

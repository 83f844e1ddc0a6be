"""The least that starting replicas can cost: as many empty actors, by nothing but Ray. Run as a program.

Why at ordinary priority: Muster's replicas start so (`ray_main.py`), and a limit that is measured at Ray's
niceness of 15 would be easier to keep on a busy machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import time
from pathlib import Path
from typing import Any

from bench.lifecycle.story import CHANGE_TIMEOUT_S, REPLICA_CPUS, REPLICAS, BareRound


def measure(temp_dir: str, cpus: int, settle_s: float) -> BareRound:
    """One round in a Ray of its own."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")
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

    class Empty:
        def hello(self) -> int:
            return os.getpid()

    actor_class: Any = ray.remote(num_cpus=REPLICA_CPUS)(Empty)

    def start(count: int) -> tuple[list[Any], float]:
        begun = time.monotonic()
        actors = [actor_class.remote() for _ in range(count)]
        ray.get([actor.hello.remote() for actor in actors], timeout=CHANGE_TIMEOUT_S)
        taken_s = time.monotonic() - begun
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


def main() -> None:
    """As a program: the round as JSON in a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--temp-dir", required=True)
    parser.add_argument("--cpus", type=int, required=True)
    parser.add_argument("--settle-s", type=float, required=True)
    parser.add_argument("--result", type=Path, required=True)
    options = parser.parse_args()
    result = measure(options.temp_dir, options.cpus, options.settle_s)
    options.result.write_text(json.dumps(dataclasses.asdict(result)))


if __name__ == "__main__":
    main()

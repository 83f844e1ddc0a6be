"""The long way: each part is a process of its own, and the seed draws the same again."""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import time

_WORKERS = 2
_TIMEOUT_S = 3600.0


def main() -> int:
    """The exit code is 1 when anything was found."""
    parser = argparse.ArgumentParser(prog="tests.fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, default=None, help="Draws the same again.")
    parser.add_argument("--pipelines", type=int, default=50_000, help="HTTP pipelines in all.")
    parser.add_argument("--calls", type=int, default=5_000, help="Admin calls in all.")
    given = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if given.seed is None else given.seed
    print(f"seed {seed}", flush=True)
    share = -(-given.pipelines // _WORKERS)
    parts = [["tests.fuzz.http", seed, number * share, share] for number in range(_WORKERS)]
    parts.append(["tests.fuzz.admin", seed, given.calls])
    began = time.monotonic()
    running = [
        subprocess.Popen(
            [sys.executable, "-m", *map(str, part)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for part in parts
    ]
    failed = 0
    try:
        for process in running:
            said, complained = process.communicate(timeout=_TIMEOUT_S)
            if process.returncode:
                failed = 1
                print(complained[-20_000:])
            print(
                "\n".join(said.splitlines()[-1:] if not process.returncode else said.splitlines()[-30:]),
                flush=True,
            )
    finally:
        for process in running:
            process.kill()
            process.wait()
    print(f"{time.monotonic() - began:.0f} s")
    return failed


if __name__ == "__main__":
    sys.exit(main())

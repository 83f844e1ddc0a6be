"""``python -m bench.scale.profiled_controller FILE``: a controller that says where its time goes.

Why on a signal: the profile of one phase (a deploy of everything, the steady state) is what tells something, so each
SIGUSR1 writes what was done since the last one to FILE.1, FILE.2 and so on.
"""

from __future__ import annotations

import cProfile
import itertools
import signal
import sys
from types import FrameType

from serve_controller.__main__ import main


def run(path: str) -> int:
    """Run the controller until it ends; its exit code."""
    numbers = itertools.count(1)
    profile = cProfile.Profile()

    def write(_number: int, _frame: FrameType | None) -> None:
        profile.disable()
        profile.dump_stats(f"{path}.{next(numbers)}")
        profile.clear()
        profile.enable()

    signal.signal(signal.SIGUSR1, write)
    profile.enable()
    return main()


if __name__ == "__main__":
    sys.exit(run(sys.argv[1]))

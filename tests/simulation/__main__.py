"""``python -m tests.simulation``: see `sweeps`, which is apart since spawned processes import what they run by name."""

from __future__ import annotations

import sys

from tests.simulation.sweeps import main

if __name__ == "__main__":
    sys.exit(main())

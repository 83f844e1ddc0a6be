"""``python -m bench.full_disk``: a minute of a full disk under the state of a whole stack that serves.

Why not in `make test`: it takes minutes. There runs a short one (`tests/integration/test_storms.py`).
"""

from __future__ import annotations

import argparse
import asyncio
import sys

from tests.support.loads import full_disk

CHANGE_WITHIN_S = 5.0


def main() -> int:
    """0: nothing ended, no request failed, and a change worked soon after there was room; 1: something did not."""
    parser = argparse.ArgumentParser(prog="python -m bench.full_disk", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long there is no room")
    options = parser.parse_args()
    outcome = asyncio.run(full_disk.full_for(options.seconds))
    print(outcome.line())
    is_well = set(outcome.answers) == {"200"} and not outcome.deaths
    is_well = is_well and outcome.change_after_s <= CHANGE_WITHIN_S
    print("as promised" if is_well else "NOT as promised")
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())

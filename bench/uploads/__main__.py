"""``python -m bench.uploads``: 300 uploads of 5 MiB at once to one proxy, again and again.

Why not in `make test`: how soon they are answered says something on a quiet machine only. There runs one round, with a
bound that grows with what else runs (`tests/integration/test_leaks.py`).
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from tests.support.stacks.bare_stack import BareStack
from tests.support.stacks.full_proxy import (
    GIVEN_BACK_WITHIN_S,
    RSS_BYTES_MAX,
    Burst,
    add_sink,
    upload_too_much,
)


def violations(burst: Burst, answered_within_s: float) -> list[str]:
    """What is not as it must be."""
    found = [
        f"{upload.kind}: {upload.error or upload.status}" for upload in burst.uploads if not upload.is_well
    ]
    late = [upload for upload in burst.refused if upload.answered_after_s > answered_within_s]
    if late:
        found.append(f"{len(late)} were refused after more than {answered_within_s} s")
    if burst.most_bytes >= RSS_BYTES_MAX:
        found.append("the proxy has taken too much memory")
    if burst.given_back_after_s >= GIVEN_BACK_WITHIN_S:
        found.append("the memory was not given back")
    return found


async def measure(options: argparse.Namespace) -> bool:
    """Tell; True when all is as it must be."""
    is_well = True
    with tempfile.TemporaryDirectory(prefix="mu-", ignore_cleanup_errors=True) as text:
        async with BareStack.running(Path(text)) as stack:
            proxy = await add_sink(stack, Path(text))
            for number in range(options.rounds):
                burst = await upload_too_much(proxy)
                print(f"round {number + 1}: {burst.text}", flush=True)
                for violation in violations(burst, options.answered_within_s):
                    is_well = False
                    print(f"  NOT as it must be: {violation}", flush=True)
    return is_well


def main() -> int:
    """0: all was as it must be; 1: something was not."""
    parser = argparse.ArgumentParser(prog="python -m bench.uploads", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--answered-within-s", type=float, default=2.0, help="of those that are refused")
    return 0 if asyncio.run(measure(parser.parse_args())) else 1


if __name__ == "__main__":
    sys.exit(main())

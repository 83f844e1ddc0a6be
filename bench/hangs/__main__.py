"""``python -m bench.hangs``: nats-server stands still for 4, 12 and 25 s under load, idle and in an update.

Why not in `make test`: it takes minutes. There is one short hang (`tests/integration/test_replica_chaos.py`).
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from tests.support.loads import bus_hangs
from tests.support.stacks.loaded_stack import LoadedStack


async def measure(options: argparse.Namespace) -> bool:
    """Tell; True when all is as promised."""
    is_well = True
    with tempfile.TemporaryDirectory(prefix="mh-", ignore_cleanup_errors=True) as text:
        directory = Path(text)
        (directory / "state").mkdir()
        async with LoadedStack.running(directory / "state") as stack:
            for seconds in options.seconds:
                for is_updating in (False, True):
                    name = f"{'update' if is_updating else 'idle'}-{seconds:g}"
                    hang = await bus_hangs.hang(
                        stack, name, seconds, directory / name, is_updating=is_updating
                    )
                    print(hang.line(), flush=True)
                    for failure in hang.failed_after(bus_hangs.BACK_WITHIN_S)[:5]:
                        print(f"  failed after the thaw: {failure}")
                    is_well = is_well and not (
                        hang.replaced()
                        or hang.twice
                        or hang.failed_after(bus_hangs.BACK_WITHIN_S)
                        or hang.back_s > bus_hangs.BACK_WITHIN_S
                    )
    return is_well


def main() -> int:
    """0: nothing replaced, nothing run twice, and back within a second; 1: something was not so."""
    parser = argparse.ArgumentParser(prog="python -m bench.hangs", description=__doc__)
    parser.add_argument("--seconds", type=float, nargs="+", default=[4.0, 12.0, 25.0])
    is_well = asyncio.run(measure(parser.parse_args()))
    print("as promised" if is_well else "NOT as promised")
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())

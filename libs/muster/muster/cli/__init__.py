"""The command line, `muster`.

Why its entry point stands here: it comes before all imports of a command, during which the collector of cycles finds
nothing and costs a tenth of the time.
"""

from __future__ import annotations

import gc


def main() -> None:
    """Entry point of the program."""
    gc.disable()
    from muster.cli.main import main as run  # noqa: PLC0415 - as the module's text says

    run()

"""Run one program under Ray Serve, whose proxy listens on a port that is given. Run by a Python with ``ray[serve]``.

Why a launcher: Ray Serve knows no variable for the port that a program gets which names none.
"""

from __future__ import annotations

import argparse
import logging
import os
import runpy
import sys
from pathlib import Path

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--port", type=int)
parser.add_argument("program")
options = parser.parse_args()

import ray  # noqa: E402 - only once the arguments are right: it takes seconds
from ray import serve  # noqa: E402 - as above
from ray.serve.config import HTTPOptions  # noqa: E402 - as above
from ray.serve.context import _get_global_client  # noqa: E402 - as above

HTTPOptions.model_fields["port"].default = options.port
HTTPOptions.model_rebuild(force=True)
sys.argv = [options.program]
sys.path[0] = str(Path(options.program).parent)
ray.init(
    address=os.environ["RAY_ADDRESS"], log_to_driver=False, logging_level=logging.ERROR, namespace="serve"
)
try:
    runpy.run_path(options.program, run_name="__main__")
finally:
    sys.stdout.flush()
    if _get_global_client(raise_if_no_controller_running=False) is not None:
        for name in list(serve.status().applications):
            serve.delete(name)

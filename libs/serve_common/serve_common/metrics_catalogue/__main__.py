"""``python -m serve_common.metrics_catalogue``: the page about metrics, on standard output."""

from __future__ import annotations

import sys

from serve_common.metrics_catalogue.page import page

if __name__ == "__main__":
    sys.stdout.write(page())

"""``python -m serve_common.telemetry.catalogue``: prints METRICS.md."""

from __future__ import annotations

import sys

from serve_common.telemetry.catalogue.page import page

if __name__ == "__main__":
    sys.stdout.write(page())

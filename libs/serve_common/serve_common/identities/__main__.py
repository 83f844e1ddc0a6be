"""``python -m serve_common.identities``: prints plain.conf for a subject prefix."""

from __future__ import annotations

import argparse
import sys

from serve_common.identities.plain import plain_config
from serve_common.names import check_name


def main() -> None:
    """Print the configuration."""
    parser = argparse.ArgumentParser(description="Print plain users for a NATS without identities.")
    parser.add_argument("--subject-prefix", default="serve", help="First token of all subjects.")
    prefix = check_name(parser.parse_args().subject_prefix, "--subject-prefix")
    sys.stdout.write(plain_config(prefix))


if __name__ == "__main__":
    main()

"""``python -m deploy.grafana.boards``: write every dashboard, and remove those that are no longer described."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from deploy.grafana.boards import autoscaling, backend, bus_and_hosts, control_plane, overview, rollouts
from deploy.grafana.boards.grafana_json import dashboard

DIRECTORY: Final = Path(__file__).parents[1] / "dashboards"
BOARDS: Final = {
    "overview": overview.BOARD,
    "backend": backend.BOARD,
    "autoscaling": autoscaling.BOARD,
    "rollouts": rollouts.BOARD,
    "control-plane": control_plane.BOARD,
    "bus-and-hosts": bus_and_hosts.BOARD,
}


def files() -> Iterator[tuple[str, str]]:
    """The name and text of each file."""
    for name, board in BOARDS.items():
        yield f"{name}.json", json.dumps(dashboard(board), indent=1) + "\n"


def main() -> None:
    """Make the directory be what is described."""
    described = dict(files())
    for file in DIRECTORY.glob("*.json"):
        if file.name not in described:
            file.unlink()
    for name, text in described.items():
        (DIRECTORY / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

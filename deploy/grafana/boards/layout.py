"""Where panels stand: from left to right, a new line when the next one does not fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from deploy.grafana.boards.model import WIDTH, Panel, Row


def placed(rows: Sequence[Row]) -> Iterator[tuple[str, int, list[tuple[Panel, int, int]]]]:
    """Each row's heading with its y, and its panels with their x and y."""
    y = 0
    for row in rows:
        heading_y = y
        places, y = _lines(row.panels, y + 1)
        yield row.title, heading_y, places


def _lines(panels: Sequence[Panel], y: int) -> tuple[list[tuple[Panel, int, int]], int]:
    """The places, and the first y below all of them."""
    places: list[tuple[Panel, int, int]] = []
    x, line_height = 0, 0
    for panel in panels:
        if x + panel.width > WIDTH:
            x, y, line_height = 0, y + line_height, 0
        places.append((panel, x, y))
        x += panel.width
        line_height = max(line_height, panel.height)
    return places, y + line_height

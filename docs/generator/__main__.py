"""``python -m docs.generator``: write all reference pages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from docs.generator import admin, cli, configuration, errors, metrics, variables

DIRECTORY: Final = Path(__file__).parents[1] / "reference"


def pages() -> Iterator[tuple[str, str]]:
    """The path below `DIRECTORY` and the text of each page."""
    yield "admin-api.md", admin.page()
    yield "cli.md", cli.page()
    yield "configuration.md", configuration.page()
    yield "errors.md", errors.page()
    yield "metrics.md", metrics.page()
    yield "variables.md", variables.page()
    yield "../../libs/serve_common/serve_common/api/schemas.json", admin.schemas()


def main() -> None:
    """Write every page."""
    for name, text in pages():
        path = DIRECTORY / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

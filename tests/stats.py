"""``make stats``: how long the files are, and what of them is code. Signs, not aims.

Read by the test of the form as well, so that what it refuses is what this prints.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

ROOT: Final = Path(__file__).parents[1]
PRODUCT: Final = ("libs", "services")
LINES_MAX: Final = 500
"""Of a file of the product; a longer one says in its first lines why."""


class SourceFile(msgspec.Struct, frozen=True):
    """One file of Python."""

    module: str
    """Its dotted name, as it is imported."""
    text: str
    tree: ast.Module

    @property
    def lines(self) -> int:
        """All lines."""
        return len(self.text.splitlines())

    @property
    def import_lines(self) -> int:
        """Lines of import statements."""
        return sum(
            (node.end_lineno or node.lineno) - node.lineno + 1
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
        )

    @property
    def code_lines(self) -> int:
        """Lines that are neither blank, nor a comment, nor a docstring, nor an import."""
        prose: set[int] = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import | ast.ImportFrom) or (
                isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            ):
                prose.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        return sum(
            bool(line.strip()) and not line.lstrip().startswith("#") and number not in prose
            for number, line in enumerate(self.text.splitlines(), 1)
        )


def source_files(*folders: str) -> Iterator[SourceFile]:
    """Every Python file below ``folders`` of the repository."""
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            inner = path.relative_to(ROOT).with_suffix("").parts
            parts = inner[2:] if folder in PRODUCT else inner
            module = ".".join(parts).removesuffix(".__init__")
            text = path.read_text(encoding="utf-8")
            yield SourceFile(module, text, ast.parse(text))


def summary(files: list[SourceFile]) -> str:
    """Numbers of files and lines, in one line."""
    total = sum(file.lines for file in files)
    imports = sum(file.import_lines for file in files)
    short = sum(file.code_lines < 40 for file in files)
    return (
        f"{len(files)} files, {total:,} lines, {total / len(files):.0f} a file; imports {imports / total:.1%}; "
        f"{short} files with fewer than 40 lines of code; longest {max(file.lines for file in files)}"
    )


def main() -> None:
    """Print the summaries."""
    print("product:", summary(list(source_files(*PRODUCT))))
    print("tests:  ", summary(list(source_files("tests"))))
    print("bench:  ", summary(list(source_files("bench"))))


if __name__ == "__main__":
    main()

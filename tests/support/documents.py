"""Markdown pages of the project as tests read them: their blocks, their commands, their links."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
_OTHERS = {".venv", ".git", ".muster", "node_modules", ".pytest_cache", ".bench-peers"}
_BLOCK = re.compile(r"(?:<!-- exit: (\d+) -->\n)?^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_CODE = re.compile(r"`([^`]+)`")
_HEADING = re.compile(r"^#{1,6} +(.+?)\s*$", re.MULTILINE)
_FILE_NAME = re.compile(r"# ([\w./-]+\.\w+)\n")
_PROGRAM = re.compile(r"(?:docker|make|muster|nats|python) ")
_ASSIGNMENT = re.compile(r"[A-Z_]+=")


class Command(NamedTuple):
    """One command of a block or a sentence."""

    words: list[str]
    variables: dict[str, str] = {}  # noqa: RUF012 - never changed
    """What stands before it as ``NAME=value``."""
    is_piped: bool = False
    """It reads what the command before it prints."""
    is_background: bool = False
    """The next command does not wait for its end."""

    def __str__(self) -> str:
        """It in one line, without quotes."""
        return " ".join([*(f"{name}={value}" for name, value in self.variables.items()), *self.words])


class Block(NamedTuple):
    """A fenced block."""

    language: str
    text: str
    exit_code: int = 0
    """Exit code that the last of its commands ends with, when a comment before the block says so."""

    @property
    def file_name(self) -> str:
        """The path in its first line, when the block shows a whole file; otherwise empty."""
        found = _FILE_NAME.match(self.text)
        return found[1] if found and self.language != "sh" else ""

    def commands(self) -> Iterator[Command]:
        """Its commands, in order, without redirections and comments."""
        for line in self.text.replace("\\\n", " ").splitlines():
            lexer = shlex.shlex(line, posix=True, punctuation_chars="|;&")
            lexer.whitespace_split = True
            words: list[str] = []
            variables: dict[str, str] = {}
            is_piped = False
            for word in [*lexer, ";"]:
                if word and not word.strip("|;&"):
                    if words:
                        yield Command(words, variables, is_piped, word == "&")
                    words, variables, is_piped = [], {}, word == "|"
                elif words or not _ASSIGNMENT.match(word):
                    words.append(word)
                else:
                    name, _, value = word.partition("=")
                    variables[name] = value


class Page(NamedTuple):
    """One page."""

    path: Path
    text: str

    @property
    def name(self) -> str:
        """Its path in the project."""
        return str(self.path.relative_to(ROOT))

    @property
    def prose(self) -> str:
        """The text without its fenced blocks."""
        return _BLOCK.sub("", self.text)

    def blocks(self, *languages: str) -> list[Block]:
        """Its fenced blocks of ``languages``, in order; all of them if none is given."""
        found = [
            Block(language, text, int(exit_code or 0))
            for exit_code, language, text in _BLOCK.findall(self.text)
        ]
        return [block for block in found if not languages or block.language in languages]

    def inline_code(self) -> list[str]:
        """What stands between backticks in its prose, each in one line."""
        return [" ".join(code.split()) for code in _CODE.findall(self.prose)]

    def inline_commands(self) -> Block:
        """A block of the commands that its sentences name, each once."""
        found = [code for code in self.inline_code() if _PROGRAM.match(code)]
        return Block("sh", "\n".join(dict.fromkeys(found)))

    def links(self) -> list[str]:
        """The targets of its links into the project."""
        text = _CODE.sub("", self.prose)
        return [target for target in _LINK.findall(text) if not re.match(r"[a-z]+:", target)]

    def anchors(self) -> set[str]:
        """The anchors of its headings, as code hosts make them."""
        found = set()
        for heading in _HEADING.findall(self.prose):
            text = _LINK.sub(lambda link: link[0][1:].partition("]")[0], heading).replace("`", "")
            found.add(re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-"))
        return found


def page(name: str) -> Page:
    """The page at ``name`` below the project's root."""
    path = ROOT / name
    return Page(path, path.read_text())


def all_pages() -> list[Page]:
    """Every page of the project."""
    paths = (path for path in ROOT.rglob("*.md") if not _OTHERS & set(path.relative_to(ROOT).parts))
    return [page(str(path.relative_to(ROOT))) for path in sorted(paths)]

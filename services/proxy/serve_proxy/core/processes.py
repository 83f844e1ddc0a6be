"""Rules for the processes of one container: ids, merged metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from serve_common.names import NAME_LENGTH_MAX, ProxyId

PROCESSES_MAX: Final = 64
PARENT_FD: Final = "MUSTER_PROXY_PARENT_FD"
"""Variable with the file descriptor of a child's socket to its parent; set by the parent only."""


def child_id(proxy_id: ProxyId, number: int) -> ProxyId:
    """``<id>-<number>``; an id that is too long keeps its end, where container names differ."""
    suffix = f"-{number}"
    return ProxyId(proxy_id[-(NAME_LENGTH_MAX - len(suffix)) :].lstrip("-_") + suffix)


LABEL = "process"


def merge_metrics(pages: Mapping[str, str]) -> str:
    """One page in Prometheus' text format; each sample gets the label ``process`` with the key of its page.

    The format requires all samples of a family in one group, with its help and type once.

    Why one page: a container is one scrape target, however many processes it runs. So a process that was never meant to
    run is not reported missing, and one that died is not taken for a lost container.
    """
    families: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for process, page in pages.items():
        label = f'{LABEL}="{process}"'
        family = ""
        for line in page.splitlines():
            if line.startswith(("# HELP ", "# TYPE ")):
                family = line.split(" ", 3)[2]
                comments = families.setdefault(family, [])
                if line not in comments:
                    comments.append(line)
            elif line and not line.startswith("#"):
                samples.setdefault(family, []).append(_labelled(line, label))
    lines: list[str] = []
    for family, comments in families.items():
        lines += comments
        lines += samples.get(family, [])
    lines += samples.get("", [])
    return "\n".join([*lines, ""])


def _labelled(line: str, label: str) -> str:
    name_end = line.find(" ")
    brace = line.find("{", 0, name_end)
    if brace < 0:
        return f"{line[:name_end]}{{{label}}}{line[name_end:]}"
    return f"{line[: brace + 1]}{label},{line[brace + 1 :]}"

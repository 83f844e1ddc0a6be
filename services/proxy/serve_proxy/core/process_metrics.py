"""Makes one page of metrics out of the pages of several processes of the same service.

Why: whoever scrapes finds one target for each container, however many processes it runs, so that a process that was
never meant to run is not missed, and one that died is not taken for a lost container.
"""

from __future__ import annotations

from collections.abc import Mapping

LABEL = "process"


def merge_metrics(pages: Mapping[str, str]) -> str:
    """One page in Prometheus' text format; each sample gets the label ``process`` with the key of its page.

    The format wants all samples of a family in one group, so they are gathered; its help and type come once.
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

"""What a dashboard is made of, as far as ours need it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

DATASOURCE_UID: Final = "prometheus"
"""As provisioned in ``provisioning/datasources``."""
WIDTH: Final = 24
"""Columns of Grafana's grid."""


class Kind(Enum):
    """How a panel draws what its queries give."""

    LINES = "timeseries"
    NUMBER = "stat"
    TABLE = "table"
    STATES = "state-timeline"


@dataclass(frozen=True, kw_only=True)
class Query:
    """One PromQL expression of a panel."""

    expr: str
    legend: str = ""
    """With ``{{label}}`` for the label's value; of a table's query: the heading of its column."""
    unit: str = ""
    """Of a table's column, or of a line that differs from the panel's."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """From ``value`` on (None: from the beginning) things look like ``color``."""

    value: float | None
    color: str


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One picture, with a question that it answers."""

    title: str
    description: str
    unit: str
    queries: tuple[Query, ...]
    kind: Kind = Kind.LINES
    width: int = 8
    height: int = 8
    stacked: bool = False
    steps_between: bool = False
    """Lines keep a value until the next one, as numbers of things do."""
    least: float | None = 0
    most: float | None = None
    steps: tuple[Step, ...] = ()
    texts: tuple[tuple[str, str], ...] = ()
    """Values that are shown as words."""
    group_by: str = ""
    """Of a table: the label that its queries have in common."""
    heading: str = ""
    """Of a table: the heading of that label's column."""
    link: Link | None = None

    @property
    def counts_events(self) -> bool:
        """Points less than a minute apart would show fractions of what happens seldom."""
        return any("increase(" in query.expr for query in self.queries)


@dataclass(frozen=True, kw_only=True)
class Link:
    """From a line or cell to another dashboard, where ``variable`` becomes the value of ``label``."""

    title: str
    uid: str
    variable: str
    label: str


@dataclass(frozen=True, kw_only=True)
class Row:
    """Panels under one heading, laid out from left to right, as many lines as it takes."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, kw_only=True)
class Variable:
    """What the reader can choose at the top: values of ``label`` in ``series``; all of them by default."""

    name: str
    title: str
    series: str
    label: str


@dataclass(frozen=True, kw_only=True)
class Annotation:
    """A mark over all panels wherever ``expr`` is above 0."""

    name: str
    expr: str
    text: str
    color: str
    labels: tuple[str, ...] = ()
    """Shown as tags."""


@dataclass(frozen=True, kw_only=True)
class Board:
    """One dashboard."""

    uid: str
    title: str
    description: str
    variables: tuple[Variable, ...]
    annotations: tuple[Annotation, ...]
    rows: tuple[Row, ...]

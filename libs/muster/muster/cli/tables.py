"""How tables, moments and amounts look to a person. Pure rendering; what is shown comes from the controller."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from rich import box
from rich.table import Table
from rich.text import Text

from muster.cli import output, values_given
from serve_common.values.backend_config import BackendConfig
from serve_common.values.endpoint_options import METHODS
from serve_common.values.replica_config import RayActorOptions, ReplicaConfig
from serve_common.wires.views import ReplicaView

_STYLES = {
    **dict.fromkeys(("healthy", "live", "running", "succeeded", "start"), "green"),
    **dict.fromkeys(("updating", "starting", "should_start", "suspect", "leaving", "pending"), "yellow"),
    **dict.fromkeys(("draining", "deleting", "reconfigure", "superseded"), "yellow"),
    **dict.fromkeys(("unhealthy", "lost", "failed", "stop"), "red"),
}
_RUNNING = frozenset({"running", "updating"})


def table(*columns: str) -> Table:
    """An empty table."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in columns:
        made.add_column(column, overflow="fold")
    return made


def styled(value: str) -> Text:
    """A word for a state in its colour."""
    return Text(value, style=_STYLES.get(value, ""))


def print_table(title: str, rows: Table) -> None:
    """A table under its title, or a line that there is none."""
    console = output.get_console()
    if rows.row_count:
        console.print(Text(title, style="bold"))
        console.print(rows)
        console.print()
    else:
        console.print(Text(f"{title}: none", style="bold"))


def print_facts(facts: Mapping[str, str]) -> None:
    """Names and values in two columns; empty values are left out."""
    rows = Table(box=None, show_header=False, pad_edge=False)
    for title, value in facts.items():
        if value:
            rows.add_row(Text(title, style="bold"), styled(value))
    output.get_console().print(rows)


def print_replicas(replicas: Sequence[ReplicaView]) -> None:
    """Each replica in a row."""
    rows = table("replica", "state", "host", "version", "message")
    for replica in replicas:
        rows.add_row(
            Text(output.short_name(replica.replica_tag)),
            styled(replica.state),
            Text(replica.host_id or "-"),
            Text(replica.version or "-"),
            Text(output.brief(replica.message)),
        )
    print_table("Replicas", rows)


def counts(replicas: Sequence[ReplicaView], config: BackendConfig) -> str:
    """How many run, of how many."""
    return f"{sum(replica.state in _RUNNING for replica in replicas)}/{config.num_replicas}"


def config_facts(backend_config: BackendConfig, replica_config: ReplicaConfig) -> dict[str, str]:
    """Both configurations field by field, under the names that they have everywhere."""
    return {**facts_of(replica_config), **facts_of(backend_config)}


def facts_of(fields: msgspec.Struct) -> dict[str, str]:
    """Every field that says something, under its name."""
    named = msgspec.structs.asdict(fields)
    return {name: value_text(value) for name, value in named.items() if value not in ("", [], {}, None)}


def methods_text(methods: Sequence[str]) -> str:
    """HTTP methods, in a word where there are all of them."""
    return "all" if set(methods) == set(METHODS) else ", ".join(methods)


def value_text(value: Any) -> str:
    """A user's value: text as it is, a group of fields as its option takes it, anything else as JSON."""
    if isinstance(value, msgspec.Struct) and not isinstance(value, RayActorOptions):
        return values_given.group_text(value)
    plain = msgspec.to_builtins(value)
    return plain if isinstance(plain, str) else msgspec.json.encode(plain).decode()


def moment(at: float | None) -> str:
    """Seconds since 1970 as a date and time in UTC, as logs have it."""
    return "-" if at is None else datetime.fromtimestamp(at, tz=UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def shares(amounts: Mapping[str, float]) -> str:
    """Weights or proportions by name."""
    return (
        ", ".join(f"{output.short_name(name)}={amount:g}" for name, amount in sorted(amounts.items())) or "-"
    )

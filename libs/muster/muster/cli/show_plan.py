"""What a command would do, for people."""

from __future__ import annotations

from collections import Counter

from rich.text import Text

from muster.cli import output
from muster.cli.intent import Intent
from muster.cli.tables import print_table, styled, table
from serve_common.wires.views import PlanView


def show_plan(view: PlanView, intent: Intent) -> None:
    """Which replicas would start, stop or be reconfigured, and why."""
    if not view.updating:
        output.say(f"nothing to do: {intent.what} {intent.already}")
    elif view.replicas:
        counts = Counter(each.action.value for each in view.replicas)
        would = ", ".join(f"{count} to {action}" for action, count in counts.items())
        rows = table("action", "backend", "replica", "why")
        for each in view.replicas:
            replica = "(new)" if each.replica_tag is None else output.short_name(each.replica_tag)
            rows.add_row(
                styled(each.action.value),
                Text(output.short_name(each.backend_tag)),
                Text(replica),
                Text(each.why),
            )
        print_table(f"{intent.what}: {would}", rows)
    else:
        output.say(f"{intent.what}: would change; no replica is touched")
    for note in view.notes:
        output.say(f"note: {note}")
    output.say("this was a dry run; nothing was changed")

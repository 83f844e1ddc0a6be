"""The console's templates: nothing inline, nothing unescaped, no form without its token."""

from __future__ import annotations

import hashlib
import re
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from jinja2 import Environment, FileSystemLoader, StrictUndefined

ROOT = Path(__file__).parents[3]
CONSOLE = ROOT / "services/console/serve_console"
HOSTILE = "<script>alert(1)</script>\"'"
CSRF = "the-token"


def environment() -> Environment:
    return Environment(
        loader=FileSystemLoader(CONSOLE / "templates"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip


class Page(HTMLParser):
    """The elements of a page, and what of it a strict policy or a reader of forms would refuse."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements = list[tuple[str, dict[str, str | None]]]()
        self.forms = list[list[dict[str, str | None]]]()
        self.open_script = False
        self.faults = list[str]()
        self.words = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.elements.append((tag, found))
        self.faults += [
            f"<{tag} {name}>" for name in found if name == "style" or re.match(r"on|hx-on|data-hx-on", name)
        ]
        self.faults += [
            f"<{tag}> twice {name}" for name, _ in attrs if [key for key, _ in attrs].count(name) > 1
        ]
        if tag == "style" or (tag == "script" and not found.get("src")):
            self.faults.append(f"<{tag}> in the page")
        if tag == "form":
            self.forms.append([])
        if tag == "input" and self.forms:
            self.forms[-1].append(found)

    def handle_data(self, data: str) -> None:
        self.words += data

    def all(self, name: str) -> list[dict[str, str | None]]:
        return [attrs for _, attrs in self.elements if name in (attrs.get("class") or "").split()]


COMPONENTS = """
{% extends "base.html" %}
{% import "macros.html" as ui %}
{% block title %}{{ bad }}{% endblock %}
{% block header %}{{ ui.title(bad, bad, crumbs=[(bad, "/")], after=ui.badge(bad)) }}{% endblock %}
{% block actions %}{{ ui.action_button(bad, "/do", csrf, fields={"name": bad}) }}
{{ ui.action_button(bad, "/do", csrf, kind="danger", confirm=bad) }}
{{ ui.link_button(bad, "/", symbol="plus") }}{% endblock %}
{% block content %}
{{ ui.dots([{"state": bad, "name": bad}, {"state": "RUNNING", "name": bad}]) }}
{{ ui.split_bar([{"name": bad, "weight": 3}, {"name": "canary", "weight": 1}]) }}
{{ ui.stat(bad, bad, bad, unit=bad, tone="good", points=[1, 2]) }}
{{ ui.keyvalue([(bad, bad)]) }}{{ ui.code(bad, bad) }}{{ ui.copy(bad) }}
{% for type in ["text", "password", "textarea", "checkbox", "select"] %}
{{ ui.field("x-" ~ type, bad, value=bad, type=type, hint=bad, error=bad,
            options=[bad, ("other", bad)], placeholder=bad) }}
{% endfor %}
{{ ui.empty(bad, bad) }}{{ ui.progress([bad, {"name": bad, "hint": bad}], 1, bad) }}
{{ ui.timeline([{"at": 0, "title": bad, "text": bad, "tone": "bad"}]) }}
{{ ui.log([{"at": 0, "level": bad, "source": bad, "text": bad}], bad) }}
{{ ui.diff(["+" ~ bad, "-" ~ bad, "@@" ~ bad, " " ~ bad], bad) }}{{ ui.tabs([("a", bad, "/", 3)], "a", bad) }}
{{ ui.flash(bad, "bad") }}{{ ui.chart(bad, [1, 2], [{"name": bad, "values": [1, none]}], unit=bad) }}
{{ ui.sparkline([1, 2, 3], bad) }}
{% endblock %}
"""


def shell(**more: Any) -> dict[str, Any]:
    return {
        "person": {"name": HOSTILE, "role": HOSTILE}, "page": "now", "csrf": CSRF, "form_csrf": CSRF, "theme": "dark",
        "banner": {"kind": "bad", "text": HOSTILE, "hint": HOSTILE}, "flashes": [{"text": HOSTILE, "kind": "good"}],
        **more,
    }  # fmt: skip


def pages() -> dict[str, str]:
    templates = environment()
    error = {"error_status": 404, "title": HOSTILE, "message": HOSTILE}
    return {
        "components": templates.from_string(COMPONENTS).render(shell(bad=HOSTILE)),
        "sign-in": templates.get_template("sign_in.html").render(
            csrf=CSRF, form_csrf=CSRF, error=HOSTILE, name=HOSTILE, next=HOSTILE
        ),
        "error": templates.get_template("error.html").render(shell(**error)),
    }


@pytest.mark.parametrize("name", ["components", "sign-in", "error"])
def test_a_page_has_nothing_inline_and_nothing_unescaped(name: str) -> None:
    text = pages()[name]
    page = Page(text)
    assert page.faults == []
    assert "<script>" not in text
    assert HOSTILE in page.words
    assert [attrs["src"] for tag, attrs in page.elements if tag == "script"] == [
        "/static/vendor/htmx/htmx.min.js", "/static/vendor/htmx-ext-sse/sse.js",
        "/static/vendor/uplot/uPlot.iife.min.js", "/static/console.js",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["components", "sign-in", "error"])
def test_each_form_has_the_token(name: str) -> None:
    forms = Page(pages()[name]).forms
    assert forms
    for inputs in forms:
        assert [field["value"] for field in inputs if field["name"] == "csrf"] == [CSRF]


def test_each_file_that_a_page_names_is_there() -> None:
    page = Page(pages()["components"])
    named = [
        attrs.get("src") or attrs.get("href") for tag, attrs in page.elements if tag in ("script", "link")
    ]
    assert [name for name in named if not name or not (CONSOLE / name.removeprefix("/")).is_file()] == []


def test_each_label_and_description_points_at_something() -> None:
    for text in pages().values():
        page = Page(text)
        ids = [attrs["id"] for _, attrs in page.elements if "id" in attrs]
        assert len(ids) == len(set(ids))
        wanted = [attrs.get("for") or "" for tag, attrs in page.elements if tag == "label"]
        for _, attrs in page.elements:
            wanted += (attrs.get("aria-describedby") or "").split()
        assert set(wanted) <= set(ids)


def test_the_theme_and_the_current_entry_are_marked() -> None:
    page = Page(pages()["components"])
    assert page.elements[0] == ("html", {"lang": "en", "data-theme": "dark"})
    current = [
        attrs["href"] for tag, attrs in page.elements if tag == "a" and attrs.get("aria-current") == "page"
    ]
    assert current[0] == "/"
    unsigned = Page(environment().get_template("base.html").render(theme="<x>"))
    assert unsigned.elements[0] == ("html", {"lang": "en"})
    assert unsigned.forms == []
    assert unsigned.all("nav") == []


def macro(name: str, *args: Any, **more: Any) -> str:
    return str(getattr(environment().get_template("macros.html").module, name)(*args, **more))


@pytest.mark.parametrize(
    "moment",
    [0, 59.999, 951_782_400, 951_868_799, 1_709_164_800, 1_735_689_599, 1_798_761_600.5, 4_107_542_400],
)
def test_a_moment_is_written_as_the_calendar_has_it(moment: float) -> None:
    assert macro("utc", moment) == datetime.fromtimestamp(int(moment), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def test_every_day_of_forty_years_is_the_right_one() -> None:
    template = environment().from_string(
        '{% from "macros.html" import utc %}{% for day in days %}{{ utc(day) }} {% endfor %}'
    )
    days = range(0, 40 * 365 * 86400, 86400)
    assert template.render(days=days).split() == [
        datetime.fromtimestamp(day, UTC).strftime("%Y-%m-%dT%H:%M:%SZ") for day in days
    ]


def test_replicas_are_told_in_words_too() -> None:
    states = ["running", "running", "STARTING", "failed", "draining", "should_start", "never heard of"]
    text = macro("dots", [{"state": state, "name": f"a#{at}"} for at, state in enumerate(states)])
    assert "2 running, 1 starting, 1 unhealthy, 1 stopping, 2 waiting" in text
    assert "none" in macro("dots", [])
    many = Page(macro("dots", [{"state": "running", "name": "a"}] * 60))
    assert len(many.all("dot")) == 48
    assert "+12" in many.words


def test_a_split_adds_up() -> None:
    text = macro(
        "split_bar",
        [{"name": "stable", "weight": 190}, {"name": "canary", "weight": 9}, {"name": "none", "weight": 0}],
    )
    assert 'aria-label="stable 95.5 %, canary 4.5 %, none 0 %"' in text
    bars = [attrs for tag, attrs in Page(text).elements if tag == "rect"]
    assert [bar["class"] for bar in bars] == ["series-1", "series-2"]
    assert macro("split_bar", [{"name": "a", "weight": 0}])


def test_the_files_of_others_are_those_that_are_listed() -> None:
    for folder in (CONSOLE / "static/vendor", ROOT / "tests/vendor/axe-core"):
        listed = dict(re.findall(r"\| `([^`]+)` \| `([0-9a-f]{64})` \|", (folder / "README.md").read_text()))
        files = [path for path in folder.rglob("*") if path.suffix in (".js", ".css")]
        assert listed == {
            str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files
        }
        assert all((path.parent / "LICENSE").is_file() for path in files)

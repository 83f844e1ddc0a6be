"""Every alert has a severity, numbers, a test of its own and a paragraph in the runbook, and watches what exists."""

from __future__ import annotations

import re
from typing import Any

import pytest
import typer
import yaml

from muster.cli.main import app as cli
from serve_common.telemetry.catalogue import MetricKind, spec_of
from tests.dashboards.checker import OTHERS
from tests.dashboards.promql_words import grouping_labels, selectors
from tests.dashboards.reading import ROOT

PROMETHEUS = ROOT / "deploy/prometheus"
RUNBOOK = (ROOT / "RUNBOOK.md").read_text()
PARTS_OF_A_PARAGRAPH = ("For users", "Look", "Causes", "Do", "Do not")


def seconds(duration: str) -> int:
    """As Prometheus writes them: ``1m30s``."""
    units = {"h": 3600, "m": 60, "s": 1}
    return sum(int(number) * units[unit] for number, unit in re.findall(r"(\d+)([hms])", duration))


def load(directory: str) -> list[dict[str, Any]]:
    return [yaml.safe_load(file.read_text()) for file in sorted((PROMETHEUS / directory).glob("*.yml"))]


ALERTS: dict[str, dict[str, Any]] = {
    rule["alert"]: rule for file in load("rules") for group in file["groups"] for rule in group["rules"]
}
CASES: dict[str, dict[str, Any]] = {case["name"]: case for file in load("tests") for case in file["tests"]}


def test_prometheus_reads_the_rules_and_looks_at_them_as_often_as_it_scrapes() -> None:
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    assert config["rule_files"] == ["/etc/prometheus/rules/*.yml"]
    assert config["global"]["evaluation_interval"] == config["global"]["scrape_interval"]
    compose = yaml.safe_load((ROOT / "compose.yaml").read_text())
    assert "./deploy/prometheus:/etc/prometheus:ro" in compose["services"]["prometheus"]["volumes"]


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_says_how_bad_it_is_what_it_means_and_where_to_read_on(name: str) -> None:
    alert = ALERTS[name]
    assert alert["labels"]["severity"] in {"critical", "warning"}
    assert alert["annotations"]["summary"]
    assert re.search(r"\d|\$value|a minute", alert["annotations"]["description"]), "has no number"
    assert alert["annotations"]["runbook"] == f"RUNBOOK.md#{name.lower()}"


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_watches_only_what_exists(name: str) -> None:
    found = selectors(ALERTS[name]["expr"])
    labels: set[str] = set()
    for selector in found:
        spec = spec_of(selector.metric)
        if spec is None:
            assert selector.metric in OTHERS, selector
            labels |= OTHERS[selector.metric]
            continue
        assert selector.metric in spec.series, selector
        assert (spec.kind is MetricKind.GAUGE) == (selector.function not in {"rate", "increase"}), selector
        labels |= {*spec.labels, "job", "instance", "le"}
        assert {label for label, _, _ in selector.filters} <= {*spec.labels, "job", "instance"}, selector
    assert found
    assert grouping_labels(ALERTS[name]["expr"]) <= labels
    shown = set(re.findall(r"\$labels\.(\w+)", str(ALERTS[name]["annotations"])))
    assert shown <= labels


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_is_tested_before_while_and_after_it_fires_and_just_below(name: str) -> None:
    looks = CASES[name]["alert_rule_test"]
    assert {look["alertname"] for look in looks} == {name}
    fires_at = [seconds(look["eval_time"]) for look in looks if look["exp_alerts"]]
    silent_at = [seconds(look["eval_time"]) for look in looks if not look["exp_alerts"]]
    assert len(fires_at) == 1
    assert 0 < fires_at[0] - max(time for time in silent_at if time < fires_at[0]) <= 10
    assert max(silent_at) > fires_at[0]
    below = CASES[f"{name}, just below"]["alert_rule_test"]
    assert len(below) >= 2
    assert all(look["alertname"] == name and not look["exp_alerts"] for look in below)
    assert max(seconds(look["eval_time"]) for look in below) >= seconds(ALERTS[name].get("for", "0s"))


def test_there_is_no_test_of_an_alert_that_is_gone() -> None:
    assert {name.partition(",")[0] for name in CASES} == set(ALERTS)


@pytest.mark.parametrize("name", ALERTS)
def test_the_runbook_has_a_paragraph_for_the_alert(name: str) -> None:
    _, _, rest = RUNBOOK.partition(f"\n### {name}\n")
    paragraph = re.split(r"\n##", rest)[0]
    for part in PARTS_OF_A_PARAGRAPH:
        assert f"**{part}.**" in paragraph, part
    assert "`" in paragraph, "names no command"


def test_the_runbook_speaks_of_no_alert_and_no_metric_that_does_not_exist() -> None:
    assert set(re.findall(r"^### (\w+)$", RUNBOOK, re.MULTILINE)) == set(ALERTS)
    for metric in set(re.findall(r"\b(?:serve|process)_[a-z]+_[a-z_]+\b", RUNBOOK)):
        spec = spec_of(metric)
        assert metric in OTHERS or (spec is not None and metric in spec.series), metric


def command_exists(words: list[str]) -> bool:
    """Whether the CLI has that command, as far as ``words`` are commands."""
    command: Any = typer.main.get_command(cli)
    for word in words:
        if not hasattr(command, "commands"):
            return True
        if word not in command.commands:
            return False
        command = command.commands[word]
    return True


def test_every_command_in_the_runbook_exists() -> None:
    text = re.sub(r"\n", " ", RUNBOOK)
    commands = re.findall(r"`muster ([a-z][^`]*)`", text)
    assert len(commands) > 20
    for command in commands:
        assert command_exists(re.findall(r"^[a-z]+(?: [a-z]+)?", command)[0].split()), command
    services = set(yaml.safe_load((ROOT / "compose.yaml").read_text())["services"])
    named = re.findall(r"docker compose (?:restart|exec|up -d|ps|logs --since \w+) ([a-z][a-z-]+)", text)
    assert set(named) <= services, set(named) - services

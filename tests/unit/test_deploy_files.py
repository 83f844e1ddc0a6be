"""What is deployed must name what exists: files, secrets, packages, ports and metrics.

Why: nothing else notices a dashboard that shows a metric of yesterday, or a secret that nobody generates, before a
person looks at an empty panel at night.
"""

from __future__ import annotations

import ast
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from muster.secrets import NAMES, NATS_INCLUDE

ROOT = Path(__file__).parents[2]
SERVICES = ("controller", "proxy", "replica-host")
END_OF_BASE = "# --- end of base\n"
METRIC = re.compile(r"serve_(?:controller|proxy|replica|host)_[a-z_]+")
SERIES_ENDINGS = ("_total", "_bucket", "_sum", "_count", "_created")


def load_yaml(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text())


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = load_yaml("compose.yaml")
    return loaded


def with_defaults(value: str) -> str:
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", value)


def dockerfile(service: str) -> str:
    return (ROOT / "services" / service / "Dockerfile").read_text()


def family(series: str) -> str:
    for ending in SERIES_ENDINGS:
        series = series.removesuffix(ending)
    return series


def families_in(text: str) -> set[str]:
    return {family(name) for name in METRIC.findall(text)}


def families_in_the_code() -> set[str]:
    found = set()
    for file in [
        *ROOT.glob("services/*/*/adapters/*metrics*.py"),
        *ROOT.glob("libs/*/*/adapters/*metrics*.py"),
    ]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
                name = node.args[0].value
                if isinstance(name, str) and METRIC.fullmatch(name):
                    found.add(family(name))
    return found


def queries(dashboard: dict[str, Any]) -> Iterator[str]:
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            yield target["expr"]


def dashboard() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((ROOT / "deploy/grafana/dashboards/muster.json").read_text())
    return loaded


def test_the_dashboard_shows_every_metric_that_exists_and_none_that_does_not() -> None:
    shown = families_in("\n".join(queries(dashboard())))
    assert len(shown) > 10
    assert shown == families_in_the_code()


def test_alerts_watch_metrics_that_exist() -> None:
    rules = [
        rule["expr"]
        for group in load_yaml("deploy/prometheus/rules.yml")["groups"]
        for rule in group["rules"]
    ]
    watched = families_in("\n".join(rules))
    assert watched
    assert watched <= families_in_the_code()


def test_every_panel_has_its_own_place_and_asks_the_provisioned_data_source() -> None:
    panels = dashboard()["panels"]
    uid = load_yaml("deploy/grafana/provisioning/datasources/prometheus.yaml")["datasources"][0]["uid"]
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert {panel["datasource"]["uid"] for panel in panels if panel["type"] != "row"} == {uid}


def test_the_images_share_their_base_to_the_letter() -> None:
    bases = {dockerfile(service).partition(END_OF_BASE)[0] for service in SERVICES}
    assert len(bases) == 1
    assert all(END_OF_BASE in dockerfile(service) for service in SERVICES)


def test_images_copy_what_exists_and_what_the_ignore_file_lets_through() -> None:
    ignored = {line.rstrip("/") for line in (ROOT / ".dockerignore").read_text().splitlines()}
    for service in SERVICES:
        for line in re.sub(r"\\\n", " ", dockerfile(service)).splitlines():
            if not line.startswith("COPY ") or "$" in line:
                continue
            for source in line.split()[1:-1]:
                assert (ROOT / source).exists(), line
                assert source.split("/")[0] not in ignored, line


def test_an_image_runs_as_nobody_in_particular() -> None:
    for service in SERVICES:
        users = re.findall(r"^USER (.+)$", dockerfile(service), re.MULTILINE)
        assert users == ["10001:10001"]


def test_the_build_context_holds_no_secret() -> None:
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {"secrets", ".muster", ".env", ".git"} <= set(ignored)


def test_compose_mounts_and_builds_what_exists(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        for volume in service.get("volumes", []):
            source = with_defaults(volume).split(":")[0]
            assert (ROOT / source).exists() if source.startswith(".") else source in compose["volumes"], name
        build = service.get("build")
        if build:
            assert (ROOT / build["context"] / build.get("dockerfile", "Dockerfile")).is_file(), name
            extra = with_defaults(build.get("args", {}).get("EXTRA_REQUIREMENTS", ""))
            assert (ROOT / extra).exists(), name


def test_scripts_that_containers_run_may_be_run_or_read_by_everybody() -> None:
    for script in (ROOT / "deploy").rglob("*"):
        if script.is_file():
            assert script.stat().st_mode & 0o004, script
    assert os.access(ROOT / "deploy/ingress/healthcheck.sh", os.R_OK)


def test_compose_uses_secrets_that_are_generated_and_declares_no_other(compose: dict[str, Any]) -> None:
    files = {
        name: Path(secret["file"]).name.rpartition("}/")[2] for name, secret in compose["secrets"].items()
    }
    assert set(files.values()) <= {*NAMES, NATS_INCLUDE}
    used = {
        secret if isinstance(secret, str) else secret["source"]
        for service in compose["services"].values()
        for secret in service.get("secrets", [])
    }
    assert used == set(files)


def test_a_password_file_that_a_service_is_told_of_is_mounted_into_it(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        mounted = {
            f"/run/secrets/{secret}" for secret in service.get("secrets", []) if isinstance(secret, str)
        }
        told = {
            value for key, value in service.get("environment", {}).items() if value and key.endswith("_FILE")
        }
        assert told <= mounted, name


def test_every_service_is_watched_limited_and_has_a_health_check(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        assert service["healthcheck"]["test"], name
        assert service["logging"]["options"]["max-size"], name
        assert service["cap_drop"] == ["ALL"], name
        assert service["restart"] == "unless-stopped", name


def test_prometheus_scrapes_the_operations_port_of_every_service(compose: dict[str, Any]) -> None:
    jobs = {job["job_name"]: job for job in load_yaml("deploy/prometheus/prometheus.yml")["scrape_configs"]}
    for service in SERVICES:
        (discovery,) = jobs[service]["dns_sd_configs"]
        assert discovery["names"] == [service]
        port = compose["services"][service]["environment"]["SERVE_OPS_PORT"]
        assert str(discovery["port"]) == port
        assert f":{port}/readyz" in compose["services"][service]["healthcheck"]["test"][-1]


def test_only_the_ingress_is_published_beyond_this_machine(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        for port in service.get("ports", []):
            assert name == "ingress" or with_defaults(port).startswith("127.0.0.1:"), port

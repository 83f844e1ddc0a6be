"""What is deployed must name what exists: files, secrets, packages and ports.

Why: nothing else notices a secret that nobody generates, or a port that nobody listens on, before a person does at
night. Dashboards and alert rules have tests of their own.
"""

from __future__ import annotations

import os
import re
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from deploy.images import install_dependencies
from muster.secrets import FILES
from serve_common.runtime.settings import Environment
from serve_common.telemetry.trace_context import ALWAYS, read_tracing_settings
from serve_console.settings import read_settings as read_console_settings
from serve_proxy.settings import read_settings
from tests.support.paths import ROOT

SERVICES = ("console", "controller", "proxy", "replica-host")
TRACED = ("controller", "proxy", "replica-host")
END_OF_BASE = "# --- end of base\n"


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


def test_every_locked_file_has_hashes_and_no_address() -> None:
    lock = (ROOT / "requirements.lock").read_text()
    locked = install_dependencies.read_lock(lock)
    assert len(locked) > 90
    for name, (block, _) in locked.items():
        assert re.match(r"[\w.\[\]-]+==\S+", block), name
        assert "--hash=sha256:" in block, name
    assert "://" not in lock
    assert "--generate-hashes" in (makefile := (ROOT / "Makefile").read_text())
    assert makefile.count("--require-hashes -r") == 2


@pytest.mark.parametrize(
    "package", ["libs/serve_common", "libs/muster", *(f"services/{name}" for name in SERVICES)]
)
def test_an_image_gets_all_that_its_packages_depend_on_from_the_lock(package: str) -> None:
    locked = install_dependencies.read_lock((ROOT / "requirements.lock").read_text())
    asked = [
        Requirement(each) for each in install_dependencies.requirements_of(ROOT / package / "pyproject.toml")
    ]
    wanted = {install_dependencies.name_of(each.name) for each in asked}
    chosen = install_dependencies.locked_for(wanted, locked)
    assert chosen <= set(locked)
    needed: set[str] = set()
    todo = asked
    while todo:
        requirement = todo.pop()
        name = install_dependencies.name_of(requirement.name)
        if name in needed:
            continue
        needed.add(name)
        for each in map(Requirement, distribution(name).requires or ()):
            extras = requirement.extras or {""}
            if each.marker is None or any(each.marker.evaluate({"extra": extra}) for extra in extras):
                todo.append(each)
    assert needed <= chosen


def test_a_list_of_requirements_is_read_with_comments_and_versions(tmp_path: Path) -> None:
    file = tmp_path / "requirements.txt"
    file.write_text("# models\nscikit-learn\n\nPillow >= 1  # of the example\n")
    found = install_dependencies.requirements_of(file)
    assert found == ["scikit-learn", "Pillow >= 1"]
    assert [install_dependencies.name_of(each) for each in found] == ["scikit-learn", "pillow"]


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
    assert set(files.values()) <= set(FILES)
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


def named(compose: dict[str, Any], service: str) -> set[str]:
    """Names of a service besides its own."""
    networks = compose["services"][service]["networks"]
    every = networks.values() if isinstance(networks, dict) else ()
    return {alias for network in every for alias in network.get("aliases", [])}


def test_every_service_has_limits_that_can_be_chosen(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        for key, variable in (("mem_limit", "MEMORY"), ("cpus", "CPUS"), ("pids_limit", "PIDS")):
            given = re.fullmatch(r"\$\{(\w+):-(\w+)\}", service[key])
            assert given is not None, (name, key)
            assert given[1] == f"MUSTER_{name.upper().replace('-', '_')}_{variable}"
            # The engine refuses more CPUs than there are; only user code may have all of them, and comes last.
            assert key != "cpus" or given[2] in ("1", "2") or (name, given[2]) == ("replica-host", "0")
        assert service.get("cpu_shares", 1024) == (256 if name == "replica-host" else 1024)


def test_replicas_share_a_network_only_with_those_who_listen_elsewhere(compose: dict[str, Any]) -> None:
    """What they would find there is proved from inside a container, in tests/compose."""
    services = compose["services"]
    assert services["replica-host"]["networks"] == ["replicas"]
    beside = {name for name, service in services.items() if "replicas" in service["networks"]}
    assert beside == {"replica-host", "nats", "controller", "prometheus", "jaeger"}
    for name in beside - {"replica-host"}:
        aliases = {
            network: (told or {}).get("aliases") for network, told in services[name]["networks"].items()
        }
        assert aliases["monitoring"] == [f"{name}-monitoring"]
        assert not any(told for network, told in aliases.items() if network != "monitoring")
    assert services["controller"]["environment"]["MUSTER_OPS_HOST"] == "127.0.0.1,controller-monitoring"
    assert "--web.listen-address=prometheus-monitoring:9090" in services["prometheus"]["command"]
    assert 'http: "nats-monitoring:8222"' in (ROOT / "deploy/nats/compose.conf").read_text()
    assert {"postgres", "controller"} == {
        name for name, service in services.items() if "store" in service["networks"]
    }
    assert set(compose["networks"]) == {each for service in services.values() for each in service["networks"]}


def test_what_is_published_is_in_the_first_of_its_networks(compose: dict[str, Any]) -> None:
    """Through which the engine reaches it; for what listens on one network alone."""
    for name in ("prometheus", "jaeger"):
        assert min(compose["services"][name]["networks"]) == "monitoring"


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
        (name,) = discovery["names"]
        assert name.removesuffix("-monitoring") == service
        assert name == service or name in named(compose, service)
        port = compose["services"][service]["environment"]["MUSTER_OPS_PORT"]
        assert str(discovery["port"]) == port
        assert f":{port}/readyz" in compose["services"][service]["healthcheck"]["test"][-1]


def test_every_service_takes_tracing_from_one_variable_and_is_silent_without_it(
    compose: dict[str, Any],
) -> None:
    for service in TRACED:
        environment = compose["services"][service]["environment"]
        told = {name: with_defaults(value) for name, value in environment.items() if name.startswith("OTEL_")}
        assert told["OTEL_EXPORTER_OTLP_ENDPOINT"] == ""
        assert read_tracing_settings(told) is None
        settings = read_tracing_settings({**told, "OTEL_EXPORTER_OTLP_ENDPOINT": "http://jaeger:4318"})
        assert settings is not None
        assert (settings.sampler, settings.complaints) == (ALWAYS, [])


def test_the_trace_viewer_listens_where_it_is_looked_for(compose: dict[str, Any]) -> None:
    viewer = compose["services"]["jaeger"]
    assert viewer["profiles"] == ["tracing"]
    config = load_yaml("deploy/otel/jaeger.yaml")
    assert config["receivers"]["otlp"]["protocols"]["http"]["endpoint"].endswith(":4318")
    assert config["extensions"]["jaeger_query"]["http"]["endpoint"].endswith(":16686")
    assert config["extensions"]["healthcheckv2"]["http"]["endpoint"] in viewer["healthcheck"]["test"][-1]
    pipeline = config["service"]["pipelines"]["traces"]
    for part, names in pipeline.items():
        assert set(names) <= set(config[part])
    assert set(config["service"]["extensions"]) == set(config["extensions"])


def test_prometheus_sends_alerts_where_compose_runs_alertmanager(compose: dict[str, Any]) -> None:
    service = compose["services"]["alertmanager"]
    assert service["profiles"] == ["alerts"]
    [found] = load_yaml("deploy/prometheus/prometheus.yml")["alerting"]["alertmanagers"]
    [discovery] = found["dns_sd_configs"]
    assert discovery["names"] == ["alertmanager"]
    assert f"--web.listen-address=:{discovery['port']}" in service["command"]
    assert set(service["networks"]) & set(compose["services"]["prometheus"]["networks"]) == {"monitoring"}
    [config, _] = service["volumes"]
    assert with_defaults(config) == "./deploy/alertmanager:/etc/alertmanager:ro"
    loaded = load_yaml("deploy/alertmanager/alertmanager.yml")
    receivers = {receiver["name"] for receiver in loaded["receivers"]}
    assert {
        loaded["route"]["receiver"],
        *(each["receiver"] for each in loaded["route"]["routes"]),
    } <= receivers
    [webhook] = [each for each in loaded["receivers"] if each["name"] == loaded["route"]["receiver"]]
    assert "host.docker.internal" in webhook["webhook_configs"][0]["url"]
    assert service["extra_hosts"] == ["host.docker.internal:host-gateway"]


def test_the_override_for_https_names_variables_of_the_proxy_and_files_that_it_mounts() -> None:
    services = load_yaml("deploy/ingress/tls.yaml")["services"]
    proxy = services["proxy"]
    settings = read_settings(
        Environment({"MUSTER_NATS_PASSWORD": "x", "MUSTER_PROXY_ID": "p", **proxy["environment"]})
    )
    assert settings.tls is not None
    [(source, mount, mode)] = [volume.rsplit(":", 2) for volume in proxy["volumes"]]
    assert {str(Path(str(each)).parent) for each in (settings.tls.cert_file, settings.tls.key_file)} == {
        mount
    }
    assert (source.startswith("${MUSTER_TLS:?"), mode) == (True, "ro")
    assert ".if defined(MUSTER_TLS)" in (ROOT / "deploy/ingress/haproxy.cfg").read_text()
    assert services["ingress"]["environment"] == {"MUSTER_TLS": "1"}


def test_only_the_ingress_is_published_beyond_this_machine(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        for port in service.get("ports", []):
            assert name == "ingress" or with_defaults(port).startswith("127.0.0.1:"), port


def test_the_controller_reads_the_state_of_nats_where_nats_shows_it(compose: dict[str, Any]) -> None:
    shown = re.search(r'^http: "(.+)"$', (ROOT / "deploy/nats/compose.conf").read_text(), re.MULTILINE)
    assert shown is not None
    told = compose["services"]["controller"]["environment"]["MUSTER_NATS_MONITOR_URL"]
    assert told == f"http://{shown[1]}"
    assert "--http_port" not in compose["services"]["nats"]["command"]


def test_the_console_is_where_no_user_code_is_and_reads_the_file_of_people(compose: dict[str, Any]) -> None:
    services = compose["services"]
    console = services["console"]
    assert console["networks"] == ["monitoring"]
    beside = {name for name, service in services.items() if "monitoring" in service["networks"]}
    assert not beside & {"proxy", "replica-host"}
    assert "monitoring" in services["nats"]["networks"]
    assert console["secrets"] == ["console_users"]
    assert list(console["depends_on"]) == ["nats"]
    told = {name: with_defaults(value) for name, value in console["environment"].items() if value}
    settings = read_console_settings(Environment(told))
    assert (settings.http_host, settings.http_port) == ("0.0.0.0", 8080)
    assert str(settings.people_file) == "/run/secrets/console_users"
    assert (settings.apps_dir, settings.trusted, settings.is_https) == ("/apps", None, False)

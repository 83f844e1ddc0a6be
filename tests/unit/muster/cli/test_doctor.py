"""`muster doctor`: each part that is not well is found, with advice, and the exit code says whether something fails."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from typer.testing import Result

from muster.cli import doctor
from serve_common.api.views import DeploymentStatus, LoadView
from serve_common.clock import SystemClock
from serve_common.errors import BusAuthorizationFailed, BusUnavailable, TransientError
from serve_common.nats.protocol import Greeting
from tests.unit.muster.cli.conftest import DEPLOYMENT, HOST, PROXY, STATUS, PlayedController

Run = Callable[..., Result]


class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/-/healthz" else 404)
        self.end_headers()

    def log_message(self, *_arguments: Any) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def proxy_address() -> Iterator[str]:
    """A proxy that is well."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Health) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture
def well(controller: PlayedController, proxy_address: str) -> PlayedController:
    proxy = msgspec.structs.replace(PROXY, address=proxy_address)
    controller.answers["get_status"] = msgspec.structs.replace(STATUS, proxies=[proxy])
    controller.answers["get_load"] = lambda _query: load()
    controller.nats = Greeting(version="2.12.1", jetstream=True)
    return controller


def load(offset_s: float = 0.0, unreachable: tuple[str, ...] = ()) -> LoadView:
    return LoadView(
        at=SystemClock().now() + offset_s, endpoints=[], backends=[], unreachable=list(unreachable)
    )


def examine(muster: Run) -> tuple[int, dict[str, dict[str, str]]]:
    """The exit code, and the check of each part, the worst one where it has several."""
    result = muster("doctor", "--json")
    checks: dict[str, dict[str, str]] = {}
    for check in json.loads(result.stdout):
        if checks.get(check["part"], {}).get("outcome", "ok") == "ok":
            checks[check["part"]] = check
    for check in checks.values():
        assert (check["outcome"] == "ok") == ("advice" not in check), check
    return result.exit_code, checks


def test_a_stack_that_is_well_has_nothing_to_do(muster: Run, well: PlayedController, tmp_path: Any) -> None:
    creds = tmp_path / "admin.creds"
    creds.touch()
    result = muster("doctor", "--creds", str(creds))
    assert result.exit_code == 0, result.output
    shown = [line.split()[:2] for line in result.stdout.splitlines()]
    parts = "nats controller postgres hosts proxies http versions clocks deployments"
    assert shown == [["ok", part] for part in parts.split()], result.stdout
    assert "nats-server 2.12.1 with JetStream" in result.stdout
    assert "1 live, with 2 CPU, 2.5 GiB memory, and 2 replicas" in result.stdout


def replaced(**changes: Any) -> Callable[[PlayedController], None]:
    def change(controller: PlayedController) -> None:
        controller.answers["get_status"] = msgspec.structs.replace(
            controller.answers["get_status"], **changes
        )

    return change


def answered(**answers: Any) -> Callable[[PlayedController], None]:
    return lambda controller: controller.answers.update(answers)


def behind(**changes: Any) -> Callable[[PlayedController], None]:
    def change(controller: PlayedController) -> None:
        view = controller.answers["get_status"]
        proxies = [msgspec.structs.replace(each, **changes) for each in view.proxies]
        controller.answers["get_status"] = msgspec.structs.replace(view, proxies=proxies)

    return change


def greeted(**fields: Any) -> Callable[[PlayedController], None]:
    return lambda controller: setattr(controller, "nats", Greeting(**fields))


UNWELL = msgspec.structs.replace(DEPLOYMENT, status=DeploymentStatus.UNHEALTHY, message="boom")


@pytest.mark.parametrize(
    ("change", "part", "outcome", "said"),
    [
        (greeted(version="2.12.1"), "nats", "fail", "without JetStream"),
        (greeted(version="2.9.3", jetstream=True), "nats", "warn", "2.9.3"),
        (lambda _controller: None, "identities", "warn", "plain users"),
        (replaced(store_available=False), "postgres", "fail", "changes are refused"),
        (replaced(store_restored_at=1.0), "postgres", "warn", "restored"),
        (replaced(hosts=[]), "hosts", "fail", "none reports"),
        (replaced(hosts=[msgspec.structs.replace(HOST, status="lost")]), "hosts", "fail", "none of 1 is live"),
        (
            replaced(hosts=[HOST, msgspec.structs.replace(HOST, host_id="b", status="lost")]),
            "hosts", "warn", "b is lost: silent",
        ),
        (replaced(hosts=[msgspec.structs.replace(HOST, draining=True)]), "hosts", "warn", "host-1 is drained"),
        (replaced(proxies=[]), "proxies", "fail", "none reports"),
        (behind(applied_snapshot_id=1), "proxies", "warn", "newest routes yet"),
        (behind(address="127.0.0.1:1"), "http", "fail", "refused"),
        (answered(get_load=lambda _: load(-5.0)), "clocks", "warn", "s behind this machine's"),
        (answered(get_load=lambda _: load(500.0)), "clocks", "fail", "s ahead of this machine's"),
        (answered(get_load=lambda _: load(unreachable=("host:1",))), "metrics", "warn", "host:1"),
        (answered(get_load=TransientError("away")), "clocks", "warn", "could not be checked: away"),
        (answered(version="0.0.1"), "versions", "warn", "controller 0.0.1"),
        (replaced(deployments=[UNWELL]), "deployments", "warn", "digits is unhealthy: boom"),
        (answered(get_status=TransientError("nobody leads")), "controller", "fail", "nobody leads"),
    ],
)  # fmt: skip
def test_what_is_not_well_is_found(
    muster: Run,
    well: PlayedController,
    change: Callable[[PlayedController], None],
    part: str,
    outcome: str,
    said: str,
) -> None:
    change(well)
    code, checks = examine(muster)
    assert (checks[part]["outcome"], code) == (outcome, int(outcome == "fail")), checks
    assert said in checks[part]["message"]


@pytest.mark.parametrize("error", [BusUnavailable("refused"), BusAuthorizationFailed("refused")])
def test_a_nats_that_does_not_answer_is_all_that_is_said(
    muster: Run, controller: PlayedController, error: Exception
) -> None:
    controller.raises = error
    code, checks = examine(muster)
    assert (code, list(checks), checks["nats"]["outcome"]) == (1, ["nats"], "fail")


def test_no_stack_at_all_is_said_too(muster: Run) -> None:
    result = muster("doctor", environment={})
    assert result.exit_code == 1
    assert "fail stack no stack was found" in result.stdout


def test_the_disk_of_a_stack_on_this_machine_is_looked_at(
    muster: Run, well: PlayedController, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    class Record:
        state_dir = str(tmp_path)

    monkeypatch.setattr(doctor, "running_embedded", lambda *_: Record)
    assert examine(muster)[1]["disk"]["message"].endswith(f"at {tmp_path}")
    monkeypatch.setattr("muster.cli.session.Session.full_disk", lambda _self: "the disk is full")
    code, checks = examine(muster)
    assert (code, checks["disk"]["outcome"]) == (1, "fail")

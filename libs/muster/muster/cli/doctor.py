"""`muster doctor`: looks at each part of a stack, and says what to do about what is not well."""

from __future__ import annotations

import asyncio
import os
import urllib.error
import urllib.request
from collections.abc import Awaitable, Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Final, final

import msgspec
import typer

from muster.cli.output import Cell, Progress, print_cells, print_json, print_line, shorten
from muster.cli.queries import stack_command
from muster.cli.session import ExitCode, Session, StackChoice, running_embedded
from muster.client.admin import Stack
from muster.client.requests import StackAddress, proxy_urls
from serve_common.api.queries import GetLoad
from serve_common.api.views import DeploymentStatus, HostView, ProxyView, StatusView
from serve_common.clock import SystemClock
from serve_common.errors import BusAuthorizationFailed, NotFound, ServeError
from serve_common.names import short_name

_RETRY_S: Final = 5.0
_HTTP_TIMEOUT_S: Final = 3.0
_NATS_LEAST: Final = (2, 11)
_SKEW_WARN_S: Final = 1.0
_SKEW_FAIL_S: Final = 30.0
"""Credentials that a clock this far off makes are refused by others."""
_FREE_WARN: Final = 0.1
"""Share of a disk that should be free."""


class Outcome(Enum):
    """Whether a part is well."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


class Check(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of the report."""

    part: str
    """What was looked at."""
    outcome: Outcome
    message: str
    """What was found."""
    advice: str = ""
    """What to do; empty where there is nothing to do."""


def ok(part: str, message: str) -> Check:
    """A check that found nothing wrong."""
    return Check(part=part, outcome=Outcome.OK, message=message)


def warn(part: str, message: str, advice: str) -> Check:
    """A check that found what will do harm, or may."""
    return Check(part=part, outcome=Outcome.WARN, message=message, advice=advice)


def fail(part: str, message: str, advice: str) -> Check:
    """A check that found what does not work."""
    return Check(part=part, outcome=Outcome.FAIL, message=message, advice=advice)


@stack_command
def doctor(session: Session, choice: StackChoice, *, as_json: bool = False) -> None:
    """Check every part of the stack, and say what to do about what is not well.

    Examples:
      muster doctor
      muster doctor --context prod --json

    Checks NATS, the leading controller, Postgres, hosts, proxies, versions, clocks and the disk. The exit code is 1
    when something does not work; what only may become a problem is a warning.
    """
    with session.reporting(as_json=as_json):
        checks = asyncio.run(_examine(session, choice))
        if as_json:
            print_json(checks)
        else:
            _show(checks)
        if any(check.outcome is Outcome.FAIL for check in checks):
            raise typer.Exit(ExitCode.FAILED)


_STYLES: Final = {Outcome.OK: "green", Outcome.WARN: "yellow", Outcome.FAIL: "red"}


def _show(checks: Sequence[Check]) -> None:
    width = max(len(check.part) for check in checks)
    for check in checks:
        outcome = Cell(f"{check.outcome.value:<4}", _STYLES[check.outcome])
        print_cells(outcome, Cell(f"{check.part:<{width}}", "bold"), Cell(check.message))
        if check.advice:
            print_line(f"     {'':<{width}} {check.advice}")


async def _examine(session: Session, choice: StackChoice) -> list[Check]:
    try:
        address = session.find_stack(choice)
    except ServeError as error:
        return [fail("stack", str(error), "'muster up' starts one on this machine")]
    checks = [*_check_disk(session)]
    try:
        with Progress("doctor") as progress:
            async with session.connect(address, progress, retry_for_s=_RETRY_S) as stack:
                examination = _Examination(session, address, stack)
                return [*await examination.run(), *checks]
    except BusAuthorizationFailed as error:
        advice = "give the credentials of this stack: --creds FILE, or --user and --password-file"
        return [fail("nats", str(error), advice), *checks]
    except ServeError as error:
        advice = f"is nats-server running at {address.where}, and no firewall between? See its log"
        return [fail("nats", str(error), advice), *checks]


@final
class _Examination:
    """The checks of a stack whose NATS answers."""

    def __init__(self, session: Session, address: StackAddress, stack: Stack) -> None:
        self._session = session
        self._address = address
        self._admin = stack.admin
        self._nats = stack.nats
        self._clock = SystemClock()

    async def run(self) -> list[Check]:
        checks = [*self._check_nats()]
        started_at = self._clock.now()
        try:
            status = await self._admin.fetch_status()
        except ServeError as error:
            advice = (
                "start a controller, or see its log: 'muster logs --help', 'docker compose logs controller'"
            )
            return [*checks, fail("controller", str(error), advice)]
        took_ms = (self._clock.now() - started_at) * 1000
        leads = f"{status.controller_id} leads in term {status.epoch}, answered in {took_ms:.0f} ms"
        checks += [ok("controller", leads), *_check_store(status), *_check_hosts(status.hosts)]
        checks += [*_check_proxies(status), *await self._check_http(status.proxies)]
        checks += [*await _attempt("versions", self._check_versions())]
        checks += [*await _attempt("clocks", self._check_clocks())]
        return [*checks, *_check_deployments(status)]

    def _check_nats(self) -> Iterator[Check]:
        where, found = self._address.where, self._nats
        if found is None:
            yield ok("nats", f"{where} answers")
            return
        parts = found.version.split("-")[0].split(".")
        version = tuple(int(part) for part in parts if part.isdigit())
        text = f"{where} answers, nats-server {found.version or '(version unknown)'}"
        if not found.jetstream:
            yield fail(
                "nats", f"{text} without JetStream", "turn on JetStream in its configuration: 'jetstream {}'"
            )
        elif version and version < _NATS_LEAST:
            least = ".".join(map(str, _NATS_LEAST))
            yield warn(
                "nats", f"{text} with JetStream", f"Muster is tested with {least} and newer; upgrade it"
            )
        else:
            yield ok("nats", f"{text} with JetStream")
        if self._session.has_plain_users:
            yield warn(
                "identities",
                "NATS has plain users: replicas can read and answer each other's requests",
                "use identities: 'muster secrets', and SECURITY.md",
            )

    async def _check_http(self, proxies: Sequence[ProxyView]) -> list[Check]:
        base = self._address.http_url
        urls = [base] if base else proxy_urls(proxies, self._address.host)
        if not urls:
            return []
        failures = await asyncio.gather(*(asyncio.to_thread(_get_health, url) for url in urls))
        bad = [f"{url}: {failure}" for url, failure in zip(urls, failures, strict=True) if failure]
        if not bad:
            return [
                ok(
                    "http",
                    f"{', '.join(urls)} answers" if len(urls) == 1 else f"all {len(urls)} proxies answer",
                )
            ]
        advice = (
            "is the port published and open from here? 'muster context add --http URL' sets what users reach"
        )
        make = fail if len(bad) == len(urls) else warn
        return [make("http", "; ".join(bad), advice)]

    async def _check_versions(self) -> Check:
        # Only here: it is slow to import.
        from importlib import metadata  # noqa: PLC0415 - as above

        own, controller = metadata.version("muster"), await self._admin.fetch_version()
        if own == controller:
            return ok("versions", f"muster {own}, controller {controller}")
        found = f"muster {own}, controller {controller or '(unknown)'}"
        return warn("versions", found, "install the same version of muster here as on the services")

    async def _check_clocks(self) -> Check:
        before = self._clock.now()
        load = await self._admin.call(GetLoad())
        after = self._clock.now()
        skew_s = load.at - after if load.at > after else min(0.0, load.at - before)
        text = f"the controller's clock is {abs(skew_s):.1f} s {'ahead of' if skew_s > 0 else 'behind'} this machine's"
        advice = "let NTP (chrony, systemd-timesyncd) set the clocks of all machines"
        if abs(skew_s) >= _SKEW_FAIL_S:
            return fail("clocks", text, advice)
        if abs(skew_s) >= _SKEW_WARN_S:
            return warn("clocks", text, advice)
        if load.unreachable:
            pages = ", ".join(load.unreachable)
            advice = "MUSTER_OPS_ADVERTISE of that service must name an address that the controller reaches"
            return warn("metrics", f"the controller does not reach the page of {pages}", advice)
        return ok("clocks", "the controller's clock agrees with this machine's")


async def _attempt(part: str, check: Awaitable[Check]) -> list[Check]:
    try:
        return [await check]
    except NotFound:
        return []
    except ServeError as error:
        return [warn(part, f"could not be checked: {error}", "see the other lines")]


def _get_health(url: str) -> str:
    """Why the proxy at ``url`` is not well; empty when it is."""
    try:
        with urllib.request.urlopen(f"{url}/-/healthz", timeout=_HTTP_TIMEOUT_S) as response:  # noqa: S310 - http(s) only
            return "" if response.status == 200 else f"answers {response.status}"
    except urllib.error.HTTPError as error:
        return f"answers {error.code}"
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        return shorten(str(reason)) or type(error).__name__


def _check_store(status: StatusView) -> Iterator[Check]:
    if not status.store_available:
        yield fail(
            "postgres",
            "does not answer the controller: what runs goes on, changes are refused",
            "start it, or see its log; then MUSTER_POSTGRES_DSN of the controller",
        )
    elif status.store_restored_at is not None:
        advice = "deploy again what is missing; 'muster history' shows what is known"
        yield warn("postgres", "was found restored to an earlier state", advice)
    else:
        yield ok("postgres", "answers the controller")


def _check_hosts(hosts: Sequence[HostView]) -> Iterator[Check]:
    live = [host for host in hosts if host.status == "live"]
    if not live:
        advice = "start a replica host, or see its log; until then nothing can be deployed"
        yield fail("hosts", f"none of {len(hosts)} is live" if hosts else "none reports", advice)
        return
    totals: dict[str, float] = {}
    for host in live:
        for name, amount in host.resources.items():
            totals[name] = totals.get(name, 0.0) + amount
    amounts = ", ".join(
        f"{amount / 2**30:.1f} GiB memory" if name == "memory" else f"{amount:g} {name}"
        for name, amount in sorted(totals.items())
    )
    replicas = sum(host.num_replicas for host in live)
    yield ok("hosts", f"{len(live)} live, with {amounts}, and {replicas} replicas")
    for host in hosts:
        if host.status in {"suspect", "lost"}:
            silent = f"{host.host_id} is {host.status}: silent for {host.report_age_s:.0f} s"
            yield warn("hosts", silent, "see its log; its replicas are replaced on other hosts")
        elif host.draining:
            advice = f"'muster host undrain {host.host_id}' lets it run replicas again"
            yield warn("hosts", f"{host.host_id} is drained", advice)


def _check_proxies(status: StatusView) -> Iterator[Check]:
    live = [proxy for proxy in status.proxies if proxy.status == "live"]
    if not live:
        advice = "start a proxy, or see its log; until then nobody can call a model over HTTP"
        yield fail(
            "proxies", f"none of {len(status.proxies)} is live" if status.proxies else "none reports", advice
        )
        return
    behind = [proxy.proxy_id for proxy in live if proxy.applied_snapshot_id < status.snapshot_id]
    if behind:
        advice = "if it lasts, see the log of that proxy: it does not read routes from NATS"
        yield warn("proxies", f"{', '.join(behind)} has not applied the newest routes yet", advice)
    else:
        yield ok("proxies", f"{len(live)} live, with the newest routes")
    for proxy in status.proxies:
        if proxy.status == "lost":
            yield warn(
                "proxies", f"{proxy.proxy_id} is lost: silent for {proxy.report_age_s:.0f} s", "see its log"
            )


def _check_deployments(status: StatusView) -> Iterator[Check]:
    bad = [each for each in status.deployments if each.status is DeploymentStatus.UNHEALTHY]
    if not bad:
        yield ok("deployments", f"{len(status.deployments)}, none is unhealthy")
    for each in bad[:5]:
        name = short_name(each.name)
        advice = f"'muster status {name}', 'muster logs {name}'"
        yield warn("deployments", f"{name} is unhealthy: {shorten(each.message)}", advice)


def _check_disk(session: Session) -> Iterator[Check]:
    """The disk of a stack that runs from here; others' disks cannot be seen."""
    record = running_embedded(session.environment, session.directory)
    if record is None:
        return
    full = session.full_disk()
    if full is not None:
        yield fail("disk", full, "delete what is not needed; what is deployed serves on, changes fail")
        return
    try:
        found = os.statvfs(Path(record.state_dir))
    except OSError:
        return
    free, share = found.f_bavail * found.f_frsize, found.f_bavail / max(1, found.f_blocks)
    text = f"{free / 2**30:.1f} GiB free ({share:.0%}) at {record.state_dir}"
    yield ok("disk", text) if share >= _FREE_WARN else warn("disk", text, "make room before it is full")

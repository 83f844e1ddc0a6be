"""What may happen to a controller: commands of every kind, deaths, silences, hangs, lost buckets, new leaders."""

from __future__ import annotations

import contextlib
from typing import Any

from hypothesis import strategies as st

from serve_common.api.commands import (
    Command,
    CreateEndpoint,
    DeleteApplication,
    DeleteBackend,
    DeleteDeployment,
    DeleteEndpoint,
    DrainHost,
    RecordBuildFailure,
    Rollback,
    SetCapture,
    SetEndpointOptions,
    SetHttpOptions,
    SetTraffic,
    ShadowTraffic,
    Shutdown,
    UndrainHost,
    UpdateBackendConfig,
)
from serve_common.errors import CommandRefused
from tests.support.control_loop.closed_loop import Loop
from tests.support.control_loop.orders import BAD_CODE, application, create_backend, deploy, spec
from tests.support.control_loop.pure_host import PureHost

names = st.sampled_from(["a", "a", "b"])
backends = st.sampled_from(["a", "a", "b", "x", "x", "y", "app/front"])
numbers = st.integers(0, 6)
shares = st.sampled_from([{"a": 1.0}, {"x": 1.0}, {"a": 0.5, "x": 0.5}, {"x": 0.9, "y": 0.1}, {"app/m": 1.0}])
configs = st.sampled_from(["one", "one", "two", "two", "kills", "refused"])
codes = st.sampled_from(["good:Code"] * 4 + [BAD_CODE])
choices = st.fixed_dictionaries(
    {},
    optional={
        "on_failure": st.sampled_from(["keep", "go_back"]),
        "max_surge_percent": st.sampled_from([0.0, 25.0, 100.0]),
        "max_unavailable_percent": st.sampled_from([25.0, 50.0]),
        "placement": st.sampled_from(["spread", "pack"]),
        "max_replicas_per_host": st.sampled_from([1, 2]),
    },
)
deploys = st.builds(
    lambda name, options, **fields: deploy(name, **options, **fields),
    names,
    choices,
    version=st.sampled_from(["v1", "v2", None]),
    num=st.integers(0, 5),
    config=configs,
    code=codes,
    route=st.sampled_from([None, "/r", "/s"]),
    cpus=st.sampled_from([0.5, 0.5, 1.0, 1.0, 3.0, 9.0]),
)
specs = st.builds(
    spec,
    st.sampled_from(["front", "m", "n"]),
    version=st.sampled_from(["v1", "v2"]),
    num=st.integers(0, 2),
    code=codes,
    user_config=configs,
)
partials = st.fixed_dictionaries(
    {}, optional={"num_replicas": st.integers(0, 5), "user_config": configs, "max_queued_requests": numbers}
)
others = st.one_of(
    st.builds(DeleteDeployment, name=names),
    st.builds(DeleteDeployment, name=names),
    st.builds(
        create_backend, st.sampled_from(["x", "y"]), num=st.integers(0, 3), code=codes, user_config=configs
    ),
    st.builds(create_backend, st.sampled_from(["x", "y"]), num=st.integers(0, 3)),
    st.builds(DeleteBackend, backend_tag=backends, force_kill=st.booleans()),
    st.builds(UpdateBackendConfig, backend_tag=backends, config=partials),
    st.builds(UpdateBackendConfig, backend_tag=backends, config=partials),
    st.builds(
        CreateEndpoint,
        endpoint=st.sampled_from(["e", "f"]),
        traffic=shares,
        route=st.sampled_from([None, "/r"]),
    ),
    st.builds(DeleteEndpoint, endpoint=st.sampled_from(["e", "f"])),
    st.builds(SetTraffic, endpoint=st.sampled_from(["e", "f", "a"]), weights=shares),
    st.builds(
        ShadowTraffic,
        endpoint=st.sampled_from(["e", "a"]),
        backend_tag=backends,
        proportion=st.sampled_from([0.0, 0.5]),
    ),
    st.builds(SetCapture, endpoint=st.sampled_from(["e", "a"]), share=st.sampled_from([0.0, 0.5, 1.0])),
    st.builds(
        SetEndpointOptions,
        endpoint=st.sampled_from(["e", "a"]),
        options=st.sampled_from([{"relative_slo_ms": 5}, {"backend_header": "X-To"}, {}]),
    ),
    st.lists(specs, min_size=1, max_size=3, unique_by=lambda part: part.name).map(
        lambda parts: application(*parts, ingress=parts[0].name)
    ),
    st.lists(specs, min_size=1, max_size=3, unique_by=lambda part: part.name).map(
        lambda parts: application(*parts, ingress=parts[0].name)
    ),
    st.builds(DeleteApplication, name=st.just("app")),
    st.builds(RecordBuildFailure, name=st.sampled_from(["app", "other"]), error=st.just("no weights")),
    st.builds(Rollback, name=backends, to=st.sampled_from([None, None, "v1", 1])),
    st.builds(SetHttpOptions, options=st.sampled_from([{"request_timeout_s": 5}, {"body_bytes_max": 9}, {}])),
    st.builds(DrainHost, host_id=st.sampled_from(["host-1", "host-2"])),
    st.builds(UndrainHost, host_id=st.sampled_from(["host-1", "host-2"])),
    st.just(Shutdown(confirm="everything")),
)
commands = st.one_of(deploys, others)
operations = st.one_of(
    st.tuples(st.just("command"), deploys),
    st.tuples(st.just("command"), deploys),
    st.tuples(st.just("command"), deploys),
    st.tuples(st.just("command"), others),
    st.tuples(st.just("command"), others),
    st.tuples(st.just("command"), others),
    st.tuples(st.just("wait"), st.sampled_from([0.1, 0.1, 0.5, 2.0, 4.0, 12.0])),
    st.tuples(st.just("settle"), st.just(4)),
    st.tuples(st.just("settle"), st.just(8)),
    st.tuples(st.just("blind wait"), st.sampled_from([0.1, 2.0])),
    st.tuples(st.just("kill"), numbers),
    st.tuples(st.just("unhealthy"), numbers),
    st.tuples(st.just("restart host"), numbers),
    st.tuples(st.just("host goes"), numbers),
    st.tuples(st.just("host comes"), numbers),
    st.tuples(st.just("host is deaf"), numbers),
    st.tuples(st.just("host leaves"), numbers),
    st.tuples(st.just("drains hang"), numbers),
    st.tuples(st.just("starts hang"), numbers),
    st.tuples(st.just("proxies are slow"), st.booleans()),
    st.tuples(st.just("take over"), st.none()),
    st.tuples(st.just("bucket is lost"), st.none()),
    st.tuples(st.just("bus goes"), st.none()),
    st.tuples(st.just("bus comes"), st.none()),
)
stories = st.lists(operations, min_size=4, max_size=20)


def new_hosts() -> list[PureHost]:
    """Two that are too small for everything, on which some configurations do not work."""
    hosts = [PureHost("host-1", cpus=4), PureHost("host-2", cpus=3)]
    for host in hosts:
        host.dies_at, host.raises_at = {"kills"}, {"refused"}
    return hosts


def order(loop: Loop, command: Command[Any]) -> None:
    """Give a command; one that is refused changes nothing."""
    with contextlib.suppress(CommandRefused):
        loop.command(command)


def happen(loop: Loop, kind: str, value: object) -> None:
    """One thing happens, and the controller plans."""
    host = loop.hosts[value % 2] if isinstance(value, int) else loop.hosts[0]
    match kind:
        case "command":
            order(loop, value)
        case "wait":
            loop.steps(2, value)
        case "settle":
            loop.steps(value, 0.2)
        case "blind wait":
            loop.now += value
        case "kill":
            for tag in sorted(host.running())[:1]:
                host.kill(tag)
        case "unhealthy":
            host.is_unhealthy ^= set(sorted(host.held)[:1])
        case "restart host":
            host.restart()
        case "host goes":
            host.is_up = False
        case "host comes":
            if not host.is_up:
                host.is_up = True
                host.restart()
        case "host is deaf":
            host.is_deaf = not host.is_deaf
        case "host leaves":
            host.is_leaving = not host.is_leaving
        case "drains hang":
            host.hangs_in_draining = not host.hangs_in_draining
        case "starts hang":
            host.hangs_in_starting = not host.hangs_in_starting
        case "proxies are slow":
            loop.are_proxies_slow = value
        case "take over":
            loop.take_over()
        case "bucket is lost":
            loop.lose_bucket()
        case "bus goes":
            loop.on_bus_break(None)
        case "bus comes":
            loop.on_bus_break(loop.now)
    loop.cycle()


def bring_calm(loop: Loop) -> None:
    """The bus is back, everybody behaves again, and there is room for everything."""
    loop.on_bus_break(loop.now)
    loop.are_proxies_slow = False
    for host in loop.hosts:
        host.is_deaf, host.is_unhealthy, host.is_leaving = False, set(), False
        host.dies_at = host.raises_at = set()
        host.hangs_in_starting = False
        host.finish_drains()
        if not host.is_up:
            host.is_up = True
            host.restart()
    # What waited for room starts. What waited to be tried again is tried again.
    loop.hosts += [PureHost(f"host-{number}", cpus=200) for number in range(3, 9)]
    loop.steps(4, 16.0)
    loop.steps(2, 400.0)  # what hangs in starting is given up in the end
    loop.settle(limit=200, seconds=2.0)

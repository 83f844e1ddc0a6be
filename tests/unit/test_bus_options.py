from __future__ import annotations

import random

import pytest

from serve_common.nats.options import BusOptions, ServerAddress, parse_server, reconnect_wait_s
from serve_common.telemetry.log_lines import RateLimitedLogger


def test_server_urls_name_scheme_host_and_port() -> None:
    assert parse_server("nats://nats") == ServerAddress("nats", 4222, is_tls=False)
    assert parse_server("tls://[::1]:5000/") == ServerAddress("::1", 5000, is_tls=True)
    assert str(parse_server("tls://bus.example:5000")) == "tls://bus.example:5000"


@pytest.mark.parametrize(
    "url", ["", "nats", "localhost:4222", "http://nats", "nats://", "nats://a:99999", "nats://a/b"]
)
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"servers|Port"):
        BusOptions(servers=[url])


def test_a_password_never_shows_in_errors_or_representations() -> None:
    with pytest.raises(ValueError, match="must not hold credentials") as caught:
        BusOptions(servers=["nats://proxy:hunter2@nats:4222"])
    assert "hunter2" not in str(caught.value)
    assert "hunter2" not in repr(BusOptions(servers=["nats://nats"], user="proxy", password="hunter2"))


@pytest.mark.parametrize(
    "wrong",
    [
        {"servers": []},
        {"connect_timeout_s": 0},
        {"ping_interval_s": -1},
        {"outstanding_pings_max": 0},
        {"pending_bytes_max": 0},
        {"reconnect_wait_min_s": 3, "reconnect_wait_max_s": 2},
        {"reconnect_wait_min_s": 0},
    ],
)
def test_options_that_cannot_work_are_refused_by_name(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        BusOptions(**({"servers": ["nats://a"]} | wrong))


def test_waits_between_reconnects_double_up_to_their_limit_and_are_spread() -> None:
    options = BusOptions(servers=["nats://a"], reconnect_wait_min_s=0.1, reconnect_wait_max_s=1)
    chance = random.Random(1)
    for round_number, longest_s in enumerate([0.1, 0.2, 0.4, 0.8, 1, 1]):
        waits = [reconnect_wait_s(options, round_number, chance) for _ in range(200)]
        assert longest_s / 2 <= min(waits) < longest_s * 0.55
        assert longest_s * 0.95 < max(waits) <= longest_s
    assert reconnect_wait_s(options, 10**6, chance) <= 1


def test_a_quiet_log_writes_once_per_interval_and_counts_the_rest() -> None:
    lines: list[tuple[str, dict[str, object]]] = []
    quiet = RateLimitedLogger(lambda event, **fields: lines.append((event, fields)), interval_s=1.0)
    for now_s in (0.0, 0.1, 0.9, 1.0, 1.5, 2.5):
        quiet.log(now_s, "refused", subject="a")
    assert lines == [
        ("refused", {"left_out": 0, "subject": "a"}),
        ("refused", {"left_out": 2, "subject": "a"}),
        ("refused", {"left_out": 1, "subject": "a"}),
    ]

"""NATS' client protocol: what is read, what is written, and the options of a connection."""

from __future__ import annotations

import json
import random

import pytest

from serve_common.nats.options import (
    BusOptions,
    InvalidSubject,
    NatsProtocolError,
    ServerAddress,
    parse_server,
    reconnect_wait_s,
)
from serve_common.nats.protocol import (
    Greeting,
    Message,
    Parser,
    ServerError,
    Signal,
    check_subject,
    encode_connect,
    encode_headers,
    encode_hpub_line,
    encode_pub_line,
    encode_sub,
    encode_unsub,
    get_status,
    is_no_responders,
    parse_headers,
)
from serve_common.telemetry.log_lines import RateLimitedLogger


def test_messages_are_read_with_and_without_reply_and_headers() -> None:
    block = b"NATS/1.0\r\na: b\r\n\r\n"
    data = (
        b"MSG s.1 7 5\r\nhello\r\n"
        b"MSG s.1 7 back.9 0\r\n\r\n"
        b"HMSG s.2 8 18 20\r\n" + block + b"hi\r\n"
        b"HMSG s.2 8 back.9 18 18\r\n" + block + b"\r\n"
    )
    assert Parser().feed(data) == [
        Message(b"s.1", 7, b"", b"hello", None),
        Message(b"s.1", 7, b"back.9", b"", None),
        Message(b"s.2", 8, b"", b"hi", block),
        Message(b"s.2", 8, b"back.9", b"", block),
    ]


def test_a_payload_may_hold_line_breaks_and_verbs() -> None:
    assert Parser().feed(b"MSG s 1 12\r\nPING\r\n-ERR\r\n\r\nPONG\r\n") == [
        Message(b"s", 1, b"", b"PING\r\n-ERR\r\n"),
        Signal.PONG,
    ]


def test_control_lines_become_values() -> None:
    greeting = b'INFO {"nonce":"S","max_payload":99,"headers":true,"ldm":true,"unknown":[1]}\r\n'
    ops = Parser().feed(greeting + b"PING\r\nPONG\r\n+OK\r\n-ERR 'Authorization Violation'\r\n")
    assert ops == [
        Greeting(nonce="S", max_payload=99, lame_duck=True),
        Signal.PING,
        Signal.PONG,
        Signal.OK,
        ServerError("Authorization Violation"),
    ]


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"MSG s 1\r\n", "MSG has 3 or 4 words after it, not 2"),
        (b"MSG s 1 a b 3\r\n", "MSG has 3 or 4 words after it, not 5"),
        (b"MSG s x 3\r\nabc\r\n", "b'x' is no number"),
        (b"MSG s 1 -3\r\n", "b'-3' is no number"),
        (b"MSG s 1 1_0\r\n", "b'1_0' is no number"),
        (b"MSG s 1 99999999999999999999\r\n", "is no number"),
        (b"MSG s 1 17\r\n", "message of 17 bytes: at most 16"),
        (b"MSG s 1 2\r\nabc\r\n", "message of 2 bytes is not ended by CRLF"),
        (b"HMSG s 1 9\r\n", "HMSG has 4 or 5 words after it, not 3"),
        (b"HMSG s 1 9 8\r\n", "HMSG headers of 9 bytes in 8 bytes"),
        (b"HTTP/1.1 400 Bad Request\r\n", "unknown verb b'HTTP/1.1'"),
        (b"\r\n", "unknown verb b''"),
        (b"PING me\r\n", "PING stands alone"),
        (b"INFO {]\r\n", "INFO cannot be read"),
        (b'INFO {"max_payload":"much"}\r\n', "INFO cannot be read: .*max_payload"),
        (b"INFO \xff\r\n", "INFO cannot be read"),
        (b"x" * 5000, "line of .* bytes or more: at most 4352"),
        (b"MSG " + b"x" * 5000 + b" 1 1\r\n1\r\n", "b'MSG' line of .* bytes or more: at most 4352"),
        (b"INFO " + b" " * 40000, "b'INFO' line of .* bytes or more: at most 32768"),
    ],
)
def test_what_breaks_the_protocol_is_named(data: bytes, complaint: str) -> None:
    with pytest.raises(NatsProtocolError, match=complaint):
        Parser(payload_bytes_max=16).feed(data)


def test_a_greeting_may_be_longer_than_other_lines() -> None:
    names = json.dumps({"nonce": "x" * 30000}).encode()
    assert Parser().feed(b"INFO " + names + b"\r\n") == [Greeting(nonce="x" * 30000)]


def test_an_incomplete_payload_is_joined_once_and_not_once_per_piece() -> None:
    parser = Parser()
    assert parser.feed(b"MSG s 1 1000000\r\n") == []
    for _ in range(999):
        assert parser.feed(b"x" * 1000) == []
    assert len(parser._partial) == 1000
    assert parser.feed(b"x" * 1000 + b"\r\nPING\r\n") == [
        Message(b"s", 1, b"", b"x" * 1_000_000),
        Signal.PING,
    ]
    assert parser._partial == []


def test_clients_lines_are_encoded_as_servers_expect_them() -> None:
    assert encode_pub_line(b"s.1", b"", 5) == b"PUB s.1 5\r\n"
    assert encode_pub_line(b"s.1", b"back", 0) == b"PUB s.1 back 0\r\n"
    assert encode_hpub_line(b"s.1", b"", 12, 3) == b"HPUB s.1 12 15\r\n"
    assert encode_hpub_line(b"s.1", b"back", 12, 3) == b"HPUB s.1 back 12 15\r\n"
    assert encode_sub(b"s.*", b"", 4) == b"SUB s.* 4\r\n"
    assert encode_sub(b"s.>", b"group", 4) == b"SUB s.> group 4\r\n"
    assert encode_unsub(4) == b"UNSUB 4\r\n"


def test_connect_sends_credentials_only_when_there_are_some() -> None:
    line = encode_connect(name="proxy-1", login={"user": "proxy", "pass": 's"cret'})
    verb, _, text = line.partition(b" ")
    options = json.loads(text)
    assert (verb, text[-2:]) == (b"CONNECT", b"\r\n")
    assert (options["user"], options["pass"], options["name"]) == ("proxy", 's"cret', "proxy-1")
    assert (options["headers"], options["no_responders"], options["verbose"]) == (True, True, False)
    assert not {"user", "pass"} & set(json.loads(encode_connect(name="x", login={}).partition(b" ")[2]))


@pytest.mark.parametrize("subject", [b"", b"a b", b"a\r\nPUB b 0", b"a\tb", b"a\x00b", b"x" * 5000])
def test_a_subject_that_could_smuggle_a_line_is_never_encoded(subject: bytes) -> None:
    for encode in (
        lambda: encode_pub_line(subject, b"", 1),
        lambda: encode_hpub_line(subject, b"", 1, 1),
        lambda: encode_sub(subject, b"", 1),
    ):
        with pytest.raises(InvalidSubject):
            encode()
    if subject:
        with pytest.raises(InvalidSubject):
            encode_pub_line(b"a", subject, 1)
        with pytest.raises(InvalidSubject):
            encode_sub(b"a", subject, 1)


def test_check_subject_accepts_tokens_and_says_what_is_wrong_with_the_rest() -> None:
    assert check_subject(b"serve.replica.app-1_x.0") == b"serve.replica.app-1_x.0"
    assert check_subject(b"serve.*.x.>", may_have_wildcards=True) == b"serve.*.x.>"
    assert check_subject(b"a*b.c>") == b"a*b.c>"
    for subject, complaint in [
        (b"a..b", "empty token"),
        (b".a", "empty token"),
        (b"a.", "empty token"),
        (b"a.*", "wildcard where none is allowed"),
        (b"a b", "blank or a control character"),
        (b"a\x7f", "blank or a control character"),
        (b"x" * 256, "subject of 256 bytes: it must have 1 to 255"),
    ]:
        with pytest.raises(InvalidSubject, match=complaint):
            check_subject(subject)
    with pytest.raises(InvalidSubject, match="'>' before its last token"):
        check_subject(b"a.>.b", may_have_wildcards=True)


def test_headers_are_read_in_order_with_repeated_keys() -> None:
    headers = [("traceparent", "00-ab"), ("a", "1"), ("a", "2: three"), ("empty", "")]
    assert parse_headers(encode_headers(headers)) == headers
    assert parse_headers(b"NATS/1.0\r\nkey:   padded  \r\nbad:\xff\r\n\r\n") == [
        ("key", "padded"),
        ("bad", "�"),
    ]


def test_the_status_line_tells_no_responders() -> None:
    assert is_no_responders(b"NATS/1.0 503\r\n\r\n")
    assert get_status(b"NATS/1.0 503 No Responders\r\nNats-Subject: a\r\n\r\n") == 503
    assert get_status(b"NATS/1.0 100 Idle Heartbeat\r\n\r\n") == 100
    assert get_status(b"NATS/1.0\r\n503: x\r\n\r\n") is None
    assert get_status(b"NATS/1.0 5031\r\n\r\n") is None
    assert get_status(b"") is None
    assert parse_headers(b"NATS/1.0 503\r\n\r\n") == []


@pytest.mark.parametrize("block", [b"", b"NATS/1.0\r\n", b"HTTP/1.1\r\n\r\n", b"NATS/1.0\r\nkey\r\n\r\n"])
def test_a_header_block_that_is_none_is_refused(block: bytes) -> None:
    with pytest.raises(NatsProtocolError):
        parse_headers(block)


@pytest.mark.parametrize("header", [("a:b", "c"), ("", "c"), ("a b", "c"), ("ä", "c"), ("a", "c\r\nd: e")])
def test_a_header_that_would_break_the_block_is_not_encoded(header: tuple[str, str]) -> None:
    with pytest.raises(NatsProtocolError):
        encode_headers([header])


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

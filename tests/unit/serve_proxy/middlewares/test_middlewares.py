"""What the ready-made middlewares decide, without HTTP: origins, keys and rates."""

from __future__ import annotations

import asyncio
import hashlib
import os
from types import SimpleNamespace

import aiohttp
import pytest

from serve_common.config.backend import HttpOptions
from serve_common.dispatch.calls import Response, ResponseBody
from serve_common.errors import BadField
from serve_common.runtime.settings import Environment
from serve_proxy.http.middlewares import load_middlewares
from serve_proxy.http.requests import HttpRequests
from serve_proxy.http.server import HttpServer
from serve_proxy.middlewares import api_keys as key_file
from serve_proxy.middlewares.api_keys import parse_keys
from serve_proxy.middlewares.cors import read_cors_rules
from serve_proxy.middlewares.rate_limit import CallerBuckets, read_rate_rules
from serve_proxy.shell.ingress import MiddlewareRefused
from tests.support.http_desk import FakeIngress

KEY = "a-key-of-enough-characters"


def cors(origins: str, **more: str):
    return read_cors_rules(Environment({"MUSTER_CORS_ALLOW_ORIGINS": origins, **more}))


@pytest.mark.parametrize(
    ("given", "origin", "is_allowed"),
    [
        ("https://a.example", "https://a.example", True),
        ("https://A.Example/", None, False),
        ("HTTPS://A.example:443", "https://a.example", True),
        ("https://a.example", "http://a.example", False),
        ("https://a.example", "https://a.example:8443", False),
        ("https://a.example", "https://a.example.evil.com", False),
        ("https://a.example", "null", False),
        ("null", "null", True),
        ("http://[::1]:3000", "http://[::1]:3000", True),
        ("https://*.a.example", "https://x.y.a.example", True),
        ("https://*.a.example", "https://a.example", False),
        ("https://*.a.example", "https://evila.example", False),
        ("https://*.a.example", "https://evil.com/.a.example", False),
        ("https://*.a.example", "https://evil.com:1@x.a.example", False),
        ("https://*.a.example:8443", "https://x.a.example:8443", True),
        ("https://*.a.example:8443", "https://x.a.example", False),
        ("*", "https://anything", True),
    ],
)
def test_origins(given: str, origin: str | None, is_allowed: bool) -> None:
    if origin is None:
        with pytest.raises(BadField, match="is no origin"):
            cors(given)
        return
    assert cors(given).allows_origin(origin) is is_allowed
    assert bool(cors(given).preflight_headers(origin)) is is_allowed


@pytest.mark.parametrize(
    ("origins", "more", "reason"),
    [
        (",", {}, "names no origin"),
        ("*,https://a.example", {}, "not both"),
        ("https://*", {}, "hosts below a domain"),
        ("https://*.com", {}, "hosts below a domain"),
        ("https://a.*.example", {}, "hosts below a domain"),
        ("https://a.example:port", {}, "is no origin"),
        ("https://u:p@a.example", {}, "is no origin"),
        ("*", {"MUSTER_CORS_ALLOW_CREDENTIALS": "true"}, "MUSTER_CORS_ALLOW_CREDENTIALS"),
        ("https://a.example", {"MUSTER_CORS_ALLOW_CREDENTIALS": "yes"}, "neither true nor false"),
        ("https://a.example", {"MUSTER_CORS_ALLOW_METHODS": "GET,P(ST"}, "no name that HTTP allows"),
        ("https://a.example", {"MUSTER_CORS_ALLOW_HEADERS": "*,x"}, "not both"),
        ("https://a.example", {"MUSTER_CORS_MAX_AGE_S": "x"}, "MUSTER_CORS_MAX_AGE_S"),
    ],
)
def test_settings_that_would_allow_too_much_or_mean_nothing_are_refused(origins, more, reason) -> None:
    with pytest.raises(BadField, match=reason):
        cors(origins, **more)


def test_requested_headers_are_echoed_only_when_they_are_names() -> None:
    rules = cors("https://a.example")
    echoed = dict(rules.preflight("https://a.example", "put", "X-One, x-two"))
    assert echoed["Access-Control-Allow-Headers"] == "X-One, x-two"
    assert "cannot be understood" in rules.preflight("https://a.example", "PUT", "x\u00e9")
    assert "cannot be understood" in rules.preflight("https://a.example", "PUT", "x," * 200)
    any_method = cors("https://a.example", MUSTER_CORS_ALLOW_METHODS="*")
    assert (
        dict(any_method.preflight("https://a.example", "PURGE", ""))["Access-Control-Allow-Methods"]
        == "PURGE"
    )


def test_one_name_may_have_several_keys() -> None:
    keys = parse_keys(f"shop {KEY}\nshop {KEY}2\n", "f")
    assert [keys.get_name(key.encode()) for key in (KEY, KEY + "2", KEY + "3", "")] == [
        "shop",
        "shop",
        None,
        None,
    ]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "has no key"),
        ("# only a comment", "has no key"),
        (f"{KEY}", "line 1: has 1 words"),
        (f"\na b {KEY}", "line 2: has 3 words"),
        ("shop short", "has a key of 5 characters"),
        (f"sh/op {KEY}", "line 1: 'sh/op'"),
        (f"a {KEY}\nb {KEY}", "line 2: has the key that a has too"),
        (f"a {KEY}\nb sha256:{hashlib.sha256(KEY.encode()).hexdigest()}", "has the key that a has too"),
        ("a sha256:abc", "64 hexadecimal digits"),
    ],
)
def test_a_wrong_file_of_keys_is_refused_by_its_line_without_telling_a_key(text: str, reason: str) -> None:
    with pytest.raises(BadField, match=reason) as refused:
        parse_keys(text, "f")
    assert KEY not in str(refused.value)


def rate(by: str = "key", **more: str):
    return read_rate_rules(Environment({"MUSTER_RATE_LIMIT_PER_S": "1", "MUSTER_RATE_LIMIT_BY": by, **more}))


def test_what_a_request_is_counted_by() -> None:
    caller = {
        "api_key_name": "shop",
        "header_value": "t1",
        "client": "10.0.0.1",
    }
    assert rate().key(**caller) == "key shop"
    assert rate().key(**{**caller, "api_key_name": ""}) == "address 10.0.0.1"
    assert rate("header:X-Tenant").key(**caller) == "header t1"
    assert rate("header:key").key(**caller) == "header t1"
    assert rate("address").key(**caller) == "address 10.0.0.1"


def test_addresses_of_one_ipv6_network_are_one_caller() -> None:
    def counted(client: str) -> str:
        return rate().key(api_key_name="", header_value="", client=client)

    assert counted("2001:db8::1") == counted("2001:db8::ffff") != counted("2001:db8:0:1::1")
    assert counted("::ffff:10.0.0.1") == counted("10.0.0.1")
    assert counted("") == "address "


def test_callers_are_forgotten_when_there_are_too_many_the_longest_quiet_first() -> None:
    buckets = CallerBuckets(rate_per_s=0.001, burst=1, keys_max=2)
    for key in ("a", "b", "a", "c"):
        buckets.take(key, 0.0)
    assert len(buckets) == 2
    assert buckets.take("a", 0.0)
    assert not buckets.take("b", 0.0)


# The ready-made middlewares in a real HTTP server: by their import paths, configured by the environment.


CORS = "serve_proxy.middlewares.cors:cors"
API_KEYS = "serve_proxy.middlewares.api_keys:api_keys"
RATE_LIMIT = "serve_proxy.middlewares.rate_limit:rate_limit"

ORIGIN = "https://app.example.com"
SHOP_KEY = "shop-key-of-enough-characters"
OTHER_KEY = "other-key-of-enough-characters"


class Replicas(FakeIngress):
    """Answers at once: /stream in pieces, /none not at all, everything else whole. Keeps what it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.answer_headers = [(b"content-type", b"text/plain"), (b"vary", b"Accept")]

    async def send(self, spec):
        self.asked.append(spec)
        if spec.path != "/stream":
            return SimpleNamespace(spec=spec), Response(200, self.answer_headers, memoryview(b"ok"), None)
        body = ResponseBody(memoryview(b"st"), lambda _: None)
        body.add(memoryview(b"ream"), last=True)
        return SimpleNamespace(spec=spec), Response(200, self.answer_headers, memoryview(b""), body)


class Proxy:
    """A listening server with middlewares."""

    def __init__(self) -> None:
        self.replicas = Replicas()
        self.requests = HttpRequests(self.replicas, HttpOptions(), new_request_id=lambda: "made")
        self.server = HttpServer(self.requests, self.replicas)

    async def start(self, *paths: str) -> None:
        self.requests.use(HttpOptions(middlewares=list(paths)), await load_middlewares(paths))
        address = await self.server.start("127.0.0.1", 0)
        self.client = aiohttp.ClientSession(f"http://{address}")

    async def get(self, path: str = "/x", method: str = "GET", **headers: str):
        """Status, headers and body; names of headers are written with underscores."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.client.request(method, path, headers=named) as answer:
            return answer.status, answer.headers, await answer.text()

    def header(self, name: str) -> list[str]:
        """What the replica was sent."""
        wanted = name.lower().encode()
        return [value.decode("latin-1") for key, value in self.replicas.asked[-1].headers if key == wanted]


@pytest.fixture
async def proxy(monkeypatch):
    for name in [
        name for name in os.environ if name.startswith(("MUSTER_CORS", "MUSTER_API", "MUSTER_RATE"))
    ]:
        monkeypatch.delenv(name)
    proxy = Proxy()
    yield proxy
    if hasattr(proxy, "client"):
        await proxy.client.close()
    await proxy.requests.close(1.0)
    await proxy.server.close(1.0)


@pytest.fixture
def keys(tmp_path, monkeypatch):
    file = tmp_path / "keys"
    digest = hashlib.sha256(OTHER_KEY.encode()).hexdigest()
    file.write_text(f"# who may call\nshop {SHOP_KEY}\n\nother sha256:{digest}  # by its digest\n")
    monkeypatch.setenv("MUSTER_API_KEYS_FILE", str(file))
    return file


# -- CORS --


async def test_a_preflight_is_answered_here_and_reaches_no_replica(proxy: Proxy, monkeypatch) -> None:
    monkeypatch.setenv("MUSTER_CORS_ALLOW_ORIGINS", ORIGIN)
    monkeypatch.setenv("MUSTER_CORS_ALLOW_HEADERS", "Content-Type,X-Token")
    monkeypatch.setenv("MUSTER_CORS_ALLOW_CREDENTIALS", "true")
    monkeypatch.setenv("MUSTER_CORS_MAX_AGE_S", "60")
    await proxy.start(CORS)
    ask = {"Origin": ORIGIN, "Access_Control_Request_Method": "POST"}
    status, headers, _ = await proxy.get(
        method="OPTIONS", **ask, Access_Control_Request_Headers="content-type, x-token"
    )
    assert status == 204
    assert headers["Access-Control-Allow-Origin"] == ORIGIN
    assert "POST" in headers["Access-Control-Allow-Methods"]
    assert headers["Access-Control-Allow-Headers"] == "content-type, x-token"
    assert headers["Access-Control-Allow-Credentials"] == "true"
    assert headers["Access-Control-Max-Age"] == "60"
    assert headers["Vary"] == "Origin, Access-Control-Request-Method, Access-Control-Request-Headers"
    for changed, reason in (
        ({"Origin": "https://evil.example"}, "this origin"),
        ({"Access_Control_Request_Method": "TRACE"}, "method TRACE"),
        ({"Access_Control_Request_Headers": "x-other"}, "header x-other"),
    ):
        status, headers, body = await proxy.get(method="OPTIONS", **{**ask, **changed})
        assert status == 403
        assert reason in body
        assert "Access-Control-Allow-Origin" not in headers
    assert proxy.replicas.asked == []
    status, _, _ = await proxy.get(
        method="OPTIONS", Origin=ORIGIN
    )  # no preflight, so it is the application's
    assert (status, len(proxy.replicas.asked)) == (200, 1)


@pytest.mark.parametrize("path", ["/x", "/stream", "/none"])
async def test_answers_streams_and_errors_may_be_read_by_the_page(
    proxy: Proxy, monkeypatch, path: str
) -> None:
    monkeypatch.setenv("MUSTER_CORS_ALLOW_ORIGINS", f"{ORIGIN}, https://*.example.org")
    proxy.replicas.answer_headers.append((b"access-control-allow-origin", b"*"))
    await proxy.start(CORS)
    for origin in (ORIGIN, "https://a.b.example.org"):
        status, headers, body = await proxy.get(path, Origin=origin)
        assert (status, body) in ((200, "ok"), (200, "stream")) or status == 404
        assert headers.getall("Access-Control-Allow-Origin") == [origin]
        assert headers["Access-Control-Expose-Headers"] == "X-Request-ID, Retry-After"
        assert headers["Vary"].split(", ")[-1] == "Origin"
    for headers_sent in ({"Origin": "https://evil.example"}, {}):
        _, headers, _ = await proxy.get(path, **headers_sent)
        if headers_sent:
            assert "Access-Control-Allow-Origin" not in headers
        assert "Origin" in headers["Vary"]


async def test_any_origin_is_answered_alike(proxy: Proxy, monkeypatch) -> None:
    monkeypatch.setenv("MUSTER_CORS_ALLOW_ORIGINS", "*")
    await proxy.start(CORS)
    _, headers, _ = await proxy.get(Origin="https://anything.example")
    assert headers["Access-Control-Allow-Origin"] == "*"
    assert headers["Vary"] == "Accept"


# -- API keys --


async def test_who_bears_a_key_may_call_and_the_replica_gets_its_name_instead(proxy: Proxy, keys) -> None:
    await proxy.start(API_KEYS)
    status, _, body = await proxy.get(Authorization=f"bearer {SHOP_KEY}", X_API_Key_Name="admin", X_Own="1")
    assert (status, body) == (200, "ok")
    assert proxy.header("x-api-key-name") == ["shop"]
    assert proxy.header("authorization") == []
    assert proxy.header("x-own") == ["1"]
    # The application may use the other header itself.
    status, _, _ = await proxy.get(X_API_Key=OTHER_KEY, Authorization="Bearer something-of-the-application")
    assert status == 200
    assert proxy.header("x-api-key-name") == ["other"]
    assert proxy.header("authorization") == ["Bearer something-of-the-application"]
    assert proxy.header("x-api-key") == []


async def test_a_body_and_odd_headers_pass_the_check(proxy: Proxy, keys) -> None:
    await proxy.start(API_KEYS)
    host, _, port = proxy.client._base_url.authority.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(
        b"POST /x HTTP/1.1\r\nHost: h\r\nX-API-Key: %b\r\nX-Odd: caf\xe9\r\nContent-Length: 3\r\n\r\nabc"
        % SHOP_KEY.encode()
    )
    async with asyncio.timeout(30):
        assert b" 200 " in await reader.readline()
    writer.close()
    assert bytes(proxy.replicas.asked[-1].body) == b"abc"
    assert proxy.header("x-odd") == ["caf\xe9"]


@pytest.mark.parametrize(
    ("headers", "challenge"),
    [
        ({}, 'Bearer realm="muster"'),
        ({"Authorization": f"Basic {SHOP_KEY}"}, 'Bearer realm="muster"'),
        ({"Authorization": "Bearer "}, 'Bearer realm="muster"'),
        ({"X_API_Key": SHOP_KEY + "x"}, 'Bearer realm="muster", error="invalid_token"'),
        ({"X_API_Key": "x" * 5000}, 'Bearer realm="muster", error="invalid_token"'),
    ],
)
async def test_who_bears_none_that_counts_is_refused_with_a_challenge(
    proxy: Proxy, keys, headers, challenge
) -> None:
    await proxy.start(API_KEYS)
    status, answered, body = await proxy.get(**headers)
    assert (status, answered["WWW-Authenticate"]) == (401, challenge)
    assert '"unauthorized"' in body
    assert SHOP_KEY not in body
    assert proxy.replicas.asked == []


async def test_keys_are_read_again_when_the_file_changes_and_kept_while_it_is_wrong(
    proxy: Proxy, keys, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(key_file, "KEY_FILE_CHECK_PERIOD_S", 0.0)
    await proxy.start(API_KEYS)
    new_key = "a-new-key-of-enough-characters"
    keys.write_text(f"shop {new_key}\n")
    assert (await proxy.get(X_API_Key=SHOP_KEY))[0] == 401
    assert (await proxy.get(X_API_Key=new_key))[0] == 200
    for wrong in ("", "shop\n", f"shop {new_key} again\n", "shop short\n"):
        keys.write_text(wrong)
        assert (await proxy.get(X_API_Key=new_key))[0] == 200
    keys.unlink()
    assert (await proxy.get(X_API_Key=new_key))[0] == 200
    logged = capsys.readouterr()
    assert new_key not in logged.out + logged.err


# -- rate limit --


async def test_each_key_has_its_own_rate_and_hears_when_to_come_again(
    proxy: Proxy, keys, monkeypatch
) -> None:
    monkeypatch.setenv("MUSTER_RATE_LIMIT_PER_S", "0.1")
    monkeypatch.setenv("MUSTER_RATE_LIMIT_BURST", "2")
    await proxy.start(API_KEYS, RATE_LIMIT)
    for key in (SHOP_KEY, OTHER_KEY):
        assert [(await proxy.get(X_API_Key=key))[0] for _ in range(3)] == [200, 200, 429]
    status, headers, body = await proxy.get(X_API_Key=SHOP_KEY)
    assert status == 429
    assert 9 <= int(headers["Retry-After"]) <= 10
    assert '"rate_limited"' in body
    assert headers["X-Request-ID"] == "made"
    assert '"made"' in body
    assert len(proxy.replicas.asked) == 4


async def test_without_keys_the_address_counts(proxy: Proxy, monkeypatch) -> None:
    monkeypatch.setenv("MUSTER_RATE_LIMIT_PER_S", "0.5")
    await proxy.start(RATE_LIMIT)
    assert (await proxy.get())[0] == 200
    assert (await proxy.get(X_Forwarded_For="10.0.0.9"))[0] == 429  # whoever wrote that is not believed


async def test_all_together_in_the_advised_order(proxy: Proxy, keys, monkeypatch) -> None:
    monkeypatch.setenv("MUSTER_CORS_ALLOW_ORIGINS", ORIGIN)
    monkeypatch.setenv("MUSTER_RATE_LIMIT_PER_S", "0.5")
    await proxy.start(CORS, API_KEYS, RATE_LIMIT)
    status, _, _ = await proxy.get(method="OPTIONS", Origin=ORIGIN, Access_Control_Request_Method="GET")
    assert status == 204
    for path, key, expected in (("/stream", SHOP_KEY, 200), ("/x", SHOP_KEY, 429), ("/x", "none", 401)):
        status, headers, _ = await proxy.get(path, Origin=ORIGIN, X_API_Key=key)
        assert status == expected
        assert headers["Access-Control-Allow-Origin"] == ORIGIN


# -- what is missing or wrong --


@pytest.mark.parametrize(
    ("path", "variables", "reason"),
    [
        (CORS, {}, "MUSTER_CORS_ALLOW_ORIGINS: is not set"),
        (CORS, {"MUSTER_CORS_ALLOW_ORIGINS": "example.com"}, "is no origin"),
        (API_KEYS, {}, "MUSTER_API_KEYS_FILE: is not set"),
        (
            API_KEYS,
            {"MUSTER_API_KEYS_FILE": "/nowhere/keys"},
            "MUSTER_API_KEYS_FILE: /nowhere/keys cannot be read",
        ),
        (RATE_LIMIT, {}, "MUSTER_RATE_LIMIT_PER_S: is not set"),
        (RATE_LIMIT, {"MUSTER_RATE_LIMIT_PER_S": "0"}, "must be between"),
        (
            RATE_LIMIT,
            {"MUSTER_RATE_LIMIT_PER_S": "1", "MUSTER_RATE_LIMIT_BY": "name"},
            "MUSTER_RATE_LIMIT_BY",
        ),
        (
            RATE_LIMIT,
            {"MUSTER_RATE_LIMIT_PER_S": "1", "MUSTER_RATE_LIMIT_BY": "header:"},
            "MUSTER_RATE_LIMIT_BY",
        ),
    ],
)
async def test_what_is_missing_or_wrong_refuses_the_import_and_names_the_variable(
    proxy: Proxy, monkeypatch, path: str, variables, reason: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(MiddlewareRefused, match=f"{path}: BadField: .*{reason}"):
        await load_middlewares([path])
    monkeypatch.setenv("MUSTER_CORS_ALLOW_ORIGINS", "*")
    assert len(await load_middlewares([CORS])) == 1  # once it is set it can be imported

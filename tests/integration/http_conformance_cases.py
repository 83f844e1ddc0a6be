"""Raw requests, good and hostile, and what a server that is safe behind and before others does with each.

Why a table: the parser below may change, and what it must do may not. RFC 9112 and 9110 say what is right; where they
leave a choice, every safe answer is listed. What counts most is `Case.reached`: a request that two parsers cut apart
in two ways is how one client's request becomes the answer of another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

HOST: Final = b"Host: h\r\n"
OWN: Final = "/echo/case"
"""Where the request of a case goes when it goes anywhere."""
OK: Final = frozenset({200})
BAD: Final = frozenset({400})
REFUSED: Final = frozenset({400, 404, 405, 421, 426, 501})
OK_OR_BAD: Final = OK | BAD

Statuses = frozenset[int]


class Case(NamedTuple):
    """What is sent on a new connection, and what must come of it.

    A further good request follows in the same write, unless all is well and the client itself wants the end.
    """

    name: str
    sent: bytes
    answers: Sequence[Statuses] = (OK,)
    """One for each request of ``sent`` that is answered, with all statuses that are right."""
    is_retained: bool | None = True
    """True: the next request is answered too. False: it is not even begun, the connection is closed. None: either."""
    reached: Sequence[str] = ()
    """Method and path of what the replica may see, in order; all of it when every answer has to be 200."""
    body: bytes | None = None
    """What the replica must have got as the first request's body."""


def get(head: bytes = b"", target: bytes = OWN.encode(), version: bytes = b"HTTP/1.1") -> bytes:
    """A GET with further header lines."""
    return b"GET " + target + b" " + version + b"\r\n" + HOST + head + b"\r\n"


def post(head: bytes, body: bytes = b"", method: bytes = b"POST") -> bytes:
    """A POST with these header lines and whatever follows them."""
    return method + b" " + OWN.encode() + b" HTTP/1.1\r\n" + HOST + head + b"\r\n" + body


def chunked(body: bytes, coding: bytes = b"chunked") -> bytes:
    """A POST whose body says itself where it ends."""
    return post(b"Transfer-Encoding: " + coding + b"\r\n", body)


SEEN_GET: Final = (f"GET {OWN}",)
SEEN_POST: Final = (f"POST {OWN}",)
_SMUGGLED: Final = b"GET /echo/smuggled HTTP/1.1\r\nHost: h\r\n\r\n"


def good(
    name: str,
    sent: bytes,
    reached: Sequence[str] = SEEN_GET,
    body: bytes | None = None,
    *,
    is_retained: bool | None = True,
) -> Case:
    """Answered 200."""
    return Case(name, sent, (OK,) * len(reached), is_retained, reached, body)


def bad(name: str, sent: bytes, statuses: Statuses = BAD, reached: Sequence[str] = ()) -> Case:
    """Refused, and nothing that follows is believed. ``reached``: what may have been begun before that was known."""
    return Case(name, sent, (statuses,), is_retained=False, reached=reached)


def either(
    name: str,
    sent: bytes,
    statuses: Statuses,
    *,
    is_retained: bool | None = None,
    reached: Sequence[str] = (),
    body: bytes | None = None,
) -> Case:
    """Where more than one answer is safe."""
    return Case(name, sent, (statuses,), is_retained, reached, body)


GOOD: Final = [
    good("a GET", get()),
    good("a GET with a query that has question marks", get(target=b"/echo/case?a?b=?")),
    good("an empty line before the request", b"\r\n" + get()),
    good(
        "three pipelined requests",
        get() + post(b"Content-Length: 2\r\n", b"hi") + get(),
        (*SEEN_GET, *SEEN_POST, *SEEN_GET),
    ),
    good("fifty pipelined requests", get() * 50, SEEN_GET * 50),
    good("the end of the connection is wanted", get(b"Connection: close\r\n"), is_retained=False),
    good(
        "its end is wanted in capitals, among others", get(b"Connection: Foo, CLOSE\r\n"), is_retained=False
    ),
    good("HTTP/1.0 without a Host", b"GET /echo/case HTTP/1.0\r\n\r\n", is_retained=False),
    good("HTTP/1.0 that wants to go on", get(b"Connection: keep-alive\r\n", version=b"HTTP/1.0")),
    good("the absolute form", get(target=b"http://other.example/echo/case?x=1")),
    good("a HEAD", b"HEAD /echo/case HTTP/1.1\r\n" + HOST + b"\r\n", (f"HEAD {OWN}",)),
    good("an empty Host", b"GET /echo/case HTTP/1.1\r\nHost:\r\n\r\n"),
    good("white space around values", get(b"X-A: \t v \t\r\n")),
    good("an empty value", get(b"X-A:\r\nX-B: \r\n")),
    good("bytes above ASCII in a value", get(b"X-A: \xe4\xff\r\n")),
    good("names in odd case", b"GET /echo/case HTTP/1.1\r\nhOsT: h\r\nx-A: 1\r\n\r\n"),
    good("every character that a name may have", get(b"!#$%&'*+-.^_`|~09azAZ: 1\r\n")),
    good("a body of known length", post(b"Content-Length: 5\r\n", b"hello"), SEEN_POST, b"hello"),
    good("a body of no length", post(b"Content-Length: 0\r\n"), SEEN_POST, b""),
    good("a POST without a body", post(b""), SEEN_POST, b""),
    good("zeros before a length", post(b"Content-Length: 0005\r\n", b"hello"), SEEN_POST, b"hello"),
    good(
        "a body that looks like a request",
        post(b"Content-Length: %d\r\n" % len(_SMUGGLED), _SMUGGLED),
        SEEN_POST,
        _SMUGGLED,
    ),
    good("a GET with a body", get(b"Content-Length: 2\r\n") + b"hi", SEEN_GET, b"hi"),
    good("a chunked body", chunked(b"5\r\nhello\r\n0\r\n\r\n"), SEEN_POST, b"hello"),
    good("a chunked body of nothing", chunked(b"0\r\n\r\n"), SEEN_POST, b""),
    good(
        "chunks with zeros and capitals in their sizes",
        chunked(b"00A\r\n0123456789\r\n1\r\nx\r\n000\r\n\r\n"),
        SEEN_POST,
        b"0123456789x",
    ),
    good("chunk extensions", chunked(b'5;a=b;c="d;e";f\r\nhello\r\n0;last\r\n\r\n'), SEEN_POST, b"hello"),
    good("trailers", chunked(b"5\r\nhello\r\n0\r\nX-After: 1\r\n\r\n"), SEEN_POST, b"hello"),
    good("the coding in capitals", chunked(b"5\r\nhello\r\n0\r\n\r\n", b"CHUNKED"), SEEN_POST, b"hello"),
    good(
        "a chunk that looks like a request",
        chunked(b"%x\r\n%b\r\n0\r\n\r\n" % (len(_SMUGGLED), _SMUGGLED)),
        SEEN_POST,
        _SMUGGLED,
    ),
    good("dots in the path", get(target=b"/echo/../case/./x"), ("GET /echo/../case/./x",)),
    good(
        "encoded dots and slashes in the path",
        get(target=b"/echo/%2e%2E%2f..%2Fcase"),
        ("GET /echo/%2e%2E%2f..%2Fcase",),
    ),
    good("a percent sign that encodes nothing", get(target=b"/echo/%zz%"), ("GET /echo/%zz%",)),
    good(
        "an encoded NUL and line break in the path", get(target=b"/echo/%00%0d%0a"), ("GET /echo/%00%0d%0a",)
    ),
    good("empty parts of the path", get(target=b"/echo//case//"), ("GET /echo//case//",)),
    good(
        "a body that is expected to be welcomed and comes at once",
        post(b"Content-Length: 2\r\nExpect: 100-continue\r\n", b"hi"),
        SEEN_POST,
        b"hi",
    ),
    good(
        "an upgrade to what we do not speak",
        get(
            b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\n"
        ),
        is_retained=None,
    ),
    good(
        "an upgrade with a body",
        post(b"Connection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: 2\r\n", b"hi"),
        SEEN_POST,
        b"hi",
        is_retained=None,
    ),
    good(
        "upgrades to several protocols",
        get(b"Connection: Upgrade\r\nUpgrade: h2c\r\nUpgrade: websocket\r\n"),
        is_retained=False,
    ),
    good("a Host with a port", b"GET /echo/case HTTP/1.1\r\nHost: a_b.example:80\r\n\r\n"),
    good("a Host that is an address", b"GET /echo/case HTTP/1.1\r\nHost: [::1]:8000\r\n\r\n"),
    good("an upgrade header that the connection does not name", get(b"Upgrade: websocket\r\n")),
]
"""What everybody must accept."""

LENGTHS: Final = [
    bad("two lengths that differ", post(b"Content-Length: 5\r\nContent-Length: 6\r\n", b"hello")),
    bad("a list of lengths that differ", post(b"Content-Length: 5, 6\r\n", b"hello")),
    bad("a length below zero", post(b"Content-Length: -1\r\n")),
    bad("a length with a sign", post(b"Content-Length: +5\r\n", b"hello")),
    bad("a length in hexadecimal", post(b"Content-Length: 0x5\r\n", b"hello")),
    bad("a length with an underscore", post(b"Content-Length: 0_5\r\n", b"hello")),
    bad("a length of two words", post(b"Content-Length: 5 5\r\n", b"hello")),
    bad("a length with a fraction", post(b"Content-Length: 5.0\r\n", b"hello")),
    bad("a length of nothing", post(b"Content-Length:\r\n", b"hello")),
    bad("a length in digits of another script", post(b"Content-Length: \xd9\xa5\r\n", b"hello")),
    bad(
        "a length that no number holds",
        post(b"Content-Length: 184467440737095516160\r\n", b"hello"),
        frozenset({400, 413}),
    ),
    bad(
        "a length above what is allowed", post(b"Content-Length: 99999999999\r\n", b"hello"), frozenset({413})
    ),
    bad("a length whose name ends with a space", post(b"Content-Length : 5\r\n", b"hello")),
]

_CHUNKED: Final = b"Transfer-Encoding: chunked\r\n"

CODINGS: Final = [
    bad(name, chunked(b"1\r\nx\r\n0\r\n\r\n", coding), frozenset({400, 501}))
    for name, coding in {
        "chunks that are not last": b"chunked, identity",
        "a coding like chunked": b"xchunked",
        "a coding that begins as chunked does": b"chunkedx",
        "chunked in quotes": b'"chunked"',
        "no coding but identity": b"identity",
        "chunked twice": b"chunked, chunked",
        "chunked in one header, and identity in the next": b"chunked\r\nTransfer-Encoding: identity",
        "chunks in a coding that we do not know": b"gzip, chunked",
        "chunks in a coding that we do not know, in two headers": b"gzip\r\nTransfer-Encoding: chunked",
        "an empty coding": b"",
        "a vertical tab before the coding": b"\x0bchunked",
    }.items()
] + [
    bad("a coding whose name ends with a space", post(b"Transfer-Encoding : chunked\r\n", b"0\r\n\r\n")),
    bad(
        "a coding on a line that goes on",
        post(b"Transfer-Encoding:\r\n chunked\r\nContent-Length: 3\r\n", b"0\r\n\r\n"),
    ),
    *(
        either(name, sent, OK_OR_BAD, is_retained=False, reached=SEEN_POST)
        for name, sent in {
            "a length, and chunks": post(b"Content-Length: 6\r\n" + _CHUNKED, b"0\r\n\r\n" + _SMUGGLED),
            "chunks, and a length": post(_CHUNKED + b"Content-Length: 6\r\n", b"0\r\n\r\n" + _SMUGGLED),
            "a length of nothing, and chunks": post(
                b"Content-Length: 0\r\n" + _CHUNKED, b"1\r\nx\r\n0\r\n\r\n"
            ),
            "chunks in HTTP/1.0": b"POST /echo/case HTTP/1.0\r\nConnection: keep-alive\r\n"
            + _CHUNKED
            + b"\r\n1\r\nx\r\n0\r\n\r\n",
        }.items()
    ),
]

CHUNKS: Final = [
    bad(name, chunked(body), reached=SEEN_POST)
    for name, body in {
        "a size below zero": b"-1\r\nx\r\n0\r\n\r\n",
        "a size with 0x": b"0x1\r\nx\r\n0\r\n\r\n",
        "a size with a sign": b"+1\r\nx\r\n0\r\n\r\n",
        "a size with an underscore": b"1_0\r\n0123456789abcdef\r\n0\r\n\r\n",
        "a size that is no number": b"g\r\nx\r\n0\r\n\r\n",
        "no size": b"\r\nx\r\n0\r\n\r\n",
        "a size that no number holds": b"FFFFFFFFFFFFFFFFF1\r\nx\r\n0\r\n\r\n",
        "a size that wraps around to one": b"10000000000000001\r\nx\r\n0\r\n\r\n",
        "a space before the size": b" 1\r\nx\r\n0\r\n\r\n",
        "more in a chunk than its size": b"1\r\nxy\r\n0\r\n\r\n",
        "no line break after a chunk": b"1\r\nx0\r\n\r\n",
        "a bare line feed after a size": b"1\nx\r\n0\r\n\r\n",
        "a bare line feed after an extension": b"1;a\nx\r\n0\r\n\r\n",
        "a bare line feed after a chunk": b"1\r\nx\n0\r\n\r\n",
        "a carriage return alone after a size": b"1\rx\r\n0\r\n\r\n",
        "a NUL in an extension": b"1;\0\r\nx\r\n0\r\n\r\n",
        "a trailer that is none": b"1\r\nx\r\n0\r\nno colon\r\n\r\n",
    }.items()
] + [
    either(
        "a huge extension",
        chunked(b"1;" + b"a" * 100_000 + b"\r\nx\r\n0\r\n\r\n"),
        frozenset({200, 400, 413, 431}),
        reached=SEEN_POST,
        body=b"x",
    ),
    bad(
        "a huge trailer",
        chunked(b"1\r\nx\r\n0\r\nX-A: " + b"a" * 100_000 + b"\r\n\r\n"),
        frozenset({400, 413, 431}),
        SEEN_POST,
    ),
]

LINES: Final = [
    bad("no HTTP at all", b"NONSENSE\r\n\r\n"),
    bad("a TLS hello", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64)),
    bad("HTTP/0.9", b"GET /echo/case\r\n\r\n"),
    bad("HTTP/2.0", get(version=b"HTTP/2.0"), frozenset({400, 505})),
    bad("the preface of HTTP/2", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", frozenset({400, 505})),
    bad("HTTP/9.9", get(version=b"HTTP/9.9"), frozenset({400, 505})),
    bad("HTTP/1.10", get(version=b"HTTP/1.10"), frozenset({400, 505})),
    bad("HTTP/1.1 with more behind it", get(version=b"HTTP/1.1x"), frozenset({400, 505})),
    bad("http/1.1 in small letters", get(version=b"http/1.1"), frozenset({400, 505})),
    either("HTTP/1.2", get(version=b"HTTP/1.2"), frozenset({200, 400, 505}), reached=SEEN_GET),
    bad("no target", b"GET HTTP/1.1\r\n" + HOST + b"\r\n"),
    bad("a space in the target", get(target=b"/echo/ca se")),
    bad("a tab in the target", get(target=b"/echo/ca\tse")),
    bad("a NUL in the target", get(target=b"/echo/ca\0se")),
    bad("a control byte in the target", get(target=b"/echo/ca\x07se")),
    bad("a carriage return in the target", get(target=b"/echo/ca\rse")),
    bad("a DEL in the target", get(target=b"/echo/ca\x7fse")),
    either(
        "bytes above ASCII in the target",
        get(target=b"/echo/\xc3\xa4"),
        OK_OR_BAD,
        reached=("GET /echo/%C3%A4",),
    ),
    either(
        "a fragment in the target",
        get(target=b"/echo/case#part"),
        OK_OR_BAD,
        reached=(*SEEN_GET, "GET /echo/case#part"),
    ),
    bad("a target without a slash", get(target=b"echo/case"), frozenset({400, 404})),
    bad("a space before the request", b" " + get()),
    bad("a NUL before the request", b"\0" + get()),
    bad("a huge request line", get(target=b"/echo/" + b"a" * 100_000), frozenset({400, 414, 431})),
    bad(
        "a huge method",
        b"G" * 100_000 + b" /echo/case HTTP/1.1\r\n" + HOST + b"\r\n",
        frozenset({400, 414, 431, 501}),
    ),
]

METHODS: Final = [
    either("a method that nobody knows", get().replace(b"GET", b"BREW"), REFUSED),
    either("a method in small letters", get().replace(b"GET", b"get"), REFUSED),
    bad("a method with a colon", get().replace(b"GET", b"G:T"), REFUSED),
    bad("a method with a NUL", get().replace(b"GET", b"G\0T")),
    either("TRACE", get().replace(b"GET", b"TRACE"), REFUSED),
    either("CONNECT", b"CONNECT other.example:443 HTTP/1.1\r\nHost: other.example:443\r\n\r\n", REFUSED),
    either("CONNECT to a path that is served", get().replace(b"GET", b"CONNECT"), REFUSED),
    either("OPTIONS of everything", b"OPTIONS * HTTP/1.1\r\n" + HOST + b"\r\n", REFUSED | {200, 204}),
    either("GET of everything", get(target=b"*"), REFUSED),
    either("the slash of a route that is encoded", get(target=b"/echo%2Fcase"), frozenset({404})),
    either("two slashes before a route", get(target=b"//echo/case"), frozenset({404})),
    either("a path beside the route", get(target=b"/echoes"), frozenset({404})),
]

HEADERS: Final = [
    bad("no Host", b"GET /echo/case HTTP/1.1\r\n\r\n"),
    bad("two Hosts", get(b"Host: i\r\n")),
    bad("a Host of two words", b"GET /echo/case HTTP/1.1\r\nHost: a b\r\n\r\n"),
    bad("a Host with a path", b"GET /echo/case HTTP/1.1\r\nHost: a/b\r\n\r\n"),
    bad("a Host with a user", b"GET /echo/case HTTP/1.1\r\nHost: u@b\r\n\r\n"),
    bad("a Host that goes on behind its port", b"GET /echo/case HTTP/1.1\r\nHost: a:80b\r\n\r\n"),
    bad("a Host with a bracket too few", b"GET /echo/case HTTP/1.1\r\nHost: [::1\r\n\r\n"),
    bad("a Host with bytes above ASCII", b"GET /echo/case HTTP/1.1\r\nHost: \xe4\r\n\r\n"),
    bad("a Host with a path in HTTP/1.0", b"GET /echo/case HTTP/1.0\r\nHost: a/b\r\n\r\n"),
    bad("a Host with a path, asking for a head", b"HEAD /echo/case HTTP/1.1\r\nHost: a/b\r\n\r\n"),
    bad("a Host with a path where there is no route", b"GET /none HTTP/1.1\r\nHost: a/b\r\n\r\n"),
    bad("a Host with a path, asking for the proxy itself", b"GET /-/healthz HTTP/1.1\r\nHost: a/b\r\n\r\n"),
    bad("a user in the absolute form", get(target=b"http://u@h/echo/case")),
    bad("a space before a colon", get(b"X-A : 1\r\n")),
    bad("a space in a name", get(b"X A: 1\r\n")),
    bad("a header without a name", get(b": 1\r\n")),
    bad("a header without a colon", get(b"X-A\r\n")),
    bad("a NUL in a name", get(b"X\0A: 1\r\n")),
    bad("a bracket in a name", get(b"X(A): 1\r\n")),
    bad("bytes above ASCII in a name", get(b"X-\xe4: 1\r\n")),
    bad("a NUL in a value", get(b"X-A: 1\0002\r\n")),
    bad("a carriage return in a value", get(b"X-A: 1\r2\r\n")),
    bad("a carriage return that hides a header", get(b"X-A: 1\rTransfer-Encoding: chunked\r\n")),
    bad("white space before the first header", b"GET /echo/case HTTP/1.1\r\n Host: h\r\n\r\n"),
    bad("a huge header", get(b"X-A: " + b"a" * 100_000 + b"\r\n"), frozenset({400, 431})),
    bad("a huge name", get(b"X" * 100_000 + b": 1\r\n"), frozenset({400, 431})),
    either(
        "headers that are huge together",
        get(b"".join(b"X-%d: " % i + b"v" * 8000 + b"\r\n" for i in range(10))),
        frozenset({400, 431}),
    ),
    either(
        "very many headers", get(b"".join(b"X-%d:\r\n" % i for i in range(20_000))), frozenset({400, 431})
    ),
    either(
        "an expectation that nobody knows",
        get(b"Expect: 200-ok\r\n"),
        frozenset({200, 417}),
        reached=SEEN_GET,
    ),
]

DOUBTFUL: Final = [
    either(name, sent, OK_OR_BAD, reached=SEEN_GET)
    for name, sent in {
        "two spaces in the request line": get().replace(b"GET ", b"GET  "),
        "a tab in the request line": get().replace(b"GET ", b"GET\t"),
        "lines that end with a line feed": get().replace(b"\r\n", b"\n"),
        "a header line that ends with a line feed": get(b"X-A: 1\nX-B: 2\r\n"),
        "a head that ends with a line feed": b"GET /echo/case HTTP/1.1\r\nHost: h\r\n\n",
        "a control byte in a value": get(b"X-A: 1\x012\r\n"),
        "a value on two lines": get(b"X-A: 1\r\n 2\r\n"),
    }.items()
] + [
    either(name, sent, OK_OR_BAD, reached=SEEN_POST, body=body)
    for name, sent, body in (
        (
            "two lengths that are the same",
            post(b"Content-Length: 5\r\nContent-Length: 5\r\n", b"hello"),
            b"hello",
        ),
        ("a list of lengths that are the same", post(b"Content-Length: 5, 5\r\n", b"hello"), b"hello"),
        ("tabs around the coding", chunked(b"1\r\nx\r\n0\r\n\r\n", b"\tchunked\t"), b"x"),
        ("a space after the size", chunked(b"1 \r\nx\r\n0\r\n\r\n"), b"x"),
        ("a trailer that would be a length", chunked(b"1\r\nx\r\n0\r\nContent-Length: 100\r\n\r\n"), b"x"),
        ("a trailer that would be a coding", chunked(b"1\r\nx\r\n0\r\n" + _CHUNKED + b"\r\n"), b"x"),
    )
]
"""What may be understood in one way only, or refused."""

ANSWERS: Final = [
    *(
        Case(name, get(target=b"/echo/case?%d" % status), (frozenset({500, 502}),), True, SEEN_GET)
        for name, status in {
            "a status that is no final one": 100,
            "a status that would end HTTP": 101,
            "a status beyond all": 999,
        }.items()
    ),
    *(
        Case(
            name,
            post(b"Content-Length: 2\r\n", b"hi").replace(b"/echo/case", b"/echo/case?%d" % status),
            (frozenset({status}),),
            True,
            SEEN_POST,
        )
        for name, status in {
            "an answer that may have no body but has one": 204,
            "an answer without a change that has a body": 304,
        }.items()
    ),
    good(
        "the head of a long answer",
        b"HEAD /echo/big-sized?700000 HTTP/1.1\r\n" + HOST + b"\r\n",
        ("HEAD /echo/big-sized",),
    ),
]

CASES: Final = [*GOOD, *LENGTHS, *CODINGS, *CHUNKS, *LINES, *METHODS, *HEADERS, *DOUBTFUL, *ANSWERS]

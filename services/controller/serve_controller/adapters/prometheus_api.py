"""Queries a Prometheus server by its HTTP API, within bounds; and the PromQL for reading loads.

Loads are read from counters of seconds: the rate of the integral of a number of requests is its mean over the window,
whatever happened between two scrapes, while a sampled gauge shows only moments.

There are two kinds of errors: `PrometheusUnavailable` affects everything that is read from the server, `QueryRefused`
only the backend whose query it is.
"""

from __future__ import annotations

import asyncio
import math
import re
from typing import Any, Final, final

import aiohttp
import msgspec
from yarl import URL

from serve_common.config.autoscaling import AggregationFunction
from serve_common.names import BackendTag
from serve_common.telemetry.catalogue.proxies import PROXY_INFO, QUEUED_SECONDS
from serve_common.telemetry.catalogue.replicas import ONGOING_SECONDS, REPLICA_CONNECTED
from serve_common.telemetry.catalogue.services import HOST_INFO
from serve_common.values import truncate

TIMEOUT_S: Final = 3.0
CONCURRENCY: Final = 8
RESPONSE_BYTES_MAX: Final = 32 * 1024 * 1024
_REASON_LENGTH_MAX: Final = 300


class PrometheusUnavailable(Exception):
    """The server cannot be reached, timed out, or its response is not that of a Prometheus; the message says which."""


class QueryRefused(Exception):
    """The server rejected a query, cannot evaluate it, or the result is no number; the message says why."""


class Element(msgspec.Struct, frozen=True):
    """One series of a result: labels with one value, or with samples."""

    metric: dict[str, str] = {}
    value: tuple[float, str] | None = None
    """Time and number. None for a matrix, and for a native histogram, which is no number."""
    values: list[tuple[float, str]] = []

    @property
    def number(self) -> float | None:
        """Its value, if any; it may not be finite."""
        return None if self.value is None else float(self.value[1])


class _Result(msgspec.Struct, frozen=True, rename="camel"):
    result_type: str
    result: msgspec.Raw


class _PrometheusReply(msgspec.Struct, frozen=True, rename="camel"):
    status: str
    data: _Result | None = None
    error_type: str = ""
    error: str = ""
    warnings: list[str] = []


_REPLY_DECODER: Final = msgspec.json.Decoder(_PrometheusReply)
_ELEMENTS: Final = msgspec.json.Decoder(list[Element])
_SCALAR: Final = msgspec.json.Decoder(tuple[float, str])


@final
class PrometheusApi:
    """Client of one server. Supports addresses such as ``https://user:password@host/prefix``."""

    def __init__(self, url: str, token: str | None = None) -> None:
        """``token`` is sent as a bearer token. Does not connect yet."""
        base = URL(url)
        self._query_url = base / "api" / "v1" / "query"
        self.shown = str(base.with_user(None)).rstrip("/")
        """Its address without credentials, for messages."""
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._session: aiohttp.ClientSession | None = None
        self._slots = asyncio.Semaphore(CONCURRENCY)

    async def close(self) -> None:
        """Close its connections."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def time(self) -> float:
        """The server's clock, seconds since 1970. Raises `PrometheusUnavailable` or `QueryRefused`."""
        reply = await self._query("time()", None)
        return float(_SCALAR.decode(reply.result)[1])

    async def elements(self, promql: str, at: float) -> list[Element]:
        """The elements of a vector or a matrix, evaluated at ``at`` by the server's clock."""
        reply = await self._query(promql, at)
        if reply.result_type not in ("vector", "matrix"):
            raise QueryRefused(f"it gives a {reply.result_type}")
        return _ELEMENTS.decode(reply.result)

    async def number(self, promql: str, at: float) -> float:
        """The finite number that ``promql`` evaluates to: a scalar, or a vector of one element."""
        reply = await self._query(promql, at)
        if reply.result_type == "scalar":
            return _finite(float(_SCALAR.decode(reply.result)[1]))
        if reply.result_type != "vector":
            raise QueryRefused(f"the query gives a {reply.result_type} instead of one number")
        elements = _ELEMENTS.decode(reply.result)
        if not elements:
            raise QueryRefused("the query gives nothing: no such series now")
        if len(elements) > 1:
            raise QueryRefused(
                f"the query gives {len(elements)} numbers instead of one; sum() or max() makes one"
            )
        number = elements[0].number
        if number is None:
            raise QueryRefused("the query gives a histogram instead of a number")
        return _finite(number)

    async def _query(self, promql: str, at: float | None) -> _Result:
        form = {"query": promql, "timeout": f"{TIMEOUT_S:g}s"}
        if at is not None:
            form["time"] = f"{at:.3f}"
        async with self._slots:
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    try:
                        status, body = await self._post(form)
                    except (aiohttp.ServerDisconnectedError, ConnectionResetError):
                        # A kept-alive connection to a server that has restarted since.
                        status, body = await self._post(form)
            except TimeoutError as error:
                raise PrometheusUnavailable(f"{self.shown} does not answer within {TIMEOUT_S:g} s") from error
            except (aiohttp.ClientError, OSError, ValueError) as error:
                raise PrometheusUnavailable(
                    f"{self.shown}: {truncate(str(error) or type(error).__name__, _REASON_LENGTH_MAX)}"
                ) from error
        return self._read(status, body)

    async def _post(self, form: dict[str, Any]) -> tuple[int, bytes]:
        if self._session is None:
            self._session = aiohttp.ClientSession(headers=self._headers, trust_env=False)
        async with self._session.post(self._query_url, data=form, allow_redirects=False) as response:
            body = bytearray()
            async for piece in response.content.iter_any():
                body += piece
                if len(body) > RESPONSE_BYTES_MAX:
                    raise PrometheusUnavailable(f"{self.shown} answers more than {RESPONSE_BYTES_MAX} bytes")
            return response.status, bytes(body)

    def _read(self, status: int, body: bytes) -> _Result:
        try:
            reply = _REPLY_DECODER.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise PrometheusUnavailable(
                f"{self.shown} answers with status {status}, and not as Prometheus does"
            ) from error
        if reply.status != "success" or reply.data is None:
            raise QueryRefused(f"{reply.error_type}: {truncate(reply.error, _REASON_LENGTH_MAX)}")
        if reply.warnings:  # of Thanos and of remote storage: the result is partial
            raise QueryRefused(f"it warns: {truncate('; '.join(reply.warnings), _REASON_LENGTH_MAX)}")
        return reply.data


def _finite(number: float) -> float:
    if not math.isfinite(number):
        raise QueryRefused(f"the query gives {number}")
    return number


ONGOING: Final = ONGOING_SECONDS.name
QUEUED: Final = QUEUED_SECONDS.name
PROXY: Final = PROXY_INFO.name
HOST: Final = HOST_INFO.name
CONNECTED: Final = REPLICA_CONNECTED.name

_PLACEHOLDER: Final = re.compile(r"\$(backend_tag|look_back|deployment)\b")


def get_sum(gauge: str, matchers: str) -> str:
    """PromQL for the current value of ``gauge`` by ``backend_tag``."""
    return f"sum by (backend_tag) ({gauge}{{{matchers}}})"


def duration(seconds: float) -> str:
    """Format a PromQL duration, rounded to milliseconds; at least one."""
    milliseconds = max(round(seconds * 1000), 1)
    return f"{milliseconds // 1000}s" if milliseconds % 1000 == 0 else f"{milliseconds}ms"


def get_mean(counter: str, matchers: str, window_s: float) -> str:
    """PromQL for the mean number of requests over the window by ``backend_tag``, from ``counter`` of seconds."""
    return f"sum by (backend_tag) (rate({counter}{{{matchers}}}[{duration(window_s)}]))"


def get_extreme(
    function: AggregationFunction, matchers: str, *, window_s: float, inner_s: float, step_s: float
) -> str:
    """PromQL for each backend's largest or smallest mean over ``inner_s`` of all its requests, within the window."""
    parts = " or ".join(
        f'label_replace({get_mean(counter, matchers, inner_s)}, "part", "{counter}", "", "")'
        for counter in (ONGOING, QUEUED)
    )
    return f"{function.value}_over_time((sum by (backend_tag) ({parts}))[{duration(window_s)}:{duration(step_s)}])"


def get_samples(info: str, matchers: str, window_s: float) -> str:
    """PromQL for every sample of the info metric, which shows the scrapes of each process."""
    return f"{info}{{{matchers}}}[{duration(window_s)}]"


def get_count(info: str, matchers: str, window_s: float) -> str:
    """PromQL for the number of such samples of each process."""
    return f"count_over_time({info}{{{matchers}}}[{duration(window_s)}])"


def with_placeholders(promql: str, backend_tag: BackendTag, look_back_s: float) -> str:
    """A user's expression with its placeholders replaced, escaped for double- and single-quoted strings."""
    values = {
        "backend_tag": _escaped(backend_tag),
        "deployment": _escaped(backend_tag.rpartition("/")[2]),
        "look_back": duration(look_back_s),
    }
    return _PLACEHOLDER.sub(lambda found: values[found[1]], promql)


def _escaped(text: str) -> str:
    for special in ("\\", '"', "'"):
        text = text.replace(special, f"\\{special}")
    return text.replace("\n", "\\n")

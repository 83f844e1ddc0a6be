"""HTTPS on a real proxy's port: requests, uploads, sockets and drains as over HTTP, and renewed certificates."""

from __future__ import annotations

import asyncio
import io
import socket
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest
import uvloop
from cryptography import x509

from serve_proxy.http import tls
from serve_proxy.settings import TlsSettings
from tests.support.certificates import Certificate
from tests.support.servers.nats_server import NatsServer
from tests.support.stacks.proxy_stack import MIB, R0, Stack, running_stack
from tests.support.waiting import eventually

pytestmark = pytest.mark.timeout(120)


Run = Callable[[NatsServer, Path, pytest.MonkeyPatch], None]


def on_uvloop(test: Callable[[Stack, Certificate], Awaitable[None]]) -> Run:
    """Run a test on the loop that proxies have, beside a proxy with a certificate: TLS is the loop's."""

    def run(server: NatsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tls, "CHECK_PERIOD_S", 0.05)
        certificate = Certificate(tmp_path, password="of the key")
        settings = TlsSettings(
            cert_file=str(certificate.cert_file),
            key_file=str(certificate.key_file),
            key_password="of the key",
        )

        async def main() -> None:
            async with running_stack(server, tls=settings) as stack:
                await test(stack, certificate)

        uvloop.run(main())

    run.__name__ = test.__name__
    return run


def connect(stack: Stack, context: ssl.SSLContext) -> ssl.SSLSocket:
    host, port = stack.url.removeprefix("https://").split(":")
    return context.wrap_socket(socket.create_connection((host, int(port)), 10), server_hostname=host)


@on_uvloop
async def test_requests_uploads_and_sockets_go_as_over_http(stack: Stack, certificate: Certificate) -> None:
    (replica,) = await stack.serve(R0)
    trust = certificate.trust()
    assert stack.url.startswith("https://")
    answers = await asyncio.gather(
        *(stack.get(f"/echo/{n}", "POST", data=b"%d" % n, ssl=trust) for n in range(64))
    )
    assert sorted(int(body) for _, body, _ in answers) == list(range(64))
    assert {head.scheme for head in replica.seen} == {"https"}
    status, body, _ = await stack.get("/echo/sink", "POST", data=io.BytesIO(bytes(3 * MIB)), ssl=trust)
    assert (status, body) == (200, b"%d" % (3 * MIB))
    status, body, _ = await stack.get(f"/echo/big?{5 * MIB}", ssl=trust)
    assert (status, len(body)) == (200, 5 * MIB)
    async with stack.session.ws_connect(f"{stack.url}/echo/ws", ssl=trust) as ws:
        await ws.send_str("grüß")
        assert await ws.receive_str() == "grüß"
    assert replica.seen[-1].scheme == "wss"
    report = await stack.report(lambda report: bool(report.address))
    assert report.address == stack.url, "so that URLs that are printed begin with https"


@on_uvloop
async def test_only_tls_1_2_and_later_is_spoken_and_nothing_else_hangs_the_port(
    stack: Stack, certificate: Certificate
) -> None:
    await stack.serve(R0)
    trust = certificate.trust()
    trust.maximum_version = ssl.TLSVersion.TLSv1_2
    with await asyncio.to_thread(connect, stack, trust) as connection:
        assert connection.version() == "TLSv1.2"
    old = certificate.trust()
    old.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises(ssl.SSLError):
        await asyncio.to_thread(connect, stack, old)
    with pytest.raises(aiohttp.ClientError):
        await stack.session.get(f"http{stack.url.removeprefix('https')}/echo")
    assert (await stack.get("/echo", "POST", data=b"on", ssl=certificate.trust()))[1] == b"on"


@on_uvloop
async def test_a_renewed_certificate_is_for_new_connections_and_a_broken_one_for_none(
    stack: Stack, certificate: Certificate
) -> None:
    (replica,) = await stack.serve(R0)

    def shown_serial(context: ssl.SSLContext) -> int:
        with connect(stack, context) as connection:
            found = connection.getpeercert(binary_form=True)
        assert found is not None
        return x509.load_der_x509_certificate(found).serial_number

    first = certificate.trust()
    assert await asyncio.to_thread(shown_serial, first) == certificate.serial
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        open_request = group.create_task(stack.get("/echo/hold", ssl=first))
        await replica.wait(lambda: bool(replica.held))
        certificate.renew()
        while True:
            try:
                serial = await asyncio.to_thread(shown_serial, certificate.trust())
            except ssl.SSLCertVerificationError:
                await asyncio.sleep(0.05)
            else:
                break
        assert serial == certificate.serial
        replica.release()
        assert (await open_request)[0] == 200, "what was open went on"
    certificate.cert_file.write_text("no certificate")
    good = stack.proxy._certificate
    assert good is not None
    broken = good._stat()
    await eventually(lambda: good._version == broken, within_s=30)
    unverified = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    unverified.check_hostname, unverified.verify_mode = False, ssl.CERT_NONE
    assert await asyncio.to_thread(shown_serial, unverified) == serial


@on_uvloop
async def test_a_proxy_that_leaves_finishes_what_it_has(stack: Stack, certificate: Certificate) -> None:
    (replica,) = await stack.serve(R0)
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        held = group.create_task(stack.get("/echo/hold", ssl=certificate.trust()))
        await replica.wait(lambda: bool(replica.held))
        group.create_task(stack.proxy.drain())
        await stack.report(lambda report: report.leaving)
        replica.release()
        assert (await held)[0] == 200

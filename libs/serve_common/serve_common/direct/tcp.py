"""Direct links between machines: TCP with TLS 1.3, where the one trusted certificate is that which came over NATS.

Why no certificate authority, names or dates: NATS has already proved who sent the certificate, so it is pinned, byte
for byte. The router proves itself by its ticket, inside TLS, so nobody without the certificate's key gets that.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import errno
import ipaddress
import os
import secrets
import socket
import ssl
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from serve_common.direct.link import DirectLink

SILENCE_S: Final = 5.0
"""Seconds after which a peer that acknowledges nothing, or answers no keepalive, has ended: its machine is cut off."""
_KEEPALIVE_AFTER_S: Final = 2
_KEEPALIVE_INTERVAL_S: Final = 1
_UNSENT_BYTES_MAX: Final = 128 * 1024
_BACKLOG: Final = 64
_ADDRESSES_MAX: Final = 4
"""Most addresses of one name that are tried."""
_NOT_BEFORE: Final = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_NOT_AFTER: Final = dt.datetime(9999, 12, 31, 23, 59, 59, tzinfo=dt.UTC)
"""RFC 5280's date of no expiry: a pinned certificate lives as long as its process, whatever clocks say."""


class TcpEndpoint(msgspec.Struct, frozen=True):
    """Where a replica accepts links of other machines."""

    host: str
    """IP address to listen on; ``0.0.0.0`` or ``::`` for all of the machine's."""
    ports: tuple[int, int]
    """First and last port to choose from; 0 lets the system choose."""
    advertised_host: Callable[[], str]
    """Returns the host that routers dial, on any thread; empty while it is not known."""


def is_wildcard(host: str) -> bool:
    """True when listening on ``host`` means all addresses of the machine."""
    return ipaddress.ip_address(host).is_unspecified


def is_loopback(host: str) -> bool:
    """True when ``host`` leads a router to its own machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


# -- TLS --


def create_server_identity() -> tuple[ssl.SSLContext, bytes]:
    """Make a key and its certificate: a server's context, and the certificate (DER) for routers to pin.

    Raises OSError where the key cannot be handed to OpenSSL.
    """
    # A tenth of a second, which replicas without TCP links save.
    from cryptography import x509  # noqa: PLC0415
    from cryptography.hazmat.primitives import hashes, serialization  # noqa: PLC0415
    from cryptography.hazmat.primitives.asymmetric import ec  # noqa: PLC0415

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "muster direct link")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_NOT_BEFORE)
        .not_valid_after(_NOT_AFTER)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    context = _tls13(ssl.PROTOCOL_TLS_SERVER)
    context.num_tickets = 0  # sessions are not resumed
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    # OpenSSL reads keys from files only; this one is never on a disk.
    with os.fdopen(os.memfd_create("direct-link-key"), "wb") as file:
        file.write(pem + certificate.public_bytes(serialization.Encoding.PEM))
        file.flush()
        context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
    return context, certificate.public_bytes(serialization.Encoding.DER)


def _pinned(certificate: bytes) -> ssl.SSLContext:
    """A client's context that trusts ``certificate`` (DER) alone. Raises ssl.SSLError when that is none."""
    context = _tls13(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # before verify_mode: names prove nothing here
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_verify_locations(cadata=certificate)
    except ValueError as error:
        raise ssl.SSLError(f"the replica's certificate is unusable: {error}") from error
    return context


def _tls13(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


# -- sockets --


def listen(host: str, ports: tuple[int, int]) -> socket.socket:
    """Listen on a free port of ``ports``, chosen at random. Raises OSError when there is none, or no such address."""
    first, last = ports
    count = last - first + 1
    start = secrets.randbelow(count)
    is_dual = is_wildcard(host) and ":" in host and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for number in range(count):
        port = first + (start + number) % count
        try:
            server = socket.create_server(
                (host, port), family=family, backlog=_BACKLOG, dualstack_ipv6=is_dual
            )
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            server.setblocking(False)  # noqa: FBT003 - the standard library's
            return server
    raise OSError(errno.EADDRINUSE, f"none of the ports {first} to {last} is free")


def configure(connection: socket.socket) -> None:
    """Let the kernel end ``connection`` when its peer's machine is silent for `SILENCE_S`, and queue little there."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_AFTER_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_INTERVAL_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(SILENCE_S * 1000))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # What the kernel holds cannot be overtaken by small frames; the round trip is still covered.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES_MAX)


async def open_connection(
    link: DirectLink, host: str, port: int, certificate: bytes, timeout_s: float
) -> asyncio.Transport:
    """Connect ``link`` to the process at ``host`` that has the key of ``certificate`` (DER).

    Raises OSError when there is none, TimeoutError included; whom that reached has got nothing.
    """
    loop = asyncio.get_running_loop()
    context = _pinned(certificate)
    connection = await _connect(loop, host, port)
    try:
        configure(connection)
        transport, _ = await loop.create_connection(
            lambda: link, sock=connection, ssl=context, server_hostname="", ssl_handshake_timeout=timeout_s
        )
    except BaseException:
        connection.close()
        raise
    tls = transport.get_extra_info("ssl_object")
    # OpenSSL trusts whatever the pinned certificate has signed, were it a certificate authority's.
    if tls.getpeercert(binary_form=True) != certificate:
        transport.abort()
        raise ConnectionError("the replica's certificate is not the one that came over NATS")
    return transport


async def _connect(loop: asyncio.AbstractEventLoop, host: str, port: int) -> socket.socket:
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    failure: OSError = ConnectionError(f"{host} has no address")
    for family, kind, protocol, _, address in found[:_ADDRESSES_MAX]:
        connection = socket.socket(family, kind, protocol)
        connection.setblocking(False)  # noqa: FBT003 - the standard library's
        try:
            await loop.sock_connect(connection, address)
        except BaseException as error:
            connection.close()
            if not isinstance(error, OSError):
                raise
            failure = error
        else:
            return connection
    raise failure

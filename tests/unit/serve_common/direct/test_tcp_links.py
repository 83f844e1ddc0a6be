"""Links between machines: what TLS proves, who is let in, where replicas listen, and which way a router takes."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import os
import secrets
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from serve_common.direct import listening, tcp
from serve_common.direct.link import DirectLink
from serve_common.direct.listening import TICKETS_MAX, LinkListener
from serve_common.direct.tcp import TcpEndpoint
from serve_common.protocol.frames import LinkHead, decode_frame, encode_frame
from serve_common.runtime.tasks import TaskOwner
from tests.support.link_world import INBOX, MACHINE, REPLICA, SUBJECT, World
from tests.support.waiting import eventually

REPLY = INBOX + b"0" * 16


@pytest.fixture
async def world() -> AsyncIterator[World]:
    """A replica that listens on TCP alone."""
    world = World(None)
    await world.listener.start(world.tasks)
    yield world
    await world.close()


async def dial_fails(world: World) -> None:
    """Let the router dial in vain, and see that it does not try again soon."""
    before = world.links.failed
    world.links.dial(REPLICA, SUBJECT)
    await eventually(lambda: world.links.failed == before + 1)
    dials = len(world.dialled)
    world.links.dial(REPLICA, SUBJECT)
    assert (len(world.dialled), world.links.open_links) == (dials, 0)
    assert world.inbox.receivers == {}
    world.links._not_before.clear()


def changed(world: World, **changes: object) -> None:
    """Let the replica answer dials otherwise."""
    world.answer = lambda reply, machine: msgspec.structs.replace(
        world.listener.offer(reply, machine), **changes
    )


# -- what TLS proves --


async def test_a_peer_without_the_certificate_that_nats_brought_gets_no_ticket(world: World) -> None:
    _, other = tcp.create_server_identity()
    changed(world, certificate=other)
    await dial_fails(world)
    assert len(world.listener._tickets) == 1, "nothing has used it"
    for unusable in (b"", b"no certificate"):
        changed(world, certificate=unusable)
        await dial_fails(world)
    world.answer = world.listener.offer
    await world.dial()


async def test_what_the_pinned_certificate_has_signed_is_not_it(tmp_path: Path) -> None:
    def certificate(
        name: str, issuer: str, key: ec.EllipticCurvePrivateKey, signer: object
    ) -> x509.Certificate:
        names = [x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, each)]) for each in (name, issuer)]
        return (
            x509.CertificateBuilder()
            .subject_name(names[0])
            .issuer_name(names[1])
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(dt.datetime(1970, 1, 1, tzinfo=dt.UTC))
            .not_valid_after(dt.datetime(2100, 1, 1, tzinfo=dt.UTC))
            .add_extension(x509.BasicConstraints(ca=name == issuer, path_length=None), critical=True)
            .sign(signer, hashes.SHA256())  # type: ignore[arg-type] - a key
        )

    authority_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    authority = certificate("authority", "authority", authority_key, authority_key)
    signed = certificate("signed", "authority", key, authority_key)
    file = tmp_path / "both"
    file.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        + signed.public_bytes(serialization.Encoding.PEM)
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file)
    server = await asyncio.start_server(lambda _reader, writer: writer.close(), "127.0.0.1", 0, ssl=context)
    port = server.sockets[0].getsockname()[1]
    link = DirectLink(asyncio.get_running_loop(), lambda *_: None, lambda _: None)
    pinned = authority.public_bytes(serialization.Encoding.DER)
    with pytest.raises(ConnectionError, match="not the one that came over NATS"):
        await tcp.open_connection(link, "127.0.0.1", port, pinned, 5)
    await eventually(lambda: not link.is_open)
    server.close()
    await server.wait_closed()


async def test_only_tls_1_3_is_spoken(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    refusals: list[str] = []
    monkeypatch.setattr(world.listener, "log_refusal", refusals.append)
    world.listener.offer(REPLY, MACHINE)
    context = tcp._pinned(world.listener._certificate)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises((ssl.SSLError, ConnectionError)):
        await asyncio.open_connection("127.0.0.1", world.listener._port, ssl=context, server_hostname="")
    await eventually(lambda: not world.listener._unknown)
    assert len(refusals) == 1
    assert "unsupported protocol" in refusals[0]
    _, writer = await world.connect()
    tls = writer.get_extra_info("ssl_object")
    assert tls.version() == "TLSv1.3"
    writer.close()


async def test_a_certificate_is_of_one_process_and_bears_no_name_of_a_machine(world: World) -> None:
    found = x509.load_der_x509_certificate(world.listener._certificate)
    assert found.subject == found.issuer
    assert socket.gethostname() not in found.subject.rfc4514_string()
    assert not found.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    _, other = tcp.create_server_identity()
    assert other != world.listener._certificate


# -- tickets --


async def test_tickets_that_are_wrong_used_or_late_open_no_link(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed(world, ticket=secrets.token_bytes(32))
    await dial_fails(world)
    used = world.listener.offer(REPLY, MACHINE)
    world.answer = lambda _reply, _machine: used
    await world.dial()
    world.links.get(REPLICA).close()  # type: ignore[union-attr] - it is open
    await dial_fails(world)
    monkeypatch.setattr(listening, "TICKET_S", -1.0)
    late = world.listener.offer(REPLY, MACHINE)
    monkeypatch.undo()
    world.listener.offer(REPLY, MACHINE)  # another one, which opens the way as far as TLS
    world.answer = lambda _reply, _machine: late
    await dial_fails(world)
    changed(world, ticket=b"short")
    await dial_fails(world)
    assert world.listener.open_links == 0


# -- who is let in --


async def test_nobody_is_let_in_while_no_ticket_is_out(world: World) -> None:
    async def is_refused() -> bool:
        reader, writer = await asyncio.open_connection("127.0.0.1", world.listener._port)
        try:
            return await asyncio.wait_for(reader.read(), 0.2) == b""
        except ConnectionResetError:
            return True
        except TimeoutError:
            return False
        finally:
            writer.close()

    assert await is_refused()
    world.listener.offer(REPLY, MACHINE)
    assert not await is_refused()
    world.listener._tickets.clear()
    assert await is_refused()


async def test_connections_that_say_nothing_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "TICKET_S", 60.0)
    world = World(None)
    await world.listener.start(world.tasks)
    world.listener.offer(REPLY, MACHINE)
    silent = [
        await asyncio.open_connection("127.0.0.1", world.listener._port) for _ in range(TICKETS_MAX + 10)
    ]
    async with asyncio.TaskGroup() as reading:
        ends = [reading.create_task(read_to_the_end(reader)) for reader, _ in silent]
        await eventually(lambda: sum(end.done() for end in ends) >= 10)
        assert len(world.listener._unknown) == TICKETS_MAX
        await world.close()
    for _, writer in silent:
        writer.close()


async def test_connections_that_say_nothing_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "TICKET_S", 0.2)
    world = World(None)
    await world.listener.start(world.tasks)
    world.listener.offer(REPLY, MACHINE)
    silent = [await asyncio.open_connection("127.0.0.1", world.listener._port) for _ in range(3)]
    for reader, _ in silent:
        await read_to_the_end(reader)
    await eventually(lambda: not world.listener._unknown and len(world.tasks) == 2)
    for _, writer in silent:
        writer.close()
    await world.dial()
    await world.close()


async def read_to_the_end(reader: asyncio.StreamReader) -> None:
    """Of a connection that the listener ends without a byte."""
    with contextlib.suppress(ConnectionResetError):
        assert await asyncio.wait_for(reader.read(), 30) == b""


async def test_a_flood_of_tcp_leaves_unix_sockets_alone(tmp_path: Path) -> None:
    world = World(None)
    both = LinkListener(
        tmp_path / "direct",
        (0, os.getuid()),
        on_frame=lambda *_: None,
        on_end=lambda _: None,
        on_batch_end=lambda: None,
        tcp=TcpEndpoint("127.0.0.1", (0, 0), lambda: "127.0.0.1"),
        machine=MACHINE,
    )
    await both.start(world.tasks)
    both.offer(REPLY, MACHINE)
    silent = [await asyncio.open_connection("127.0.0.1", both._port) for _ in range(TICKETS_MAX)]
    await eventually(lambda: len(both._unknown) == TICKETS_MAX)
    world.answer = both.offer
    world.links.dial(REPLICA, SUBJECT)
    await eventually(lambda: both.open_links == world.links.open_links == 1)
    assert world.links.open_tcp_links == 0, "the Unix socket is preferred"
    await both.close()
    await world.close()
    for _, writer in silent:
        writer.close()


async def test_bytes_that_are_no_tls_cost_one_connection(world: World) -> None:
    world.listener.offer(REPLY, MACHINE)
    reader, writer = await asyncio.open_connection("127.0.0.1", world.listener._port)
    writer.write(b"GET / HTTP/1.1\r\n\r\n" * 100)
    with contextlib.suppress(ConnectionResetError):
        await asyncio.wait_for(reader.read(), 30)
    writer.close()
    await world.dial()


# -- ways --


async def test_a_router_takes_tcp_where_the_unix_socket_does_not_open(world: World) -> None:
    changed(world, path="/nowhere/in/this/container")
    link = await world.dial()
    assert link.is_tcp
    assert world.links.open_tcp_links == 1


async def test_a_router_of_another_machine_is_offered_tcp_and_never_a_loopback_address() -> None:
    hosts = ["10.1.2.3", "model-7.example", "", "127.0.0.1", "::1", "localhost"]
    host = hosts[0]
    tasks = TaskOwner("test")
    listener = LinkListener(
        None,
        (0,),
        on_frame=lambda *_: None,
        on_end=lambda _: None,
        on_batch_end=lambda: None,
        tcp=TcpEndpoint("127.0.0.1", (0, 0), lambda: host),
        machine=MACHINE,
    )
    assert listener.offer(REPLY, "another") == LinkHead(), "it does not listen yet"
    await listener.start(tasks)
    offered = []
    for host in hosts:  # noqa: B007 - read by the endpoint
        head = listener.offer(REPLY, "another")
        assert decode_frame(encode_frame(head))[0] == head
        offered.append(head.host)
        assert (head.path, bool(head.ticket), head.port) == (
            "",
            bool(head.host),
            bool(head.host) and listener._port,
        )
    assert offered == ["10.1.2.3", "model-7.example", "", "", "", ""]
    assert listener.offer(REPLY, MACHINE).host == "localhost"
    assert listener.offer(b"_R_.x." + b"0" * 16, "another") == LinkHead()
    await listener.close()
    assert listener.offer(REPLY, "another") == LinkHead()
    await tasks.close(5)


async def test_each_replica_takes_a_free_port_of_the_range_and_does_without_when_there_is_none() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        only = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"none of the ports {only} to {only} is free"):
            tcp.listen("127.0.0.1", (only, only))
        world = World(None)
        world.listener._tcp = TcpEndpoint("127.0.0.1", (only, only), lambda: "127.0.0.1")
        await world.listener.start(world.tasks)
        await dial_fails(world)
        await world.close()
    first = only
    ports = set()
    with contextlib.ExitStack() as servers:
        for _ in range(3):
            server = servers.enter_context(tcp.listen("127.0.0.1", (first, min(first + 50, 65_535))))
            ports.add(server.getsockname()[1])
    assert len(ports) == 3
    assert all(first <= port <= first + 50 for port in ports)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "::1"])
async def test_replicas_listen_on_all_addresses_or_on_ipv6(host: str) -> None:
    if ":" in host and not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    with tcp.listen(host, (0, 0)) as server:
        port = server.getsockname()[1]
        for address in ("127.0.0.1", "::1"):
            if host in ("::", address) or (host == "0.0.0.0" and address == "127.0.0.1"):
                socket.create_connection((address, port), 10).close()
    assert tcp.is_wildcard(host) is (host != "::1")


async def test_a_peer_whose_machine_falls_silent_is_noticed_by_the_kernel() -> None:
    with socket.socket() as connection:
        tcp.configure(connection)
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 5_000
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) <= tcp.SILENCE_S


async def test_a_name_without_an_address_and_a_closed_port_are_failures(world: World) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    changed(world, port=port)
    await dial_fails(world)
    changed(world, host="no-such-host.invalid")
    await dial_fails(world)

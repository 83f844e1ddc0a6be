"""Self-signed certificates for tests of TLS."""

from __future__ import annotations

import datetime as dt
import ipaddress
import ssl
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from serve_common.clock import SystemClock


class Certificate:
    """A certificate of 127.0.0.1 and localhost in two files, which may be renewed."""

    def __init__(self, directory: Path, password: str = "") -> None:
        self.cert_file = directory / "tls.crt"
        self.key_file = directory / "tls.key"
        self.password = password
        self.renew()

    def renew(self) -> None:
        """Another key and certificate in the same files."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
        now = dt.datetime.fromtimestamp(SystemClock().now(), dt.UTC)
        names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        built = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(minutes=5))
            .not_valid_after(now + dt.timedelta(days=2))
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(key, hashes.SHA256())
        )
        secret = self.password.encode()
        self.serial = built.serial_number
        self.key_file.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.BestAvailableEncryption(secret) if secret else serialization.NoEncryption(),
            )
        )
        self.cert_file.write_bytes(built.public_bytes(serialization.Encoding.PEM))

    def trust(self) -> ssl.SSLContext:
        """What a client that trusts it, as it is now, connects with."""
        return ssl.create_default_context(cafile=self.cert_file)

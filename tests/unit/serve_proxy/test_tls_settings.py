"""The certificate of a proxy: which variables and files are refused, and in which words."""

from __future__ import annotations

from pathlib import Path

import pytest

from serve_common.errors import BadField
from serve_common.runtime.settings import Environment
from serve_proxy.http.tls import load_context
from serve_proxy.settings import TlsSettings, read_settings
from tests.support.certificates import Certificate


def read(**variables: str) -> TlsSettings | None:
    given = {"MUSTER_NATS_PASSWORD": "x", "MUSTER_PROXY_ID": "p", **variables}
    return read_settings(Environment(given)).tls


def test_without_a_certificate_there_is_plain_http_and_half_a_certificate_is_refused(tmp_path: Path) -> None:
    assert read() is None
    for name in ("KEY_FILE", "KEY_PASSWORD"):
        with pytest.raises(BadField, match="MUSTER_HTTP_TLS_CERT_FILE: must be set where"):
            read(**{f"MUSTER_HTTP_TLS_{name}": "x"})
    (tmp_path / "password").write_text("secret\n")
    settings = read(
        MUSTER_HTTP_TLS_CERT_FILE="a", MUSTER_HTTP_TLS_KEY_PASSWORD_FILE=str(tmp_path / "password")
    )
    assert settings == TlsSettings(cert_file="a", key_file=None, key_password="secret")
    assert "secret" not in repr(settings)


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    certificate = Certificate(tmp_path, password="right")
    files = {"cert_file": str(certificate.cert_file), "key_file": str(certificate.key_file)}
    assert load_context(TlsSettings(**files, key_password="right"))
    for password in ("wrong", ""):
        with pytest.raises(BadField, match=r"MUSTER_HTTP_TLS_CERT_FILE: .*tls\.key cannot be used"):
            load_context(TlsSettings(**files, key_password=password))
    with pytest.raises(BadField, match=r"absent.pem cannot be used: \[Errno 2\]"):
        load_context(TlsSettings(cert_file="absent.pem", key_file=None, key_password=""))
    both = tmp_path / "both.pem"
    plain = Certificate(tmp_path)
    both.write_bytes(plain.cert_file.read_bytes() + plain.key_file.read_bytes())
    assert load_context(TlsSettings(cert_file=str(both), key_file=None, key_password=""))

"""A certificate that is of no use is refused at start with file and remedy, not at a call."""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING, Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.x509.oid import ExtendedKeyUsageOID

from edge_server.api.certificates import CertificateWatch, check_certificates
from edge_server.errors import SettingsError
from edge_server.settings import Tls

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def tls(authority: Any) -> Callable[..., Tls]:
    certificate, key = authority.issue("server")
    files = {"certificate": certificate, "key": key, "client_ca": authority.ca}

    def choose(**changed: Path) -> Tls:
        return Tls(mutual=True, **{name: str(path) for name, path in {**files, **changed}.items()})

    return choose


def test_files_that_fit_are_taken(tls: Callable[..., Tls]) -> None:
    check_certificates(tls())


@pytest.mark.parametrize("name", ["certificate", "key", "client_ca"])
def test_a_file_that_is_not_there_is_named(
    tls: Callable[..., Tls], tmp_path: Path, name: str
) -> None:
    with pytest.raises(
        SettingsError, match=rf"^grpc\.tls\.{name}: .*/gone: cannot be read: No such file"
    ):
        check_certificates(tls(**{name: tmp_path / "gone"}))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("certificate", "holds no certificate in PEM form"),
        ("key", "holds no private key in PEM form without a password"),
        ("client_ca", "holds no certificate in PEM form"),
    ],
)
@pytest.mark.parametrize("content", [b"", b"\0\xff garbage", b"-----BEGIN CERTIFICATE-----\n"])
def test_a_file_that_holds_something_else_is_named(
    tls: Callable[..., Tls], tmp_path: Path, name: str, says: str, content: bytes
) -> None:
    path = tmp_path / "garbage"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(SettingsError, match=rf"^grpc\.tls\.{name}: .*/garbage: {says}"):
        check_certificates(tls(**{name: path}))


def test_the_key_of_another_certificate_is_refused(tls: Callable[..., Tls], authority: Any) -> None:
    _, other = authority.issue("other")
    with pytest.raises(SettingsError, match=r"other\.key: is not the key of .*server\.crt"):
        check_certificates(tls(key=other))


def test_a_certificate_that_no_client_could_use_is_refused(
    tls: Callable[..., Tls], authority: Any
) -> None:
    certificate, key = authority.issue("coin", curve=ec.SECP256K1())
    with pytest.raises(SettingsError, match=r"\.certificate: .*coin\.crt: no client could use it"):
        check_certificates(tls(certificate=certificate, key=key))


@pytest.mark.parametrize("days", [1, -1])
def test_the_certificate_of_a_client_is_refused(
    tls: Callable[..., Tls], authority: Any, days: int
) -> None:
    certificate, key = authority.issue("client", days=days, purpose=ExtendedKeyUsageOID.CLIENT_AUTH)
    with pytest.raises(SettingsError, match=r"client\.crt: is not one of a server; give one with"):
        check_certificates(tls(certificate=certificate, key=key))
    server = authority.issue("both", purpose=ExtendedKeyUsageOID.SERVER_AUTH)
    check_certificates(tls(certificate=server[0], key=server[1]))


def test_the_key_of_another_kind_is_that_of_another_certificate(
    tls: Callable[..., Tls], tmp_path: Path
) -> None:
    path = tmp_path / "other.key"
    path.touch(mode=0o600)
    path.write_bytes(
        ed25519.Ed25519PrivateKey.generate().private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    with pytest.raises(SettingsError, match=r"other\.key: is not the key of .*server\.crt"):
        check_certificates(tls(key=path))


@pytest.mark.parametrize("name", ["certificate", "key", "client_ca"])
def test_no_file_is_read_beyond_its_limit(
    tls: Callable[..., Tls], authority: Any, tmp_path: Path, name: str
) -> None:
    """A file of gigabytes would take the memory, one of many authorities the listener's time."""
    path = tmp_path / "large"
    path.touch(mode=0o600)
    path.write_bytes(authority.ca.read_bytes())
    os.truncate(path, 1 << 30)
    with pytest.raises(SettingsError, match=rf"\.{name}: .*large: has more than \d+ bytes"):
        check_certificates(tls(**{name: path}))


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        *itertools.product(
            ("certificate", "key", "client_ca"), ("empty", "half", "directory", "missing", "pipe")
        ),
        ("certificate", "of another"),
        ("key", "of another"),
    ],
)
def test_a_wrong_file_in_the_place_of_a_right_one_changes_nothing_until_it_is_right(
    authority: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, wrong: str
) -> None:
    server, other = authority.issue("server"), authority.issue("other")
    first = {"certificate": server[0], "key": server[1], "client_ca": authority.ca}
    paths = {each: tmp_path / each for each in first}
    for each, path in paths.items():
        path.write_bytes(first[each].read_bytes())
        path.chmod(0o600)
    watch = CertificateWatch(Tls(mutual=True, **{n: str(p) for n, p in paths.items()}), "grpc.tls")
    shown, path = watch.shown, paths[name]
    content = path.read_bytes()
    path.unlink()
    if wrong == "directory":
        path.mkdir()
    elif wrong == "pipe":
        os.mkfifo(path, 0o600)
    elif wrong != "missing":
        theirs = {"certificate": other[0], "key": other[1]}
        left = {"empty": b"", "half": content[: len(content) // 2]}
        path.write_bytes(left[wrong] if wrong in left else theirs[name].read_bytes())
        path.chmod(0o600)
    for _ in range(3):
        assert watch.renewed() is None
        assert watch.shown is shown
    assert caplog.text.count("grpc: certificates stay as they were: grpc.tls.") == 1
    if wrong == "directory":
        path.rmdir()
    elif wrong == "pipe":
        path.unlink()
    for each, new in zip(("certificate", "key"), other, strict=True):
        paths[each].write_bytes(new.read_bytes())
        paths[each].chmod(0o600)
    paths["client_ca"].write_bytes(authority.ca.read_bytes())
    assert watch.renewed() is not None
    assert watch.shown.certificate == other[0].read_bytes()


def test_a_key_with_a_password_is_refused_without_a_prompt(
    tls: Callable[..., Tls], authority: Any
) -> None:
    _, path = authority.issue("locked")
    key = serialization.load_pem_private_key(path.read_bytes(), None)
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"word"),
        )
    )
    with pytest.raises(SettingsError, match="without a password"):
        check_certificates(tls(key=path))


@pytest.mark.parametrize("mode", [0o604, 0o644, 0o660, 0o602])
def test_a_key_that_others_may_read_or_change_is_refused(
    tls: Callable[..., Tls], authority: Any, mode: int
) -> None:
    _, path = authority.issue("server")
    path.chmod(mode)
    with pytest.raises(SettingsError, match=rf"mode {mode:o}\): chmod 600 it"):
        check_certificates(tls(key=path))


@pytest.mark.parametrize("mode", [0o400, 0o600, 0o640])
def test_its_owner_and_its_group_may_read_it(
    tls: Callable[..., Tls], authority: Any, mode: int
) -> None:
    certificate, path = authority.issue("server")
    path.chmod(mode)
    check_certificates(tls(certificate=certificate, key=path))


@pytest.mark.parametrize(
    ("days", "fault"),
    [({"days": -1}, "has expired"), ({"begins_in_days": 1, "days": 2}, "is not valid yet")],
)
def test_a_certificate_that_is_out_of_date_does_not_replace_a_good_one(
    days: dict[str, int], fault: str, authority: Any, caplog: pytest.LogCaptureFixture
) -> None:
    certificate, key = authority.issue("server")
    watch = CertificateWatch(Tls(certificate=str(certificate), key=str(key)), "grpc.tls")
    shown = watch.shown
    authority.issue("server", **days)  # into the same files
    for _ in range(3):
        assert watch.renewed() is None
        assert watch.shown is shown
    assert caplog.text.count(f"grpc.tls.certificate: {certificate}: {fault}") == 1
    authority.issue("server")
    assert watch.renewed() is watch.shown


def test_a_certificate_that_is_not_valid_yet_is_looked_at_again(authority: Any) -> None:
    certificate, key = authority.issue("server", days=-1)
    watch = CertificateWatch(Tls(certificate=str(certificate), key=str(key)), "grpc.tls")
    expired = watch.shown
    authority.issue("server")
    assert watch.renewed() is watch.shown
    authority.issue("server", begins_in_days=1, days=2)
    assert watch.renewed() is None
    watch.shown = expired
    assert watch.renewed() is watch.shown


def test_an_expired_certificate_is_shown_where_there_is_no_better_one(authority: Any) -> None:
    certificate, key = authority.issue("server", days=-2)
    watch = CertificateWatch(Tls(certificate=str(certificate), key=str(key)), "grpc.tls")
    authority.issue("server", days=-1)
    assert watch.renewed() is watch.shown


def test_a_certificate_that_grpc_cannot_read_is_refused(
    tls: Callable[..., Tls], authority: Any
) -> None:
    certificate, key = authority.issue("server")
    text = certificate.read_bytes().replace(b" CERTIFICATE-", b" TRUSTED CERTIFICATE-")
    certificate.write_bytes(text)
    with pytest.raises(SettingsError, match=r"TRUSTED CERTIFICATE.*openssl x509"):
        check_certificates(tls(certificate=certificate, key=key))

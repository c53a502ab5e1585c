"""Certificates, signed by authorities of the tests' own."""

from __future__ import annotations

import datetime
import ipaddress
from typing import TYPE_CHECKING

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


class Authority:
    """Signs certificates for 127.0.0.1 or other addresses; its own is `ca`, in PEM form."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.ca = folder / f"{name}.pem"
        self.ca.write_bytes(_pem(self._sign(self._name, self._key.public_key(), ca=True)))

    def issue(
        self,
        name: str,
        *,
        days: int = 1,
        begins_in_days: int = -10,
        curve: ec.EllipticCurve | None = None,
        addresses: Sequence[str] = ("127.0.0.1",),
        purpose: x509.ObjectIdentifier | None = None,
    ) -> tuple[Path, Path]:
        """The files of a certificate and its key; negative `days` have passed since its end. None
        is of every purpose."""
        key = ec.generate_private_key(curve or ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        certificate_path, key_path = self._folder / f"{name}.crt", self._folder / f"{name}.key"
        signed = self._sign(
            subject,
            key.public_key(),
            days=days,
            begins_in_days=begins_in_days,
            addresses=addresses,
            purpose=purpose,
        )
        certificate_path.write_bytes(_pem(signed))
        key_path.touch(mode=0o600)
        key_path.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return certificate_path, key_path

    def _sign(
        self,
        subject: x509.Name,
        key: ec.EllipticCurvePublicKey,
        *,
        ca: bool = False,
        days: int = 1,
        begins_in_days: int = -10,
        addresses: Sequence[str] = ("127.0.0.1",),
        purpose: x509.ObjectIdentifier | None = None,
    ) -> x509.Certificate:
        now = datetime.datetime.now(datetime.timezone.utc)
        names = [x509.IPAddress(ipaddress.ip_address(each)) for each in addresses]
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + datetime.timedelta(days=begins_in_days))
            .not_valid_after(now + datetime.timedelta(days=days))
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
        )
        if purpose is not None:
            builder = builder.add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
        return builder.sign(self._key, hashes.SHA256())


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)

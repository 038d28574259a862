"""Certificates for tests: an authority of our own, and what it signs."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

import pytest

pytest.importorskip("cryptography", reason="cryptography is not installed, so no certificates can be made")
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_DAY = datetime.timedelta(days=1)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


class Authority:
    """Signs certificates. `pem` is the file that clients trust.

    Args:
        folder: where all files go. name: told apart by it from other authorities.
    """

    def __init__(self, folder: Path, name: str = "lab") -> None:
        self.folder, self.name = folder, name
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.pem = folder / f"{name}-ca.pem"
        own = self._certificate(name, self._key.public_key(), [], 365).sign(self._key, hashes.SHA256())
        self._certificate_of_own = own
        self.pem.write_bytes(own.public_bytes(serialization.Encoding.PEM))

    def sign(self, *names: str, days: int = 30) -> tuple[Path, Path]:
        """A server's certificate and key for names and addresses; `days` below 0: it has run out."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._certificate(names[0], key.public_key(), list(names), days).sign(self._key, hashes.SHA256())
        stem = f"{self.name}-{names[0].replace(':', '_')}{days}"
        files = self.folder / f"{stem}.pem", self.folder / f"{stem}-key.pem"
        files[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        files[1].write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        files[1].chmod(0o600)
        return files

    def _certificate(
        self, name: str, key: ec.EllipticCurvePublicKey, names: list[str], days: int
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        is_authority = not names
        builder = (
            x509.CertificateBuilder()
            .subject_name(_name(name))
            .issuer_name(_name(self.name))
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - 10 * _DAY)
            .not_valid_after(now + days * _DAY)
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
        )
        if is_authority:
            uses = dict.fromkeys(
                ("content_commitment", "data_encipherment", "encipher_only", "decipher_only", "key_agreement"), False
            )
            usage = x509.KeyUsage(
                digital_signature=True, key_encipherment=False, key_cert_sign=True, crl_sign=True, **uses
            )
            return builder.add_extension(usage, critical=True)
        return builder.add_extension(x509.SubjectAlternativeName([_general(n) for n in names]), critical=False)


def _general(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)

"""Encryption: what a server needs of its certificate, what a client needs of the authority that it trusts."""

from __future__ import annotations

import logging
import ssl
import stat
from pathlib import Path

from vla_rl.config import ConfigError

log = logging.getLogger(__name__)
_HOW_TO_MAKE_ONE = "docs/serve.md says how to make one"
_UNTRUSTED = (18, 19, 20, 21)  # OpenSSL's codes: self-signed, or the issuer is not known
_WRONG_NAME = (62, 64)
_NOT_YET, _EXPIRED = 9, 10


def server_context(certificate: Path | None, key: Path | None) -> ssl.SSLContext | None:
    """What a server encrypts with; None without a certificate.

    Args:
        certificate: PEM file, the server's own certificate first. key: PEM file; None: it is in `certificate` too.

    Raises:
        ConfigError: a file is missing, unreadable, no PEM, encrypted, or the key is not the certificate's.
    """
    if certificate is None:
        if key is not None:
            raise ConfigError(f"--key {key}: a key without its certificate; give --certificate too")
        return None
    key = key or certificate
    for option, path in (("--certificate", certificate), ("--key", key)):
        _check_readable(option, path)
    mode = stat.S_IMODE(key.stat().st_mode)
    if mode & 0o077:
        log.warning(
            "--key %s: others may read it (mode %o), and pass for this server. Run: chmod 600 %s", key, mode, key
        )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2

    def refuse_password() -> str:
        raise ConfigError(f"--key {key}: is encrypted. Make it plain: openssl pkey -in {key} -out plain.pem")

    try:
        context.load_cert_chain(certificate, key, password=refuse_password)
    except ssl.SSLError as error:
        if "KEY_VALUES_MISMATCH" in str(error):
            raise ConfigError(f"--key {key}: is not the key of {certificate}") from error
        where = "" if key == certificate else f", {key} one private key"
        inside = " and its private key (or give --key)" if key == certificate else ""
        raise ConfigError(
            f"--certificate {certificate}: expected PEM, a certificate{inside}{where}; {error}. {_HOW_TO_MAKE_ONE}"
        ) from error
    return context


def client_context(ca: Path | None) -> ssl.SSLContext:
    """Who a client trusts: the certificates in `ca` (PEM) and no others; the system's authorities where it is None.

    Raises:
        ConfigError: the file is missing, unreadable or holds no certificate.
    """
    if ca is None:
        return ssl.create_default_context()
    _check_readable("--ca", ca)
    try:
        return ssl.create_default_context(cafile=ca)
    except ssl.SSLError as error:
        raise ConfigError(f"--ca {ca}: no certificate in PEM ({error}). {_HOW_TO_MAKE_ONE}") from error


def why_not_trusted(error: ssl.SSLCertVerificationError) -> str:
    """What is wrong with a server's certificate, and what to do."""
    text, code = error.verify_message, error.verify_code
    if code in _UNTRUSTED:
        return f"its certificate is not signed by an authority that we trust ({text}); give that one's: --ca CA.pem"
    if code in _WRONG_NAME:
        return f"its certificate is another's ({text}); use a name that stands in it, or make one with this name"
    if code in (_NOT_YET, _EXPIRED):
        return f"{text}: make a new one, or set the clocks of both machines"
    return f"its certificate is refused: {text}"


def _check_readable(option: str, path: Path) -> None:
    try:
        with path.open("rb"):
            pass
    except OSError as error:
        raise ConfigError(f"{option} {path}: cannot be read ({error.strerror}). {_HOW_TO_MAKE_ONE}") from error

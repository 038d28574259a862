"""Server addresses, the host names by which a server may be asked, and TLS certificates."""

from __future__ import annotations

import ipaddress
import logging
import re
import socket
import ssl
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import AfterValidator

from vla_rl.config import ConfigError

DEFAULT_PORT = 8000
_ALLOWED = (
    f"host, host:port, [IPv6] or [IPv6]:port (port {DEFAULT_PORT} where none is given), or one of these after ws:// or "
    "wss:// (encrypted)"
)
_NAME = re.compile(r"[\w.-]+")
log = logging.getLogger(__name__)
_TOKENS = "Make one: (umask 077; python3 -c 'import secrets; print(secrets.token_urlsafe(32))' > robot-token)"
_CERTIFICATES = "docs/serve.md says how to make one"
_UNTRUSTED = (18, 19, 20, 21)  # OpenSSL's codes: self-signed, or the issuer is not known
_WRONG_NAME = (62, 64)
_NOT_YET, _EXPIRED = 9, 10


class AddressError(ValueError):
    """An address that cannot be read; the text says what was given and what is allowed."""


def server_url(text: str, encrypted: bool = False) -> str:
    """The ws:// or wss:// address of a policy server, with its port.

    Args:
        text: as a person writes it: host, host:port, [IPv6]:port, ws://..., wss://....
        encrypted: what has no scheme is wss.

    Raises:
        AddressError: anything else.
    """
    scheme, separator, rest = text.strip().partition("://")
    if not separator:
        scheme, rest = "wss" if encrypted else "ws", text.strip()
    if scheme not in ("ws", "wss"):
        raise _error(text, f"{scheme}:// is not spoken here")
    authority, slash, path = rest.partition("/")
    if authority.count(":") > 1 and "[" not in authority:
        raise _error(text, "an IPv6 address stands in brackets, such as [::1]:8000")
    try:
        parts = urlsplit(f"{scheme}://{authority}")
        host, port = parts.hostname or "", parts.port
    except ValueError as error:
        raise _error(text, str(error)) from None
    if parts.username is not None or parts.query or parts.fragment or not is_host(host):
        raise _error(text, "that is not a host's name or address" if host else "the host is missing")
    if port == 0 or authority.endswith(":"):
        raise _error(text, "the port is missing: 1 to 65535")
    return f"{scheme}://{bracketed(host)}:{port or DEFAULT_PORT}{slash}{path}"


def _error(text: str, why: str) -> AddressError:
    return AddressError(f"policy server {text[:120]!r}: {why}. Allowed: {_ALLOWED}")


def is_host(host: str) -> bool:
    """Whether it can be a host's name or address, without port and brackets."""
    return bool(_NAME.fullmatch(host)) or _ip(host) is not None


def bracketed(host: str) -> str:
    """The host as it stands in a URL: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


ListenHost = Annotated[str, AfterValidator(lambda host: host.removeprefix("[").removesuffix("]"))]  # to listen on


def hostname(url: str) -> str:
    """Of an origin, or of //host:port, in lower case; "" where there is none."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    address = _ip(host)
    return host == "localhost" if address is None else address.is_loopback


class HostNames:
    """The names by which a server answers: the `Host` of a request that came by any other is a page's of a stranger.

    A page can have the browser connect to any address under a name of its own (DNS rebinding), and then counts as the
    server's own page; the name that it used stands in `Host`. Loopback's names are always accepted; beyond loopback
    also the address that the request came in by, the machine's name, and what is named.

    Args:
        host: address listened on. allowed: further names, without port.

    Raises:
        AddressError: a name that is none.
    """

    def __init__(self, host: str, allowed: Iterable[str] = ()) -> None:
        for name in allowed:
            if not is_host(name):
                raise AddressError(f"--allow-host {name[:80]!r}: expected a host's name or address, without port")
        self._is_local = is_loopback(host)
        machine = "" if self._is_local else socket.gethostname().lower()
        first = machine.partition(".")[0]
        own = {host.lower(), machine, first, f"{first}.local"} if machine else set()
        self._names = own | {name.lower().rstrip(".") for name in allowed}

    def refusal(self, hosts: list[str], local_address: Any) -> str | None:
        """Why a request is refused; None where it is not.

        Args:
            hosts: values of its `Host`. local_address: socket address, of ours, that it came in by.
        """
        if len(hosts) != 1:
            return f"expected one Host header, got {len(hosts)}"
        name = hostname(f"//{hosts[0]}").rstrip(".")
        if is_loopback(name) or (name and name in self._names):
            return None
        if not self._is_local and (address := _ip(name)) is not None and address == _ip(local_address[0]):
            return None
        return (
            f"this machine is not called {hosts[0][:80]!r} here; to allow that name: --allow-host {name[:80] or 'NAME'}"
        )


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
            f"--certificate {certificate}: expected PEM, a certificate{inside}{where}; {error}. {_CERTIFICATES}"
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
        raise ConfigError(f"--ca {ca}: no certificate in PEM ({error}). {_CERTIFICATES}") from error


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
        raise ConfigError(f"{option} {path}: cannot be read ({error.strerror}). {_CERTIFICATES}") from error


def read_token(path: str | Path) -> str:
    """The bearer token in a file that only its owner may read: its single line, at least 16 characters.

    Raises:
        ValueError: missing, readable by others, or too short.
    """
    path = Path(path).expanduser()
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        token = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"token file {path}: cannot be read ({error}). {_TOKENS}") from error
    if mode & 0o077:
        raise ValueError(f"token file {path}: others may read it (mode {mode:o}). Run: chmod 600 {path}")
    if len(token) < 16 or any(not 33 <= ord(c) <= 126 for c in token):
        raise ValueError(f"token file {path}: needs one word of 16 characters or more. {_TOKENS}")
    return token

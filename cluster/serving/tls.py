"""Encryption of a server by a certificate and its key, in files."""

from __future__ import annotations

import re
import ssl
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from specdec_core.base.errors import UserError, os_reason

# As OpenSSL calls a key of another certificate; the last one where it is of another kind.
_MISMATCHES = ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH", "NO_CERTIFICATE_ASSIGNED")

_NO_CHECK_TIME = ssl.VerifyFlags(0x200000)  # X509_V_FLAG_NO_CHECK_TIME, unnamed in Python


class Tls(NamedTuple):
    """A certificate, with those that vouch for it, and its private key; PEM files."""

    certificate: Path
    key: Path

    @property
    def options(self) -> dict[str, str]:
        """As Ray Serve's proxy takes them."""
        return {"ssl_certfile": str(self.certificate), "ssl_keyfile": str(self.key)}


def read_tls(certificate: Path | None, key: Path | None) -> Tls | None:
    """What the options `--tls-cert` and `--tls-key` name, checked as the server will use it; None
    where neither is given. Raises :class:`UserError`."""
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        given, missing = ("--tls-key", "--tls-cert") if key else ("--tls-cert", "--tls-key")
        raise UserError(f"{given} needs {missing}, too: a certificate and its private key")
    for option, path in (("--tls-cert", certificate), ("--tls-key", key)):
        _read(path, f"{option} {path}")
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # Without a password OpenSSL would ask for one at the terminal.
        server.load_cert_chain(certificate, key, password="")
    except ssl.SSLError as error:
        if error.reason in _MISMATCHES:
            raise UserError(f"--tls-key {key}: not the key of {certificate}") from None
        said = f" ({error.reason.lower().replace('_', ' ')})" if error.reason else ""
        raise UserError(
            f"--tls-cert {certificate}, --tls-key {key}: expected a certificate and its private"
            f" key without a password, as PEM{said}"
        ) from None
    try:
        meet(trusting(own_certificate(certificate)), server)
    except ssl.SSLCertVerificationError as error:
        raise UserError(
            f"--tls-cert {certificate}: clients would refuse it: {error.verify_message}"
        ) from None
    return Tls(certificate.resolve(), key.resolve())


def meet(client: ssl.SSLContext, server: ssl.SSLContext) -> None:
    """Let a client see the certificate of a server, in memory. Raises
    :class:`ssl.SSLCertVerificationError` where it does not accept that."""
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    asking, answering = client.wrap_bio(back, there), server.wrap_bio(there, back, server_side=True)
    for end in (asking, answering, asking):
        with suppress(ssl.SSLWantReadError):
            end.do_handshake()


def _read(file: Path, name: str) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError as error:
        raise UserError(f"{name}: cannot be read: {os_reason(error)}") from None


def own_certificate(file: Path) -> str:
    """The server's own certificate as PEM. It comes first in `file`; those after it vouch for it,
    and for other servers. Raises :class:`UserError` where there is none."""
    text = _read(file, str(file))
    found = re.search("-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", text, re.DOTALL)
    if found is None:
        raise UserError(f"{file}: expected a certificate, as PEM")
    return found[0]


def trusting(certificate: str, at_any_time: bool = False) -> ssl.SSLContext:
    """For a client on this machine that knows the server's certificate, as PEM: it trusts that one
    alone, under whatever address it reaches the server; `at_any_time`, also once it has expired."""
    context = ssl.create_default_context(cadata=certificate)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # also a signed one
    if at_any_time:
        context.verify_flags |= _NO_CHECK_TIME
    return context

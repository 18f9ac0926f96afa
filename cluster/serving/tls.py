"""Encryption of a server by a certificate and its key, in files."""

from __future__ import annotations

import re
import ssl
from pathlib import Path
from typing import NamedTuple

from specdec_core.base.errors import UserError, os_reason


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
    try:
        # Without a password OpenSSL would ask for one at the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
    except ssl.SSLError as error:
        said = error.reason or str(error)
        if said == "KEY_VALUES_MISMATCH":
            raise UserError(f"--tls-key {key}: not the key of {certificate}") from None
        raise UserError(
            f"--tls-cert {certificate}, --tls-key {key}: expected a certificate and its private"
            f" key without a password, as PEM ({said.lower().replace('_', ' ')})"
        ) from None
    return Tls(certificate.resolve(), key.resolve())


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


def trusting(certificate: Path | None) -> ssl.SSLContext | bool:
    """For a client on this machine that knows the server's certificate: it trusts that one alone,
    under whatever address it reaches the server. Without one, as usual."""
    if certificate is None:
        return True
    context = ssl.create_default_context(cadata=own_certificate(certificate))
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # also a signed one
    return context

"""Access: API keys, what each key may use, and which pages and names a browser may ask by."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.serving.http.errors import answer
from cluster.serving.http.limits import Account, Allowance, RequestLimits
from cluster.serving.protocol.errors import ApiError
from specdec_core.base.errors import UserError, os_reason

PAGES = "/playground"  # files of the page at `/`, which itself asks with its user's key
# They ask for the server's token instead of a key.
OPERATE = ("/v1/specdec/deploy", "/v1/specdec/rollback", "/v1/specdec/stop")
ACCOUNT = "account"  # in a request's state
_OPEN = frozenset({"/health", "/ready", "/", *OPERATE})  # without a key
_HOSTS = (b"host", b"x-forwarded-host")
_PORTS = {"http": 80, "https": 443}
_LINE = re.compile(r"([0-9a-fA-F]{64})(\s.*)?")


@dataclass(frozen=True)
class Access:
    """Which requests are answered.

    Args:
        keys: the SHA-256 hashes of the API keys; None: no key is needed.
        allowance: of each key, or of all requests together where no key is needed.
        limits: of each request.
        local: whether the server answers only to this machine's own names, see
            :func:`check_host`.
    """

    keys: tuple[bytes, ...] | None = None
    allowance: Allowance = field(default_factory=Allowance)
    limits: RequestLimits = field(default_factory=RequestLimits)
    local: bool = False

    def admitting(self, token: str | None) -> Access:
        """The same, and the operator's token is a key."""
        if self.keys is None or not token:
            return self
        return replace(self, keys=(*self.keys, hashlib.sha256(token.encode()).digest()))


EVERYBODY = Access()


def read_keys(path: Path) -> tuple[bytes, ...]:
    """The hashes in a file, at least one. Raises :class:`UserError`."""
    if not (hashes := hashes_in(path)):
        raise UserError(f"{path}: no keys; `specdec serve keys` adds one")
    return hashes


def hashes_in(path: Path) -> tuple[bytes, ...]:
    """The hashes in a file: one on each line, in hexadecimal, with a comment after it. Empty lines
    and lines that begin with # are ignored. Raises :class:`UserError`."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; `specdec serve keys` writes one") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as a file of keys: {os_reason(error)}") from None
    hashes = []
    for number, line in enumerate(lines, 1):
        if not (line := line.strip()) or line.startswith("#"):
            continue
        # The line is not shown: it may be a key.
        if not (match := _LINE.fullmatch(line)):
            raise UserError(
                f"{path}:{number}: expected the SHA-256 of a key, 64 hexadecimal digits"
            )
        hashes.append(bytes.fromhex(match[1]))
    return tuple(hashes)


def check_exposed(host: str, keys: tuple[bytes, ...] | None, no_auth: bool) -> None:
    """Raises :class:`UserError` where other machines could ask without a key, unless `no_auth`."""
    if keys is None and not no_auth and not _loopback(host):
        raise UserError(
            f"--host {host}: other machines can reach this address; give --api-key-file, or"
            " --no-auth to answer every client"
        )


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def check_origin(method: str, headers: Mapping[bytes, bytes]) -> None:
    """Raises :class:`ApiError` (403) for a request that a page of another site has a browser send.
    That page cannot read the answer, but the request would be decoded. Links to this server's page
    may be followed from any site. Only browsers send these headers."""
    site = headers.get(b"sec-fetch-site")
    if site is None:  # an older browser, or a page of another machine without encryption
        foreign = b"origin" in headers and not _own(headers)
    else:
        foreign = site in (b"cross-site", b"same-site")
    following = method == "GET" and headers.get(b"sec-fetch-mode") == b"navigate"
    if foreign and not following:
        raise ApiError(
            "a page of another site may not ask this server: open its own page, or ask from a"
            " program",
            status=403,
            code="cross_site_request",
        )


def _own(headers: Mapping[bytes, bytes]) -> bool:
    """Whether the origin is the requested host, or the host that a proxy says was requested."""
    try:
        origin = urlsplit(headers[b"origin"].decode("latin-1").lower())
    except ValueError:
        return False
    hosts = (headers.get(name, b"").decode("latin-1").lower() for name in _HOSTS)
    default = f":{_PORTS.get(origin.scheme, '')}"
    named = {host.removesuffix(default) for host in hosts if host}
    return origin.netloc.removesuffix(default) in named


def check_host(headers: Mapping[bytes, bytes]) -> None:
    """Raises :class:`ApiError` (403) where the requested host is not a name of this machine. The
    name of another site may lead to this server (DNS rebinding). To the browser, that site's page
    and this server are then the same, so that the page may read the answers."""
    asked = headers.get(b"host", b"").decode("latin-1").lower()
    try:
        name = urlsplit(f"//{asked}").hostname
    except ValueError:
        name = asked
    if name and not _loopback(name):
        raise ApiError(
            "this server answers only as localhost or 127.0.0.1; with --api-key-file or --no-auth"
            " `specdec serve` answers to any name",
            status=403,
            code="unknown_host",
        )


class Gate:
    """ASGI middleware: refuses requests without access, and puts the key's account into the state
    of each request that passes."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self.app, self.access = app, access
        self._shared = Account(access.allowance, "this server")
        self._accounts = {key: Account(access.allowance) for key in access.keys or ()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        method, path, headers = scope["method"], scope["path"], dict(scope["headers"])
        try:
            check_origin(method, headers)
            if self.access.local:
                check_host(headers)
            if path not in _OPEN and not path.startswith(f"{PAGES}/"):
                account = self._account(headers.get(b"authorization", b""))
                if method == "POST":
                    account.request()
                scope.setdefault("state", {})[ACCOUNT] = account
        except ApiError as error:
            await answer(error)(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _account(self, authorization: bytes) -> Account:
        """The account of the request's key. Raises :class:`ApiError` (401)."""
        if self.access.keys is None:
            return self._shared
        scheme, _, key = authorization.partition(b" ")
        given = scheme.lower() == b"bearer" and key.strip()
        digest = hashlib.sha256(key.strip()).digest()
        # All are compared, each in constant time, so that the time does not depend on the guess.
        known = [stored for stored in self._accounts if hmac.compare_digest(stored, digest)]
        if given and known:
            return self._accounts[known[0]]
        raise ApiError(
            "this API key is not known here"
            if given
            else "an API key is needed: Authorization: Bearer KEY",
            status=401,
            type="authentication_error",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )

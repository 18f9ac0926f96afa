"""Who may ask: keys, and what each may use in a minute."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.serving.http.errors import answer
from cluster.serving.http.limits import NO_ALLOWANCE, NO_LIMITS, Account, Allowance, RequestLimits
from cluster.serving.protocol.errors import ApiError
from specdec_core.base.errors import UserError

OPEN = frozenset({"/health", "/ready"})  # what load balancers ask
PAGES = "/playground"  # files of the page at `/`, for whoever asks; it asks with its user's key
# They ask for the server's token.
OPERATE = ("/v1/specdec/deploy", "/v1/specdec/rollback", "/v1/specdec/stop")
ACCOUNT = "account"  # in a request's state
_HOSTS = (b"host", b"x-forwarded-host")
_PORTS = {"http": 80, "https": 443}
_LINE = re.compile(r"([0-9a-fA-F]{64})(\s.*)?")


@dataclass(frozen=True)
class Access:
    """Who may ask for how much.

    Args:
        keys: the SHA-256 hashes of the keys that are let in; None: everybody is.
        allowance: of each key, or of all who ask without one together.
        limits: of each request.
        local: asked by this machine's own names alone, see :func:`check_host`.
    """

    keys: tuple[bytes, ...] | None = None
    allowance: Allowance = NO_ALLOWANCE
    limits: RequestLimits = NO_LIMITS
    local: bool = False

    def admitting(self, token: str | None) -> Access:
        """The same, and the operator's token is a key."""
        if self.keys is None or not token:
            return self
        return replace(self, keys=(*self.keys, hashlib.sha256(token.encode()).digest()))


EVERYBODY = Access()


def read_keys(path: Path) -> tuple[bytes, ...]:
    """The hashes in a file: one a line in hexadecimal, with anything after it; empty lines and
    those that begin with # are ignored. Raises :class:`UserError`."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; `specdec serve keys` writes one") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = "not UTF-8 text" if isinstance(error, UnicodeDecodeError) else error.strerror
        raise UserError(f"{path}: cannot be read as a file of keys: {reason}") from None
    hashes = []
    for number, line in enumerate(lines, 1):
        if not (line := line.strip()) or line.startswith("#"):
            continue
        # A line that is no hash may be a key: it is not shown.
        if not (match := _LINE.fullmatch(line)):
            raise UserError(
                f"{path}:{number}: expected the SHA-256 of a key, 64 hexadecimal digits"
            )
        hashes.append(bytes.fromhex(match[1]))
    if not hashes:
        raise UserError(f"{path}: no keys; `specdec serve keys` adds one")
    return tuple(hashes)


def check_exposed(host: str, keys: tuple[bytes, ...] | None, no_auth: bool) -> None:
    """Raises :class:`UserError` where others than this machine could ask without a key, unless that
    was asked for."""
    if keys is None and not no_auth and not _loopback(host):
        raise UserError(
            f"--host {host}: other machines can reach this address; give --api-key-file, or"
            " --no-auth to let everybody in"
        )


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


class Accounts:
    """The accounts of the keys."""

    def __init__(self, access: Access) -> None:
        self.access = access
        self._all = Account(access.allowance)
        self._accounts = {key: Account(access.allowance) for key in access.keys or ()}

    def of(self, headers: Iterable[tuple[bytes, bytes]]) -> Account:
        """The account of a request with these headers. Raises :class:`ApiError` (401)."""
        if self.access.keys is None:
            return self._all
        given = dict(headers).get(b"authorization", b"")
        scheme, _, key = given.partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        # All are compared, each in constant time, so that no time tells how near a guess was.
        known = [stored for stored in self._accounts if hmac.compare_digest(stored, digest)]
        if scheme.lower() != b"bearer" or not known:
            raise ApiError(
                "an API key is needed: Authorization: Bearer KEY"
                if not given
                else "this API key is not known here",
                status=401,
                type="authentication_error",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return self._accounts[known[0]]


def _open(path: str) -> bool:
    return path in (*OPEN, *OPERATE) or path == "/" or path.startswith(f"{PAGES}/")


def check_origin(method: str, headers: Mapping[bytes, bytes]) -> None:
    """Raises :class:`ApiError` (403) for what a page of another site has a browser send: no such
    page can read the answer, but a request without a key would be decoded all the same. Links to
    what is shown here may be followed from anywhere. Programs send none of these headers."""
    site = headers.get(b"sec-fetch-site")
    if site is None:  # an older browser, or a page that is not encrypted and not this machine's
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
    """Whether the origin is the host that was asked, also where a proxy says which that was."""
    try:
        origin = urlsplit(headers[b"origin"].decode("latin-1").lower())
    except ValueError:
        return False
    hosts = (headers.get(name, b"").decode("latin-1").lower() for name in _HOSTS)
    default = f":{_PORTS.get(origin.scheme, '')}"
    named = {host.removesuffix(default) for host in hosts if host}
    return origin.netloc.removesuffix(default) in named


def check_host(headers: Mapping[bytes, bytes]) -> None:
    """Raises :class:`ApiError` (403) for a server that is asked by a name that is not this
    machine's own. Such a name can be another site's that was made to lead here (DNS rebinding):
    to the browser that site's page and this server are one, so it may read the answers, too."""
    asked = headers.get(b"host", b"").decode("latin-1").lower()
    try:
        name = urlsplit(f"//{asked}").hostname
    except ValueError:
        name = asked
    if name and not _loopback(name):
        raise ApiError(
            "this server is asked as localhost or 127.0.0.1 alone; `specdec serve` with"
            " --api-key-file or --no-auth is asked by any name",
            status=403,
            code="unknown_host",
        )


class Gate:
    """ASGI middleware: lets in who may ask, and puts the account into the request's state."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self.app, self.accounts = app, Accounts(access)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            headers = dict(scope["headers"])
            check_origin(scope["method"], headers)
            if self.accounts.access.local:
                check_host(headers)
            if not _open(scope["path"]):
                scope.setdefault("state", {})[ACCOUNT] = self._account(scope)
        except ApiError as error:
            await answer(error)(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _account(self, scope: Scope) -> Account:
        account = self.accounts.of(scope["headers"])
        if scope["method"] == "POST":
            account.request()
        return account

"""Who may ask: keys, and what each may use in a minute."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.serving.http.errors import answer
from cluster.serving.http.limits import NO_ALLOWANCE, NO_LIMITS, Account, Allowance, RequestLimits
from cluster.serving.protocol.errors import ApiError
from specdec_core.base.errors import UserError

OPEN = frozenset({"/health", "/ready"})  # what load balancers ask
PAGES = "/playground"  # files of the page at `/`, for whoever asks; it asks with its user's key
OPERATE = ("/v1/specdec/deploy", "/v1/specdec/rollback")  # they ask for the server's token
ACCOUNT = "account"  # in a request's state
_LINE = re.compile(r"([0-9a-fA-F]{64})(\s.*)?")


@dataclass(frozen=True)
class Access:
    """Who may ask for how much.

    Args:
        keys: the SHA-256 hashes of the keys that are let in; None: everybody is.
        allowance: of each key, or of all who ask without one together.
        limits: of each request.
    """

    keys: tuple[bytes, ...] | None = None
    allowance: Allowance = NO_ALLOWANCE
    limits: RequestLimits = NO_LIMITS

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
        raise UserError(f"{path}: no such file; `specdec make-key` writes one") from None
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
        raise UserError(f"{path}: no keys; `specdec make-key` adds one")
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
        return host == "localhost"


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


class Gate:
    """ASGI middleware: lets in who may ask, and puts the account into the request's state."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self.app, self.accounts = app, Accounts(access)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _open(scope["path"]):
            await self.app(scope, receive, send)
            return
        try:
            account = self.accounts.of(scope["headers"])
            if scope["method"] == "POST":
                account.request()
        except ApiError as error:
            await answer(error)(scope, receive, send)
            return
        scope.setdefault("state", {})[ACCOUNT] = account
        await self.app(scope, receive, send)

"""Who may do what. Pure.

    no keys set     whoever is on this machine may do everything; others too only where `open_without_keys` says so
    keys set        every request needs one, whoever sends it

A key belongs to a tenant and has scopes: `read` looks, `submit` starts and steers programs and runs turns, `admin` does both for
every tenant. The settings hold digests: keys are 256 random bits, so that a fast hash is as good as a slow one, and looking a
digest up tells nothing about how near a guess came.
"""

from __future__ import annotations

import hashlib
import ipaddress
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field

from agent_program.errors import Forbidden, Unauthenticated
from agent_program.ids import DEFAULT_TENANT, ProgramId, TenantId

_KEY_PREFIX = "ck_"


class Scope(StrEnum):
    """What a key lets its holder do."""

    READ = "read"
    SUBMIT = "submit"
    ADMIN = "admin"


class ApiKeySettings(BaseModel):
    """One key; `continuum keys new` makes it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(min_length=1, max_length=64, description="What people call it, in logs.")
    sha256: str = Field(pattern="^[0-9a-f]{64}$", description="SHA-256 of the key, in hexadecimal digits.")
    scopes: tuple[Scope, ...] = Field(
        default=(Scope.READ, Scope.SUBMIT), min_length=1, description="What it allows: read, submit, admin."
    )
    tenant: str = Field(
        default=DEFAULT_TENANT,
        pattern="^[a-z0-9][a-z0-9-]{0,62}$",
        description="Whose programs its holder sees and starts.",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Caller:
    """Who sends a request."""

    tenant_id: TenantId
    scopes: frozenset[Scope]
    #: The key's name; None for somebody without one.
    key_name: str | None

    @property
    def is_admin(self) -> bool:
        return Scope.ADMIN in self.scopes

    def may_see(self, tenant_id: str) -> bool:
        """Whether a program of that tenant exists, for this caller."""
        return self.is_admin or self.tenant_id == tenant_id

    def engine_id(self, program_id: ProgramId) -> ProgramId:
        """What the router and the engines call a program that this caller runs itself. Its ids are the client's own choice, so
        where tenants are told apart they are too; `/` is in no id that a client can send."""
        return program_id if self.key_name is None else ProgramId(f"{self.tenant_id}/{program_id}")


def cache_salt(tenant_id: str) -> str | None:
    """What keeps a tenant's KV blocks from being found by another one (vLLM's `cache_salt`); None for the default tenant."""
    return None if tenant_id == DEFAULT_TENANT else f"tenant {tenant_id}"


#: Somebody who may do everything: there are no keys.
ANYBODY = Caller(tenant_id=DEFAULT_TENANT, scopes=frozenset(Scope), key_name=None)


class AccessPolicy:
    """Tells callers apart."""

    def __init__(self, keys: Sequence[ApiKeySettings], *, open_without_keys: bool) -> None:
        self._keys = {
            key.sha256: Caller(tenant_id=TenantId(key.tenant), scopes=frozenset(key.scopes), key_name=key.name)
            for key in keys
        }
        self._open_without_keys = open_without_keys

    def caller(self, *, key: str | None, address: str | None) -> Caller:
        """Who sends a request with `key`, from `address`.

        Raises:
            Unauthenticated: a key is needed and this is none.
            Forbidden: there are no keys, and the request comes from another machine.
        """
        if self._keys:
            found = self._keys.get(digest(key)) if key else None
            if found is None:
                raise Unauthenticated("no such API key" if key else "an API key is needed: Authorization: Bearer …")
            return found
        if self._open_without_keys or is_local(address):
            return ANYBODY
        raise Forbidden(
            "this platform has no API keys and answers its own machine only; its operator can set http.api_keys, or "
            "http.open_without_keys"
        )


def require(caller: Caller, scope: Scope) -> None:
    """Raises Forbidden where the caller's key does not have the scope."""
    if scope not in caller.scopes and not caller.is_admin:
        raise Forbidden(f"the API key {caller.key_name!r} does not have the scope {scope.value!r}")


def new_key() -> str:
    """A key that nobody has: 256 random bits."""
    return _KEY_PREFIX + secrets.token_urlsafe(32)


def digest(key: str) -> str:
    """What the settings hold of a key."""
    return hashlib.sha256(key.encode()).hexdigest()


def bearer(authorization: str | None) -> str | None:
    """The key of an `Authorization` header."""
    scheme, _, key = (authorization or "").partition(" ")
    return key.strip() or None if scheme.lower() == "bearer" else None


def is_local(address: str | None) -> bool:
    """Whether an address is this machine's loopback. None is a connection without an address, which is local too."""
    if address is None:
        return True
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return (mapped or ip).is_loopback

"""Identities, and the one rule for what a client may use as one.

An id travels in Redis keys, log lines, HTTP headers and file names, so its alphabet is small and its length bounded.
"""

from __future__ import annotations

import re
import secrets
from typing import NewType

from agent_program.errors import InvalidRequest

ProgramId = NewType("ProgramId", str)
"""One agent program: its turns and tool calls share context."""
TenantId = NewType("TenantId", str)
ReplicaId = NewType("ReplicaId", str)
"""One incarnation of a replica; a replacement gets another id."""
ToolKey = NewType("ToolKey", str)
"""What tool-latency history is grouped by: `pytest` for a shell that ran pytest, otherwise the tool's name."""

ID_BYTES_MAX = 256
DEFAULT_TENANT = TenantId("default")
_ID_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@+=-]*")


def parse_id(text: object, *, what: str) -> str:
    """Return `text` if it may serve as an id; `what` names the field in the error.

    Raises:
        InvalidRequest: not a string, empty, longer than `ID_BYTES_MAX` bytes, or outside the safe alphabet.
    """
    if not isinstance(text, str) or not text:
        raise InvalidRequest(f"{what} must be a non-empty string", param=what)
    if len(text.encode("utf-8", "replace")) > ID_BYTES_MAX:
        raise InvalidRequest(f"{what} is longer than {ID_BYTES_MAX} bytes", param=what)
    if not _ID_PATTERN.fullmatch(text):
        raise InvalidRequest(
            f"{what} may hold letters, digits and ._:@+=- only, and starts with a letter or digit", param=what
        )
    return text


def parse_program_id(text: object, *, what: str = "program_id") -> ProgramId:
    """`parse_id` for program ids."""
    return ProgramId(parse_id(text, what=what))


def new_program_id() -> ProgramId:
    """A fresh random program id (128 bits)."""
    return ProgramId(f"prog_{secrets.token_hex(16)}")

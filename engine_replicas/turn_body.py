"""From a client's body and the platform's hints to what vLLM is given.

A client may not name a program by itself here: `session_id` and everything that starts with `continuum_` come from the hints
alone, which the ingress built after it had checked who asks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agent_program.turn import TurnHints

#: Fields that mean something to the platform or to a connector between engines, not to this engine's API.
_DROPPED_FIELDS = frozenset(
    {"continuum", "ec_transfer_params", "kv_transfer_params", "program_id", "request_id", "session_id", "vllm_xargs"}
)
_RESERVED_XARGS_PREFIX = "continuum_"


def engine_body(body: Mapping[str, Any], hints: TurnHints | None) -> dict[str, Any]:
    """The body for vLLM; `body` is not changed. Without hints the turn belongs to no program."""
    cleaned = {field: value for field, value in body.items() if field not in _DROPPED_FIELDS}
    xargs = body.get("vllm_xargs")
    kept = {
        name: value
        for name, value in (xargs if isinstance(xargs, Mapping) else {}).items()
        if isinstance(name, str) and name != "session_id" and not name.startswith(_RESERVED_XARGS_PREFIX)
    }
    if hints is not None:
        cleaned["session_id"] = hints.program_id
        kept |= hints.to_xargs()
    if kept:
        cleaned["vllm_xargs"] = kept
    return cleaned

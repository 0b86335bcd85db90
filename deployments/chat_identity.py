"""Which program a chat completion belongs to, and what its client says about it.

Identity, first found wins: body `program_id`, body `session_id`, header `X-Program-ID`, header `X-Session-ID`. A request with
none is a lone turn: vLLM's own behaviour, nothing retained. An id that is given and not valid is an error; a *hint* that is
unknown or malformed is ignored, because a hint is advice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agent_program.errors import InvalidRequest
from agent_program.ids import ProgramId, ToolKey, parse_id
from agent_program.turn import TurnHints
from deployments.access import ANYBODY, Caller, cache_salt

_BODY_IDS = ("program_id", "session_id")
_HEADER_IDS = ("x-program-id", "x-session-id")
_HINTS = "continuum"
_TOOL_CHARS_MAX = 256
_TURNS_MAX = 1_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class IdentifiedChat:
    """A chat completion without what is ours, and what is ours."""

    #: For the engine: an OpenAI chat completion request.
    body: dict[str, Any]
    #: None for a request that belongs to no program.
    hints: TurnHints | None
    #: The program, as its client calls it.
    program_id: ProgramId | None


def identify(body: Mapping[str, Any], headers: Mapping[str, str], caller: Caller = ANYBODY) -> IdentifiedChat:
    """Tell the platform's part of a request of `caller` from the engine's. `headers` has lower-case names.

    Raises:
        InvalidRequest: the program id is not a valid id.
    """
    engine_body = {key: value for key, value in body.items() if key not in (*_BODY_IDS, _HINTS)}
    if (salt := cache_salt(caller.tenant_id)) is not None:
        own = body.get("cache_salt")
        engine_body["cache_salt"] = f"{salt}/{own}" if isinstance(own, str) else salt
    program_id = _program_id(body, headers)
    if program_id is None:
        return IdentifiedChat(body=engine_body, hints=None, program_id=None)
    hints = _hints(program_id, caller, body.get(_HINTS))
    return IdentifiedChat(body=engine_body, hints=hints, program_id=program_id)


def _program_id(body: Mapping[str, Any], headers: Mapping[str, str]) -> ProgramId | None:
    for name in _BODY_IDS:
        if body.get(name) is not None:
            return ProgramId(parse_id(body[name], what=name))
    for name in _HEADER_IDS:
        if headers.get(name):
            return ProgramId(parse_id(headers[name], what=name))
    return None


def _hints(program_id: ProgramId, caller: Caller, sent: object) -> TurnHints:
    given: Mapping[str, Any] = sent if isinstance(sent, dict) else {}
    next_tool, remaining, branch = given.get("next_tool"), given.get("remaining_turns"), given.get("branch")
    is_tool = isinstance(next_tool, str) and 0 < len(next_tool) <= _TOOL_CHARS_MAX
    is_count = isinstance(remaining, int) and not isinstance(remaining, bool) and 0 <= remaining <= _TURNS_MAX
    is_branch = isinstance(branch, str) and 0 < len(branch) <= _TOOL_CHARS_MAX
    return TurnHints(
        program_id=caller.engine_id(program_id),
        tenant_id=caller.tenant_id,
        branch=branch if is_branch else "0",  # type: ignore[arg-type]
        is_last_turn=given.get("is_last_turn") is True,
        next_tool=ToolKey(next_tool) if is_tool else None,  # type: ignore[arg-type]
        remaining_turns=remaining if is_count else None,
        parent_program_id=_relative(given.get("parent_program_id"), caller),
        previous_program_id=_relative(given.get("previous_program_id"), caller),
    )


def _relative(named: object, caller: Caller) -> ProgramId | None:
    try:
        return None if named is None else caller.engine_id(ProgramId(parse_id(named, what="a relative")))
    except InvalidRequest:
        return None

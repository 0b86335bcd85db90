"""What a turn tells the scheduler about its program, and how that rides on a vLLM request.

vLLM's `vllm_xargs` reach the scheduler as `request.sampling_params.extra_args`: a flat dict of str, int, float (no bool,
no nesting). The program id itself is vLLM's own `session_id`. Unknown or malformed hints are dropped, never an error: a
hint is advice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from agent_program.ids import DEFAULT_TENANT, ID_BYTES_MAX, ProgramId, TenantId, ToolKey

_PREFIX = "continuum_"


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnHints:
    """What is known about a turn when it is sent to an engine."""

    program_id: ProgramId
    tenant_id: TenantId = DEFAULT_TENANT
    #: Concurrent requests of one program that do not share a tail (sub-agents, n-way sampling) name different branches.
    branch: str = "0"
    #: The program ends with this turn: nothing is worth retaining afterwards.
    is_last_turn: bool = False
    #: The tool that the client says it will run after this turn; None where the turn's output decides.
    next_tool: ToolKey | None = None
    #: How many turns the client says are still to come after this one.
    remaining_turns: int | None = None
    #: The tool that ran between the previous turn and this one, and exactly how long; both None for a first turn or where
    #: only the request gap is known.
    last_tool: ToolKey | None = None
    last_tool_s: float | None = None
    #: For the router, not for the engine: the program that started this one as a sub-program, and the ended one that it goes
    #: on with.
    parent_program_id: ProgramId | None = None
    previous_program_id: ProgramId | None = None

    def to_xargs(self) -> dict[str, str | int | float]:
        """The flat form for `vllm_xargs`; absent hints are left out."""
        flat: dict[str, str | int | float] = {
            "tenant": self.tenant_id,
            "branch": self.branch,
            "last_turn": int(self.is_last_turn),
        }
        if self.next_tool is not None:
            flat["next_tool"] = self.next_tool
        if self.remaining_turns is not None:
            flat["remaining_turns"] = self.remaining_turns
        if self.last_tool is not None:
            flat["last_tool"] = self.last_tool
        if self.last_tool_s is not None:
            flat["last_tool_s"] = self.last_tool_s
        return {_PREFIX + key: value for key, value in flat.items()}

    @classmethod
    def from_xargs(cls, program_id: str, xargs: Mapping[str, object] | None) -> TurnHints:
        """Read hints back. Fields that are absent, of the wrong type or too long take their defaults."""
        flat = xargs or {}

        def text(key: str) -> str | None:
            value = flat.get(_PREFIX + key)
            return value if isinstance(value, str) and 0 < len(value) <= ID_BYTES_MAX else None

        def number(key: str) -> float | None:
            value = flat.get(_PREFIX + key)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            return float(value) if is_number and 0 <= value < 1e9 else None  # type: ignore[arg-type,operator]

        remaining_turns, last_tool = number("remaining_turns"), text("last_tool")
        next_tool = text("next_tool")
        return cls(
            program_id=ProgramId(program_id),
            tenant_id=TenantId(text("tenant") or DEFAULT_TENANT),
            branch=text("branch") or "0",
            is_last_turn=number("last_turn") == 1,
            next_tool=ToolKey(next_tool) if next_tool else None,
            remaining_turns=None if remaining_turns is None else int(remaining_turns),
            last_tool=ToolKey(last_tool) if last_tool else None,
            last_tool_s=number("last_tool_s"),
        )

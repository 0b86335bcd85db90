"""What a tool actor says it holds of a program."""

from __future__ import annotations

from dataclasses import dataclass

from agent_program.ids import ProgramId, TenantId


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldProgram:
    """A program that has a sandbox or files on a tool actor, and ran nothing there for a while."""

    tenant_id: TenantId
    program_id: ProgramId
    #: It has a sandbox that is alive; otherwise only files.
    is_live: bool

"""What an older version has written to the store can still be read."""

from __future__ import annotations

import json
from typing import Any

from deployments.program import ProgramRecord, ProgramSpec

LIMITS: dict[str, Any] = {
    "max_turns": 4,
    "max_tokens_per_turn": 64,
    "max_total_tokens": None,
    "max_seconds": 60.0,
    "tool_timeout_s": None,
}
#: As the first version of the journal wrote them, before tenants, tool specs and required actions.
RECORD = {
    "id": "p",
    "state": "completed",
    "model": "small",
    "created_at": 1.0,
    "updated_at": 2.0,
    "started_at": 1.5,
    "finished_at": 2.0,
    "end_reason": "answer",
    "error": None,
    "turns": 1,
    "current_tool": None,
    "tools": ["shell"],
    "limits": LIMITS,
    "metadata": {},
    "usage": {"prompt_tokens": 10, "cached_tokens": 0, "recomputed_tokens": 0, "output_tokens": 1},
    "tool_seconds": 0.0,
    "tool_calls": 0,
    "leases": {},
    "replica": "r1",
    "replayed_turns": 0,
    "output": "done",
    "cancel_requested": False,
}
SPEC = {
    "id": "p",
    "tenant_id": "default",
    "model": "small",
    "messages": [{"role": "user", "content": "Go."}],
    "tools": ["shell"],
    "tool_choice": "auto",
    "limits": LIMITS,
    "sampling": {},
    "metadata": {},
    "created_at": 1.0,
}


def test_the_first_versions_programs_are_readable() -> None:
    record = ProgramRecord.model_validate_json(json.dumps(RECORD))
    assert (record.tenant_id, record.required_action) == ("default", None)
    spec = ProgramSpec.model_validate_json(json.dumps(SPEC))
    assert (spec.tools, spec.limits.action_expires_s) == ([], 3600.0)

"""What programs did, as plain records for analysis and replay: sizes, times and tool keys, and no word of what was said. Pure.

One object a finished program, in the shape below; readers ignore keys that they do not know.

    format             "continuum.program/1"
    id, model, state, end_reason, created_at, started_at, finished_at, max_turns
    turns              turn, started_at, finished_at, seconds, prompt_tokens, cached_tokens, recomputed_tokens, output_tokens,
                       attempts, replica, tools, tool_key, tool_seconds
    turns[].tools      tool, tool_key, outcome, started_at, finished_at, duration_s, queue_s

`prompt_tokens` is a turn's whole context. `tool_key` and `tool_seconds` are the wait after the turn, from the first tool's
start to the last one's end; None where none was measured. Times ending in `_at` are Unix seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

FORMAT = "continuum.program/1"

Json = Mapping[str, Any]

_PROGRAM_KEYS = ("id", "model", "state", "end_reason", "created_at", "started_at", "finished_at")
_TURN_KEYS = ("turn", "seconds", "prompt_tokens", "cached_tokens", "recomputed_tokens", "output_tokens", "replica")
_TOOL_KEYS = ("tool", "tool_key", "outcome", "duration_s", "queue_s")


def export_program(program: Json) -> dict[str, Any]:
    """The record of one program.

    Args:
        program: the program object of the REST API with its `journal`.
    """
    exported = {key: program.get(key) for key in _PROGRAM_KEYS}
    turns = list(_turns(program["journal"]))
    return {"format": FORMAT, **exported, "max_turns": program["limits"]["max_turns"], "turns": turns}


def _turns(journal: Sequence[Json]) -> Iterator[dict[str, Any]]:
    starts: dict[int, tuple[float, int]] = {}
    finished = [step for step in journal if step["kind"] == "turn.finished"]
    for step in journal:
        if step["kind"] == "turn.started":
            starts[step["data"]["turn"]] = (step["at"], step["data"]["attempt"])
    for step in finished:
        data = step["data"]
        started_at, attempts = starts.get(data["turn"], (step["at"] - data["seconds"], 1))
        wait = _last(journal, "tools.finished", data["turn"])
        yield {
            **{key: data[key] for key in _TURN_KEYS},
            "started_at": started_at,
            "finished_at": step["at"],
            "attempts": attempts,
            "tools": list(_tools(journal, data["turn"])),
            "tool_key": wait["tool_key"] if wait is not None else None,
            "tool_seconds": wait["seconds"] if wait is not None else None,
        }


def _last(journal: Sequence[Json], kind: str, turn: int) -> Json | None:
    found = [step["data"] for step in journal if step["kind"] == kind and step["data"]["turn"] == turn]
    return found[-1] if found else None


def _tools(journal: Sequence[Json], turn: int) -> Iterator[dict[str, Any]]:
    starts: dict[str, float] = {}
    for step in journal:
        data = step["data"]
        if data.get("turn") != turn:
            continue
        if step["kind"] == "tool.started":
            starts[data["call_id"]] = step["at"]
        elif step["kind"] == "action.required":
            starts |= {call["call_id"]: step["at"] for call in data["calls"]}
        elif step["kind"] == "tool.finished":
            times = {"started_at": starts.get(data["call_id"], step["at"]), "finished_at": step["at"]}
            yield {**{key: data[key] for key in _TOOL_KEYS}, **times}

"""Public trace formats, read into programs. Only counts and times are taken; texts are looked at for tool names and dropped.

| format | file | what it is |
|---|---|---|
| `native` | `.jsonl` | the replay's own (`trace.py`) |
| `mini-swe-agent` | `.traj.json`, or a directory of them | trajectories with API usage in `extra.response` |
| `claude-code` | `.jsonl` session, or a directory of them | Claude Code sessions, as AgentCgroup keeps them (`trace.jsonl`) |
| `weka` | `.json`, or a directory of them | kv-cache-tester: requests with block hashes, sub-agents nested |
| `mooncake` | `.jsonl` | requests with 512-token block hashes; sessions are put together from shared blocks |
| `tracelab` | `.csv` | one round a row, with prefix length and tool wait |
| `journal` | `.jsonl` | what `continuum programs export` writes of this platform's own programs |

What a format does not say is left unknown (`tool_s` null), except where it has time stamps only: then the wait is the time
between two requests, less the recorded time of the API where there is one, and so an upper bound. What is not of its format is
refused with the name of the file and the number of the line, request or message.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

from agent_program.errors import InvalidRequest
from benchmarks.replay.import_journal import read_journal
from benchmarks.replay.import_rows import Row, continued, json_document, json_lines, place, turn_row
from benchmarks.replay.trace import USER_WAIT, Program, Trace, load_trace, program_from_dict
from tool_runtime.tool_key import combine, tool_key

MOONCAKE_BLOCK_TOKENS = 512


def import_trace(path: Path, *, format_name: str | None = None) -> Trace:
    """Read a trace of any known format; None finds out which one it is.

    Raises:
        InvalidRequest: an unknown format, a file that is not of it, or nothing in it.
    """
    if not path.exists():
        raise InvalidRequest(f"no trace at {path}", param="trace")
    chosen = format_name or detect_format(path)
    if chosen == "native":
        return load_trace(path)
    if chosen not in IMPORTERS:
        raise InvalidRequest(f"unknown trace format {chosen!r}; known: native, {', '.join(IMPORTERS)}", param="format")
    with place(path, "", chosen):
        programs = tuple(_programs(IMPORTERS[chosen](path), path.stem))
    if not programs:
        raise InvalidRequest(f"{path.name} holds no program", param="trace")
    return Trace(name=path.stem, programs=programs)


def detect_format(path: Path) -> str:
    """Which format a file or directory is in.

    Raises:
        InvalidRequest: none that is known.
    """
    if path.is_dir():
        names = [file.name for file in path.rglob("*") if file.is_file()]
        if any(name.endswith((".traj.json", ".traj")) for name in names):
            return "mini-swe-agent"
        if any(name.endswith(".jsonl") for name in names):
            return "claude-code"
        return "weka"
    if path.suffix == ".csv":
        return "tracelab"
    if path.name.endswith((".traj.json", ".traj")):
        return "mini-swe-agent"
    if path.suffix == ".json":
        return "weka"
    for row in _first_objects(path):
        for key, name in _TELLING_KEYS:
            if key in row:
                return name
    raise InvalidRequest(f"cannot tell the format of {path.name}; name it", param="format")


#: A key of a JSON Lines row that tells its format.
_TELLING_KEYS = (
    ("format", "journal"),
    ("turns", "native"),
    ("hash_ids", "mooncake"),
    ("message", "claude-code"),
)
#: Sessions may begin with rows about themselves.
_ROWS_LOOKED_AT = 50


def _first_objects(path: Path) -> Iterator[Mapping[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        for line in islice(lines, _ROWS_LOOKED_AT):
            try:
                loaded = json.loads(line) if line.strip() else {}
            except ValueError:
                return
            if isinstance(loaded, dict):
                yield loaded


def _programs(rows: Iterable[Row], namespace: str) -> Iterator[Program]:
    for row in rows:
        if row["turns"]:
            yield program_from_dict(row, prefix_namespace=namespace)


def _files(path: Path, *suffixes: str) -> list[Path]:
    return sorted(p for p in path.rglob("*") if p.name.endswith(suffixes)) if path.is_dir() else [path]


# --- mini-swe-agent ----------------------------------------------------------------------------------------------------


def _mini_swe_agent(path: Path) -> Iterator[Row]:
    for file in _files(path, ".traj.json", ".traj"):
        document = json_document(file, "mini-swe-agent")
        with place(file, "", "mini-swe-agent"):
            turns = _mini_swe_turns(file, document["messages"])
        yield {"program_id": document.get("instance_id") or file.name.split(".")[0], "kind": "task", "turns": turns}


def _mini_swe_turns(file: Path, messages: Sequence[Mapping[str, Any]]) -> list[Row]:
    turns: list[Row] = []
    created: list[float | None] = []
    for number, message in enumerate(messages, start=1):
        with place(file, f" message {number}", "mini-swe-agent"):
            response = (message.get("extra") or {}).get("response") or {}
            usage = response.get("usage")
            if message.get("role") != "assistant" or not usage:
                continue
            inputs, outputs = int(usage["prompt_tokens"]), int(usage["completion_tokens"])
            if turns and created[-1] is not None and response.get("created") is not None:
                turns[-1]["tool_s"] = max(0.0, float(response["created"]) - created[-1])
            turns.append(
                turn_row(
                    inputs=inputs,
                    prefix=continued(turns, inputs),
                    outputs=outputs,
                    tool=tool_key("bash", {"command": _command(message)}),
                    tool_s=None,
                )
            )
            created.append(None if response.get("created") is None else float(response["created"]))
    return turns


def _command(message: Mapping[str, Any]) -> str:
    """The action: the first tool call's command, or what the first fenced block of the text holds."""
    for call in message.get("tool_calls") or ():
        return str(json.loads(call["function"]["arguments"] or "{}").get("command") or "")
    parts = str(message.get("content") or "").split("```")
    return parts[1].split("\n", 1)[-1] if len(parts) >= 3 else ""


# --- Claude Code sessions ----------------------------------------------------------------------------------------------


def _claude_code(path: Path) -> Iterator[Row]:
    for file in _files(path, ".jsonl"):
        turns: list[Row] = []
        seen: dict[str, Row] = {}
        ended_s = 0.0
        for number, event in json_lines(file, "claude-code"):
            message = event.get("message")
            if not isinstance(message, dict) or event.get("isSidechain"):
                continue
            with place(file, f" line {number}", "claude-code"):
                at_s = _seconds(event.get("timestamp"))
                if message.get("role") == "user" and turns:
                    # The first result after a turn ends its tool wait if nothing later does.
                    waits_for_tool = _has(message, "tool_result")
                    turns[-1]["tool"] = turns[-1]["tool"] or (None if waits_for_tool else USER_WAIT)
                    turns[-1]["tool_s"] = max(0.0, at_s - ended_s)
                elif message.get("role") == "assistant" and message.get("usage"):
                    ended_s = at_s
                    _claude_turn(message, turns, seen)
        name = file.stem if file.stem != "trace" else "/".join(file.parts[-3:-1])
        yield {"program_id": name, "kind": "task", "turns": turns}


def _claude_turn(message: Mapping[str, Any], turns: list[Row], seen: dict[str, Row]) -> None:
    """One message may come in several events, each with a part of its content and the usage so far."""
    usage = message["usage"]
    cached = int(usage.get("cache_read_input_tokens") or 0)
    inputs = int(usage.get("input_tokens") or 0) + int(usage.get("cache_creation_input_tokens") or 0) + cached
    tools = [
        tool_key("bash" if part["name"] == "Bash" else part["name"], part.get("input") or {})
        for part in message.get("content") or []
        if isinstance(part, dict) and part.get("type") == "tool_use"
    ]
    known = seen.get(str(message.get("id")))
    if known is not None:
        known["output_tokens"] = max(known["output_tokens"], int(usage.get("output_tokens") or 0))
        known["tool"] = combine([tool for tool in (known["tool"], *tools) if tool]) if tools else known["tool"]
        return
    turn = turn_row(
        inputs=max(1, inputs),
        prefix=continued(turns, inputs),
        outputs=int(usage.get("output_tokens") or 0),
        tool=combine(tools) if tools else None,
        tool_s=None,
    )
    turns.append(turn)
    seen[str(message.get("id"))] = turn


def _has(message: Mapping[str, Any], kind: str) -> bool:
    content = message.get("content")
    return isinstance(content, list) and any(isinstance(part, dict) and part.get("type") == kind for part in content)


def _seconds(stamp: object) -> float:
    return datetime.fromisoformat(str(stamp).replace("Z", "+00:00")).timestamp()


# --- kv-cache-tester (Weka) --------------------------------------------------------------------------------------------


def _weka(path: Path) -> Iterator[Row]:
    for file in _files(path, ".json"):
        document = json_document(file, "weka")
        with place(file, "", "weka"):
            shared = int(document.get("tool_tokens") or 0) + int(document.get("system_tokens") or 0)
            block = int(document.get("block_size") or 64)
            rows = list(_weka_agent(file, document["requests"], str(document.get("id") or file.stem), block, None))
        for row in rows:
            yield row | {"shared_prefix_tokens": shared}


def _weka_agent(
    file: Path, requests: list[Mapping[str, Any]], name: str, block: int, parent: Row | None
) -> Iterator[Row]:
    turns: list[Row] = []
    children: list[tuple[int, list[Mapping[str, Any]]]] = []
    hashes: list[int] = []
    end_s: float | None = None
    for number, request in enumerate(requests, start=1):
        with place(file, f" request {number} of {name}", "weka"):
            if request.get("requests") is not None:
                if turns:
                    children.append((len(turns) - 1, list(request["requests"])))
                continue
            inputs, start_s = int(request["in"]), float(request.get("t") or 0.0)
            if turns:
                turns[-1]["tool_s"] = _weka_wait_s(request, start_s, end_s)
            blocks = list(request.get("hash_ids") or [])
            common = _common(hashes, blocks)
            whole = common >= len(hashes) - 1 and bool(turns)
            turns.append(
                turn_row(
                    inputs=inputs,
                    prefix=continued(turns, inputs) if whole else common * block if turns else 0,
                    outputs=int(request.get("out") or 0),
                    tool="tool_result" if request.get("stop") in (None, "", "tool_use") else USER_WAIT,
                    tool_s=None,
                )
            )
            hashes = blocks
            end_s = start_s + float(request.get("api_time") or 0.0)
    row: Row = {"program_id": name, "kind": "task", "turns": turns}
    yield row if parent is None else {**row, "kind": "sub_agent", "parent": parent}
    for index, (turn, nested) in enumerate(children):
        # A turn that starts sub-agents and is the last one has nobody to wait for them.
        if turn + 1 < len(turns):
            yield from _weka_agent(file, nested, f"{name}.{index}", block, {"program_id": name, "turn": turn})


def _weka_wait_s(request: Mapping[str, Any], start_s: float, end_s: float | None) -> float | None:
    if request.get("think_time") is not None:
        return float(request["think_time"])
    return None if end_s is None else start_s - end_s


def _common(left: list[int], right: list[int]) -> int:
    count = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        count += 1
    return count


# --- Mooncake ----------------------------------------------------------------------------------------------------------


def _mooncake(path: Path) -> Iterator[Row]:
    """A request belongs to the session whose last request holds the longest run of its blocks, if that is most of it."""
    sessions: list[Row] = []
    stamps: list[float] = []
    holder: dict[int, tuple[int, int]] = {}
    for number, request in json_lines(path, "mooncake"):
        with place(path, f" line {number}", "mooncake"):
            blocks = [int(block) for block in request["hash_ids"]]
            at_s, inputs = float(request["timestamp"]) / 1e3, int(request["input_length"])
            outputs = int(request["output_length"])
            found = next((holder[block] for block in reversed(blocks) if block in holder), None)
            matched = 0 if found is None else (found[1] + 1) * MOONCAKE_BLOCK_TOKENS
            if found is None or matched < sessions[found[0]]["turns"][-1]["input_tokens"] / 2:
                index, prefix = len(sessions), 0
                sessions.append({"program_id": f"session-{index}", "kind": "session", "arrival_s": at_s, "turns": []})
                stamps.append(at_s)
            else:
                index, turns = found[0], sessions[found[0]]["turns"]
                turns[-1] |= {"tool": USER_WAIT, "tool_s": max(0.0, at_s - stamps[index])}
                stamps[index] = at_s
                is_whole = matched >= turns[-1]["input_tokens"] - MOONCAKE_BLOCK_TOKENS
                prefix = continued(turns, inputs) if is_whole else matched
            sessions[index]["turns"].append(
                turn_row(inputs=inputs, prefix=prefix, outputs=outputs, tool=None, tool_s=None)
            )
            for position, block in enumerate(blocks):
                holder[block] = (index, position)
    yield from sessions


# --- TraceLab ----------------------------------------------------------------------------------------------------------


def _tracelab(path: Path) -> Iterator[Row]:
    rounds: dict[str, list[tuple[int, float, Row]]] = {}
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        for row in reader:
            with place(path, f" line {reader.line_num}", "tracelab"):
                prefix = int(row["prefix_len"])
                turn = turn_row(
                    inputs=prefix + int(row["input_len"]),
                    prefix=prefix,
                    outputs=int(row["output_len"]),
                    tool="tool",
                    tool_s=float(row["tool_wait_after_ms"]) / 1e3,
                )
                arrival_s = float(row["arrival_time"]) / 1e3
                rounds.setdefault(row["id"], []).append((int(row["round_idx"]), arrival_s, turn))
    for name, session in rounds.items():
        session.sort(key=lambda one: one[0])
        yield {
            "program_id": f"tracelab-{name}",
            "kind": "session",
            "arrival_s": session[0][1],
            "turns": [turn for _, _, turn in session],
        }


IMPORTERS: Mapping[str, Callable[[Path], Iterator[Row]]] = {
    "mini-swe-agent": _mini_swe_agent,
    "claude-code": _claude_code,
    "weka": _weka,
    "mooncake": _mooncake,
    "tracelab": _tracelab,
    "journal": read_journal,
}

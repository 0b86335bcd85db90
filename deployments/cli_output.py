"""What the command line prints: JSON for programs, tables and lines for people. No decision and no I/O but printing.

Programs' and tools' own text is printed without markup: a model's output may contain anything.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from deployments.rest_client import ServerEvent

Json = Mapping[str, Any]

STATE_STYLES = {
    "queued": "dim",
    "running": "cyan",
    "waiting_tool": "yellow",
    "requires_action": "magenta",
    "completed": "green",
    "failed": "bold red",
    "cancelled": "red",
    "expired": "red",
}
#: Characters of a model's or a tool's text that a progress line shows.
EXCERPT_CHARS = 100


def print_json(console: Console, value: Any) -> None:
    """One JSON document on one line, whatever the width of the terminal."""
    console.file.write(json.dumps(value, ensure_ascii=False) + "\n")
    console.file.flush()


def styled_state(state: str) -> Text:
    return Text(state, style=STATE_STYLES.get(state, ""))


def excerpt(text: object, *, chars: int = EXCERPT_CHARS) -> str:
    """The beginning of a text on one line."""
    line = " ".join(str(text if text is not None else "").split())
    return line if len(line) <= chars else line[: chars - 1] + "…"


def seconds(value: float | None) -> str:
    """A duration for people; a dash where there is none."""
    if value is None:
        return "–"
    if value < 10:
        return f"{value:.2f} s"
    return f"{value:.1f} s" if value < 120 else f"{value / 60:.1f} min"


def reused_share(usage: Json) -> float:
    """The fraction of all prompt tokens whose KV was found in the cache; 0 before the first turn."""
    prompt = usage.get("prompt_tokens", 0)
    return usage.get("cached_tokens", 0) / prompt if prompt else 0.0


def counts(values: Json) -> str:
    """`reused 3, expired 1`; a dash where there is none."""
    return ", ".join(f"{name} {number}" for name, number in sorted(values.items()) if number) or "–"


def program_duration_s(program: Json) -> float | None:
    """Seconds from submission to the end; None while it runs."""
    finished = program.get("finished_at")
    return None if finished is None else finished - program["created_at"]


def program_table(programs: Sequence[Json]) -> Table:
    """One row a program."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("program", no_wrap=True)
    table.add_column("state")
    for column in ("turns", "tools", "prompt", "reused", "age"):
        table.add_column(column, justify="right", no_wrap=True)
    for program in programs:
        usage = program["usage"]
        table.add_row(
            program["id"],
            state_and_why(program),
            str(program["turns"]),
            seconds(program["tool_seconds"]),
            str(usage["prompt_tokens"]),
            f"{reused_share(usage):.0%}",
            _age(program["created_at"]),
        )
    return table


def state_and_why(program: Json) -> Text:
    """`completed max_turns`, `waiting_tool shell`, `running`."""
    why = program.get("end_reason") or program.get("current_tool") or ""
    return Text.assemble(styled_state(program["state"]), f" {why}".rstrip())


def program_details(program: Json) -> Table:
    """One program, a line for each thing worth knowing."""
    usage, error = program["usage"], program.get("error")
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    rows: list[tuple[str, str | Text]] = [
        ("program", program["id"]),
        ("state", styled_state(program["state"])),
        ("ended because", program.get("end_reason") or "–"),
        ("model", program["model"]),
        ("submitted", _when(program["created_at"])),
        ("took", seconds(program_duration_s(program))),
        ("turns", f"{program['turns']} of at most {program['limits']['max_turns']}"),
        ("tools", ", ".join(program["tools"]) or "–"),
        ("tool time", seconds(program["tool_seconds"])),
        ("prompt tokens", f"{usage['prompt_tokens']} ({usage['cached_tokens']} from cached KV)"),
        ("recomputed", str(usage["recomputed_tokens"])),
        ("output tokens", str(usage["output_tokens"])),
        ("leases", counts(program["leases"])),
        ("replica", program.get("replica") or "–"),
    ]
    rows.extend(("waits for", line) for line in required_action_lines(program)[1:])
    if error:
        rows.append(("error", Text(f"{error['code']}: {error['message']}", style="red")))
    rows.append(("answer", program.get("output") or "–"))
    for name, value in rows:
        table.add_row(name, value if isinstance(value, Text) else Text(value))
    return table


def required_action_lines(program: Json) -> list[Text]:
    """What a program waits for, a line a call; nothing where it waits for nothing."""
    action = program.get("required_action")
    if not action:
        return []
    asked = {"output": "output of", "approval": "consent to"}
    calls = [
        Text(
            f"  {call['call_id']}  {asked.get(call['kind'], call['kind'])} {call['tool']} {excerpt(call['arguments'])}"
        )
        for call in action["calls"]
    ]
    return [Text(f"  waits until {_when(action['expires_at'])} for:"), *calls]


def tool_table(tools: Sequence[Json]) -> Table:
    """The registered tools, in OpenAI's function shape."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("tool", no_wrap=True)
    table.add_column("kind", no_wrap=True)
    table.add_column("what it does")
    table.add_column("arguments")
    for tool in tools:
        function = tool.get("function", tool)
        arguments = function.get("parameters", {}).get("properties", {})
        described = Text(function.get("description", ""))
        table.add_row(function["name"], tool.get("kind", "–"), described, ", ".join(arguments))
    return table


def latency_table(tools: Sequence[Json]) -> Table:
    """How long each tool takes."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("tool", no_wrap=True)
    for column in ("calls", "half within", "90 % within", "99 % within"):
        table.add_column(column, justify="right", no_wrap=True)
    for tool in tools:
        quantiles = [seconds(tool.get(name)) for name in ("p50_s", "p90_s", "p99_s")]
        table.add_row(Text(tool["tool"]), str(tool["count"]), *quantiles)
    return table


def event_line(event: ServerEvent) -> Text:
    """One step of a program's journal as one line."""
    kind, _, moment = event.name.partition(".")
    line = Text(f"{kind:>7} ", style="bold") + Text(f"{moment:<9}", style="dim")
    return line + Text(_describe(event.name, event.data))


def _describe(name: str, data: Json) -> str:
    match name:
        case "program.queued":
            return f"model {data.get('model', '')}, tools {', '.join(data.get('tools', ())) or 'none'}"
        case "program.claimed":
            return "taken over from another runner" if data.get("resumed") else ""
        case "turn.started":
            return f"turn {data['turn']}"
        case "turn.delayed":
            return f"turn {data['turn']} waits for a replica: {data.get('reason', '')}"
        case "turn.replayed":
            return f"turn {data['turn']} runs again: {data.get('reason', '')}"
        case "turn.finished":
            return (
                f"turn {data['turn']}: {data['prompt_tokens']} prompt tokens, {data['cached_tokens']} from cached KV, "
                f"{data['output_tokens']} output, {seconds(data.get('seconds'))}; {_said(data['message'])}"
            )
        case "tool.started":
            return f"{data['tool']} {excerpt(data.get('arguments'))}"
        case "tool.finished":
            return f"{data['tool']} {data['outcome']} after {seconds(data.get('duration_s'))}: {excerpt(data.get('output'))}"
        case "tools.finished":
            return f"waited {seconds(data.get('seconds'))} for {data.get('tool_key') or 'tools'}"
        case "action.required":
            asked = ", ".join(f"{call['tool']} ({call['call_id']})" for call in data["calls"])
            return f"waits for its client until {_when(data['expires_at'])}: {asked}"
        case "action.decided":
            decision = "agreed to" if data["approved"] else "refused"
            return f"{decision} {data['tool']} ({data['call_id']}) {data.get('reason') or ''}"
        case "action.taken":
            return f"answered after {seconds(data.get('seconds'))}"
        case "program.ended":
            error = data.get("error")
            return f"{data['state']} ({data['end_reason']})" + (f": {error['message']}" if error else "")
        case _:
            return excerpt(json.dumps(data, ensure_ascii=False))


def _said(message: Json) -> str:
    calls = message.get("tool_calls") or ()
    if calls:
        return "calls " + ", ".join(call["function"]["name"] for call in calls)
    return f"“{excerpt(message.get('content'))}”"


def _when(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _age(unix_s: float) -> str:
    return seconds(max(0.0, datetime.now(UTC).timestamp() - unix_s))

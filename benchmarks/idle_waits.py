"""The waits of recorded programs, with what an engine could have known when each began."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.survival import Wait

#: Harnesses that stop a command after two minutes: such a wait says only that it is longer.
_CUT_OFF_S = {"agentcgroup_haiku45": (119.5, 121.5)}
#: Traces whose waits are what they say, are estimated, or are only bounded from above.
TRACES = {
    "agentcgroup_haiku45": "measured, ms",
    "tracelab_examples": "measured; two programs",
    "swesmith_with_timings": "commands run again; five programs",
    "swebench_minisweagent_gemini3pro": "estimated from request stamps: interface latency leaks in",
    "weka_claude_code_tasks": "upper bounds with 1 s resolution: client overhead, permission prompts and sub-agents are inside; no "
    "tool names",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class IdleWait:
    """The time between the end of a turn and the next one."""

    program: int
    tool: str
    turn: int
    context_tokens: int
    output_tokens: int
    #: The program's waits before this one, oldest first.
    past_s: tuple[float, ...]
    wait: Wait

    @property
    def tool_class(self) -> str:
        """What the tool's name begins with: `Bash` of `Bash:pytest`, the first of several parallel calls."""
        return self.tool.split("+")[0].split(":")[0]


def read_waits(directory: Path, trace: str) -> list[IdleWait]:
    """All waits of a trace, program by program in the file's order, which is that of time where the trace has one."""
    waits: list[IdleWait] = []
    with (directory / f"{trace}.jsonl").open(encoding="utf-8") as lines:
        programs = [json.loads(line) for line in lines]
    programs.sort(key=lambda program: program.get("arrival_s") or 0.0)
    for number, program in enumerate(programs):
        waits.extend(_of_program(number, program["turns"], _CUT_OFF_S.get(trace)))
    return waits


def _of_program(
    number: int, turns: list[dict[str, object]], cut_off_s: tuple[float, float] | None
) -> Iterator[IdleWait]:
    past: list[float] = []
    # The last turn's wait is not one: nothing came after it.
    for index, turn in enumerate(turns[:-1]):
        tool, seconds = turn["tool"], turn["tool_s"]
        if not isinstance(tool, str) or not isinstance(seconds, int | float):
            continue
        is_cut_off = cut_off_s is not None and cut_off_s[0] <= seconds <= cut_off_s[1]
        yield IdleWait(
            program=number,
            tool=tool,
            turn=index,
            context_tokens=int(str(turn["input_tokens"])) + int(str(turn["output_tokens"])),
            output_tokens=int(str(turn["output_tokens"])),
            past_s=tuple(past[-16:]),
            wait=Wait(float(seconds), is_cut_off),
        )
        past.append(float(seconds))

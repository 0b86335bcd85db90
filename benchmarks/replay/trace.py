"""Agent programs as numbers: what a replay runs. Token counts and times, never text. Pure but for reading files.

A trace file is JSON Lines, one program a line:

    program_id, kind, source, arrival_s | null, shared_prefix_tokens?, parent?, turns: [
      {input_tokens, prefix_tokens, new_input_tokens, output_tokens, tool | null, tool_s | null}, ...]

`prefix_tokens + new_input_tokens = input_tokens` on every turn. `prefix_tokens` is how much of the prompt the previous
turn left in the KV cache; less than that turn's input and output together means that the program edited its context.
`tool` runs after the turn, `tool_s` is the wait until the next turn is ready.

Three traps of recorded traces, all met here: the last turn's `tool_s` is not a sample (its tool is null, or named and
never followed by a turn); `tool_s` may be null, and then has to be drawn (`workload.py`); a trace may hold prompts
longer than a model's context, and such programs are left out and counted.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agent_program.errors import InvalidRequest

#: The tool name of a wait for a person.
USER_WAIT = "__user__"


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One request of a program and the tool wait after it."""

    input_tokens: int
    #: Leading tokens of the prompt that are unchanged from the previous turn of this program.
    prefix_tokens: int
    output_tokens: int
    #: The tool that runs after this turn; None at the program's end.
    tool: str | None
    #: Seconds from the end of this turn until the next one is ready; None where the source does not say.
    tool_s: float | None

    @property
    def new_input_tokens(self) -> int:
        return self.input_tokens - self.prefix_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Parent:
    """A sub-agent's place: it starts when this turn ends, and the turn after it waits for the sub-agent."""

    program_id: str
    #: Index of the turn that starts it.
    turn: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """One agent program."""

    program_id: str
    turns: tuple[Turn, ...]
    #: What kind of agent it is; a class label for estimators and reports.
    kind: str = "task"
    #: Seconds since the start of the trace; None where arrivals are to be drawn.
    arrival_s: float | None = None
    #: Leading tokens (system prompt, tool schemas) that all programs with the same `shared_prefix` begin with.
    shared_prefix: str | None = None
    shared_prefix_tokens: int = 0
    parent: Parent | None = None

    @property
    def peak_tokens(self) -> int:
        return max(turn.input_tokens + turn.output_tokens for turn in self.turns)

    @property
    def new_tokens(self) -> int:
        """Tokens that a cache which never evicts would still have to compute."""
        return sum(turn.new_input_tokens for turn in self.turns)

    @property
    def output_tokens(self) -> int:
        return sum(turn.output_tokens for turn in self.turns)


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """A set of programs with one origin."""

    name: str
    programs: tuple[Program, ...]
    #: Programs left out when it was loaded, and why.
    left_out: tuple[tuple[str, int], ...] = ()

    @property
    def digest(self) -> str:
        """Identifies the content, for result caches."""
        canonical = json.dumps([program_to_dict(program) for program in self.programs], sort_keys=True)
        return hashlib.sha256(canonical.encode()).hexdigest()

    def within(self, context_tokens: int) -> Trace:
        """The programs whose every turn fits a context of this size; the others are counted in `left_out`."""
        kept = tuple(program for program in self.programs if program.peak_tokens < context_tokens)
        dropped = len(self.programs) - len(kept)
        note = ((f"longer than {context_tokens} tokens", dropped),) if dropped else ()
        return replace(self, programs=kept, left_out=self.left_out + note)

    def scaled(self, factor: float) -> Trace:
        """The same programs with every token count multiplied, as the paper does with BFCL (x 0.4)."""
        return replace(
            self, name=f"{self.name} x{factor:g}", programs=tuple(_scaled(program, factor) for program in self.programs)
        )


def _scaled(program: Program, factor: float) -> Program:
    turns: list[Turn] = []
    for turn in program.turns:
        prefix = int(turn.prefix_tokens * factor)
        if turns:
            prefix = min(prefix, turns[-1].input_tokens + turns[-1].output_tokens)
        new = max(1, round(turn.new_input_tokens * factor))
        output = max(1, round(turn.output_tokens * factor))
        turns.append(replace(turn, input_tokens=prefix + new, prefix_tokens=prefix, output_tokens=output))
    return replace(program, turns=tuple(turns), shared_prefix_tokens=int(program.shared_prefix_tokens * factor))


def load_trace(path: Path, *, limit: int | None = None) -> Trace:
    """Read a trace file.

    Raises:
        InvalidRequest: the file is missing, or a line is not a program; the message names the line.
    """
    try:
        with path.open(encoding="utf-8") as lines:
            programs, left_out = _parse(lines, path.name, limit)
    except OSError as error:
        raise InvalidRequest(f"cannot read trace {path}: {error.strerror}", param="trace") from error
    if not programs:
        raise InvalidRequest(f"{path.name} holds no program", param="trace")
    return Trace(name=path.stem, programs=tuple(programs), left_out=left_out)


def _parse(lines: Iterable[str], name: str, limit: int | None) -> tuple[list[Program], tuple[tuple[str, int], ...]]:
    programs: list[Program] = []
    empty = 0
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if limit is not None and len(programs) >= limit:
            break
        try:
            program = program_from_dict(json.loads(line), prefix_namespace=name)
        except (ValueError, KeyError, TypeError, InvalidRequest) as error:
            raise InvalidRequest(f"{name} line {number}: not a program ({error})", param="trace") from error
        if program.turns:
            programs.append(program)
        else:
            empty += 1
    return programs, ((("no turns", empty),) if empty else ())


def program_from_dict(row: dict[str, Any], *, prefix_namespace: str) -> Program:
    """One program from its JSON form; the last turn loses its tool, since nothing follows it.

    Raises:
        InvalidRequest: counts that contradict each other.
        KeyError, TypeError, ValueError: the row does not have the shape.
    """
    turns = [_turn(turn) for turn in row["turns"]]
    if turns:
        turns[-1] = replace(turns[-1], tool=None, tool_s=None)
    turns[:-1] = [turn if turn.tool is not None else replace(turn, tool="unknown") for turn in turns[:-1]]
    # Some sources report what the server had cached for the first turn; nothing of this program is cached before it.
    if turns:
        turns[0] = replace(turns[0], prefix_tokens=0)
    parent = row.get("parent")
    shared = int(row.get("shared_prefix_tokens") or 0)
    return Program(
        program_id=str(row["program_id"]),
        turns=tuple(turns),
        kind=str(row.get("kind") or "task"),
        arrival_s=None if row.get("arrival_s") is None else float(row["arrival_s"]),
        shared_prefix=str(row.get("shared_prefix") or prefix_namespace) if shared else None,
        shared_prefix_tokens=shared,
        parent=None if parent is None else Parent(program_id=str(parent["program_id"]), turn=int(parent["turn"])),
    )


def _turn(row: dict[str, Any]) -> Turn:
    inputs, prefix, new = int(row["input_tokens"]), int(row["prefix_tokens"]), int(row["new_input_tokens"])
    if prefix + new != inputs or min(prefix, new) < 0:
        raise InvalidRequest(f"prefix_tokens {prefix} + new_input_tokens {new} is not input_tokens {inputs}")
    seconds = row.get("tool_s")
    if seconds is not None and float(seconds) < 0:
        raise InvalidRequest(f"tool_s {seconds} is negative")
    # A prompt whose every token is cached still computes its last one; an empty answer still samples one token.
    return Turn(
        input_tokens=max(1, inputs),
        prefix_tokens=min(prefix, max(0, inputs - 1)),
        output_tokens=max(1, int(row["output_tokens"])),
        tool=row.get("tool"),
        tool_s=None if seconds is None else float(seconds),
    )


def program_to_dict(program: Program) -> dict[str, Any]:
    """The JSON form that `program_from_dict` reads."""
    row: dict[str, Any] = {
        "program_id": program.program_id,
        "kind": program.kind,
        "arrival_s": program.arrival_s,
        "turns": [
            {
                "input_tokens": turn.input_tokens,
                "prefix_tokens": turn.prefix_tokens,
                "new_input_tokens": turn.new_input_tokens,
                "output_tokens": turn.output_tokens,
                "tool": turn.tool,
                "tool_s": turn.tool_s,
            }
            for turn in program.turns
        ],
    }
    if program.shared_prefix is not None:
        row |= {"shared_prefix": program.shared_prefix, "shared_prefix_tokens": program.shared_prefix_tokens}
    if program.parent is not None:
        row["parent"] = {"program_id": program.parent.program_id, "turn": program.parent.turn}
    return row


def save_trace(trace: Trace, path: Path) -> None:
    """Write a trace in the format that `load_trace` reads."""
    path.write_text("".join(json.dumps(program_to_dict(program)) + "\n" for program in trace.programs))


def pooled_eta(programs: Sequence[Program]) -> float:
    """-Corr(k, N-k) over all (turns served, turns left) pairs: 1 for equal lengths, 0 memoryless, below 0 heavy-tailed."""
    pairs = list(_steps(programs))
    if len(pairs) < 2:
        return 0.0
    mean_k = sum(k for k, _ in pairs) / len(pairs)
    mean_left = sum(left for _, left in pairs) / len(pairs)
    covariance = sum((k - mean_k) * (left - mean_left) for k, left in pairs)
    spread_k = sum((k - mean_k) ** 2 for k, _ in pairs)
    spread_left = sum((left - mean_left) ** 2 for _, left in pairs)
    return -covariance / (spread_k * spread_left) ** 0.5 if spread_k > 0 and spread_left > 0 else 0.0


def _steps(programs: Sequence[Program]) -> Iterator[tuple[int, int]]:
    for program in programs:
        count = len(program.turns)
        for k in range(1, count):
            yield k, count - k

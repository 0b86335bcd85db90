"""Seeded agent programs with forced lengths, and the client that plays them against one engine replica.

A benchmark must replay the very same work under every preset, so nothing here depends on what the model answers: context
sizes, output lengths, tool times and arrivals are drawn before the run from one seed. What the model *says* still becomes
part of the next prompt, as in any agent loop.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from agent_program.clock import Clock
from agent_program.ids import ProgramId, ToolKey
from agent_program.tool_events import ToolEvent, ToolEventKind, ToolOutcome
from agent_program.turn import TurnHints
from engine_replicas.turn_stream import TurnClosed, TurnOpened

_WORDS = (  # noqa: SIM905 - a list literal of forty words reads worse
    "file error test class value return import module line path branch commit index table query block cache token graph "
    "node edge list map set key lock thread event loop state reply parse build check patch merge trace stack frame"
).split()
_TOOLS = ("pytest", "grep", "pip", "python")


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptedTurn:
    """One LLM turn and the tool wait behind it."""

    #: About this many prompt tokens are new in this turn (words; one word is close to one token).
    new_words: int
    #: Exactly this many tokens are generated.
    output_tokens: int
    tool: ToolKey
    #: Seconds that the tool takes; 0 after the last turn.
    tool_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptedProgram:
    """A program whose every size and time is fixed in advance."""

    program_id: ProgramId
    arrival_s: float
    turns: tuple[ScriptedTurn, ...]
    text_seed: int

    @property
    def context_tokens_max(self) -> int:
        """About how many tokens its last turn holds."""
        return sum(turn.new_words + turn.output_tokens for turn in self.turns)


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkloadShape:
    """What a workload is drawn from."""

    programs: int = 10
    arrivals_per_s: float = 0.5
    turns: tuple[int, int] = (4, 7)
    first_words: tuple[int, int] = (500, 1100)
    later_words: tuple[int, int] = (60, 260)
    output_tokens: tuple[int, int] = (16, 48)
    #: Lognormal tool seconds: exp(mu) is the median; sigma near 1.2 gives the heavy tail seen in agent traces.
    tool_s_median: float = 1.0
    tool_s_sigma: float = 1.2
    tool_s_max: float = 20.0


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnRun:
    """What one turn saw; times are the client's clock's."""

    sent_s: float
    first_token_s: float
    ended_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramRun:
    """What one program saw."""

    program_id: ProgramId
    completion_s: float
    first_token_s: float
    prompt_tokens: int
    cached_tokens: int
    #: Prompt tokens of later turns that the previous turn already held and that were computed again.
    recomputed_tokens: int
    reused_tokens: int
    turns: tuple[TurnRun, ...] = ()


class Replica(Protocol):
    """The part of an engine replica that a client needs."""

    def chat(self, body: dict[str, Any], hints: TurnHints | None) -> AsyncIterator[TurnOpened | str | TurnClosed]: ...

    async def tool_event(self, event: ToolEvent) -> None: ...

    async def release_program(self, program_id: str) -> object: ...


def draw_programs(shape: WorkloadShape, *, seed: int) -> list[ScriptedProgram]:
    """The workload of one seed: Poisson arrivals, uniform sizes, lognormal tool times."""
    rng = random.Random(seed)
    programs, arrival_s = [], 0.0
    for number in range(shape.programs):
        count = rng.randint(*shape.turns)
        turns = tuple(_draw_turn(shape, rng, position, count) for position in range(count))
        program_id = ProgramId(f"bench-{seed}-{number}")
        text_seed = rng.getrandbits(32)
        programs.append(ScriptedProgram(program_id=program_id, arrival_s=arrival_s, turns=turns, text_seed=text_seed))
        arrival_s += rng.expovariate(shape.arrivals_per_s)
    return programs


def _draw_turn(shape: WorkloadShape, rng: random.Random, position: int, count: int) -> ScriptedTurn:
    words = rng.randint(*(shape.first_words if position == 0 else shape.later_words))
    tool_s = min(shape.tool_s_max, shape.tool_s_median * rng.lognormvariate(0.0, shape.tool_s_sigma))
    return ScriptedTurn(
        new_words=words,
        output_tokens=rng.randint(*shape.output_tokens),
        tool=ToolKey(rng.choice(_TOOLS)),
        tool_s=tool_s if position < count - 1 else 0.0,
    )


def working_set_tokens(programs: Sequence[ScriptedProgram]) -> int:
    """Tokens that all programs together would hold at the end of their last turns."""
    return sum(program.context_tokens_max for program in programs)


async def play(
    programs: Sequence[ScriptedProgram],
    replica: Replica,
    *,
    model: str,
    clock: Clock,
    on_done: Callable[[ProgramRun], None] = lambda run: None,
) -> list[ProgramRun]:
    """Run all programs at their arrival times; returns in the order given.

    Raises:
        RuntimeError: the engine refused or failed a turn (a benchmark must not count it as fast).
    """
    start_s = clock.now_s()

    async def one(program: ScriptedProgram) -> ProgramRun:
        await asyncio.sleep(max(0.0, start_s + program.arrival_s - clock.now_s()))
        run = await _play_one(program, replica, model=model, clock=clock)
        on_done(run)
        return run

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(program)) for program in programs]
    return [task.result() for task in tasks]


async def _play_one(program: ScriptedProgram, replica: Replica, *, model: str, clock: Clock) -> ProgramRun:
    rng = random.Random(program.text_seed)
    messages: list[dict[str, Any]] = []
    arrived_s, first_token_s = clock.now_s(), 0.0
    prompt = cached = recomputed = reused = context = 0
    last_tool: ToolKey | None = None
    last_tool_s: float | None = None
    turns: list[TurnRun] = []
    for position, turn in enumerate(program.turns):
        messages.append({"role": "user", "content": " ".join(rng.choices(_WORDS, k=turn.new_words))})
        is_last = position == len(program.turns) - 1
        hints = TurnHints(
            program_id=program.program_id,
            is_last_turn=is_last,
            next_tool=None if is_last else turn.tool,
            last_tool=last_tool,
            last_tool_s=last_tool_s,
        )
        sent_s = clock.now_s()
        text, first_s, closed = await _turn(replica, _body(model, messages, turn), hints, clock)
        turns.append(
            TurnRun(
                sent_s=sent_s,
                first_token_s=first_s,
                ended_s=clock.now_s(),
                prompt_tokens=closed.prompt_tokens,
                output_tokens=closed.output_tokens,
                cached_tokens=closed.cached_tokens,
            )
        )
        first_token_s = first_token_s or first_s - arrived_s
        messages.append({"role": "assistant", "content": text})
        prompt, cached = prompt + closed.prompt_tokens, cached + closed.cached_tokens
        reused += min(context, closed.cached_tokens)
        recomputed += max(0, context - closed.cached_tokens)
        context = closed.prompt_tokens + closed.output_tokens
        last_tool, last_tool_s = turn.tool, turn.tool_s
        if not is_last:
            await _run_tool(replica, program.program_id, turn)
    completion_s = clock.now_s() - arrived_s
    await replica.release_program(program.program_id)
    return ProgramRun(
        program_id=program.program_id,
        completion_s=completion_s,
        first_token_s=first_token_s,
        prompt_tokens=prompt,
        cached_tokens=cached,
        recomputed_tokens=recomputed,
        reused_tokens=reused,
        turns=tuple(turns),
    )


def _body(model: str, messages: list[dict[str, Any]], turn: ScriptedTurn) -> dict[str, Any]:
    return {
        "model": model,
        "messages": messages,
        "temperature": 0,
        "max_tokens": turn.output_tokens,
        "min_tokens": turn.output_tokens,
        "stream": True,
    }


async def _turn(
    replica: Replica, body: dict[str, Any], hints: TurnHints, clock: Clock
) -> tuple[str, float, TurnClosed]:
    """One streamed turn: its text, when its first token came, and its closing report."""
    text: list[str] = []
    first_s: float | None = None
    closed: TurnClosed | None = None
    async for item in replica.chat(body, hints):
        if isinstance(item, TurnOpened):
            if item.status != 200:
                raise RuntimeError(f"turn of {hints.program_id} was refused with status {item.status}")
        elif isinstance(item, TurnClosed):
            closed = item
        else:
            delta = _delta_text(item)
            if delta and first_s is None:
                first_s = clock.now_s()
            text.append(delta)
    if closed is None or first_s is None:
        raise RuntimeError(f"turn of {hints.program_id} ended without a report or without any token")
    return "".join(text), first_s, closed


def _delta_text(chunk: str) -> str:
    """The text inside server-sent chat chunks."""
    out = []
    for line in chunk.splitlines():
        if line.startswith("data: ") and line != "data: [DONE]":
            event = json.loads(line[len("data: ") :])
            if "error" in event:
                raise RuntimeError(f"the engine failed mid-stream: {event['error']}")
            out += [choice["delta"].get("content") or "" for choice in event.get("choices", [])]
    return "".join(out)


async def _run_tool(replica: Replica, program_id: ProgramId, turn: ScriptedTurn) -> None:
    started = ToolEvent(program_id=program_id, kind=ToolEventKind.STARTED, tool=turn.tool)
    await replica.tool_event(started)
    await asyncio.sleep(turn.tool_s)
    finished = ToolEvent(
        program_id=program_id,
        kind=ToolEventKind.FINISHED,
        tool=turn.tool,
        elapsed_s=turn.tool_s,
        outcome=ToolOutcome.OK,
    )
    await replica.tool_event(finished)

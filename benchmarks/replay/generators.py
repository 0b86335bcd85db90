"""Seeded workload generators, fitted to published statistics where there are any. Pure.

| name | fitted to |
|---|---|
| `swebench` | the paper's Table 2: 10.9 ± 2.1 turns, tools 925 ± 3,550 ms, 70,126 ± 19,732 tokens a program |
| `bfcl` | the paper's Table 2: 6.3 ± 2.3 turns, tools 1,923 ± 2,133 ms, 0.4 x 93,256 ± 68,687 tokens a program |
| `openhands` | longer coding programs; the paper gives no statistics, so turns and tools follow public OpenHands-like traces |
| `swesmith` | the replication's 100 jobs: 17.9 turns, median prompt 6,945, median output 30, tools of exactly 1 s |
| `heavy_tail` | TraceLab's tool times: 4 % of the calls last over a minute and hold most of the time; log-normal lengths |
| `memoryless` | geometric program lengths: what has been served says nothing about what is left (eta near 0) |
| `interactive` | a coding assistant in a developer's hands (Weka's Claude Code tasks, tokens x 0.4): lengths so heavy-tailed that eta is below 0 |
| `subagents` | every third program sends out sub-agents that share a system prompt, and waits for all of them |
| `chat` | tools and people: half the waits are for a person |
| `fixed_length` | every program has twelve turns (eta 1), and tools that answer at once, behind a long shared system prompt |
| `drift` | tool times grow tenfold half-way through the programs |

The paper's BFCL was run with lengths scaled by 0.4 to fit 128k, and Table 2 must be from before: numbers between 0 and 128,000
with a mean of 93,256 cannot have a deviation above 57,000.

What the paper does not publish, and is assumed here: output tokens a turn (300 for SWE-Bench, 150 for BFCL; log-normal),
the share of the context in the first prompt, and that "tokens per program" is the final context. Tool times are log-normal
with the published mean and deviation. The paper's Fig. 3 has about 12k tokens to come from a SWE-Bench program's
thirteenth turn on; ours, which grow evenly, have about 5.5k.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Protocol

from agent_program.errors import InvalidRequest
from benchmarks.replay.trace import USER_WAIT, Parent, Program, Trace, Turn


class Draw(Protocol):
    """A distribution of one number."""

    def __call__(self, rng: Random) -> float: ...


@dataclass(frozen=True, slots=True)
class Fixed:
    """Always the same."""

    value: float

    def __call__(self, rng: Random) -> float:
        return self.value


@dataclass(frozen=True, slots=True)
class Normal:
    """Normal, cut off below."""

    mean: float
    sd: float
    at_least: float

    def __call__(self, rng: Random) -> float:
        return max(self.at_least, rng.gauss(self.mean, self.sd))


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Log-normal with this mean and standard deviation (not those of its logarithm)."""

    mean: float
    sd: float

    def __call__(self, rng: Random) -> float:
        variance = math.log(1.0 + (self.sd / self.mean) ** 2)
        return rng.lognormvariate(math.log(self.mean) - variance / 2.0, math.sqrt(variance))


@dataclass(frozen=True, slots=True)
class Geometric:
    """1, 2, 3, … with this mean, each step as likely to be the last as any other."""

    mean: float

    def __call__(self, rng: Random) -> float:
        return 1.0 + math.floor(math.log(1.0 - rng.random()) / math.log(1.0 - 1.0 / self.mean))


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Log-linear between its 25 %, 50 %, 90 % and 99 % quantiles, and from a fifth of the first to four times the last."""

    values: tuple[float, float, float, float]

    def __call__(self, rng: Random) -> float:
        shares = (0.0, 0.25, 0.5, 0.9, 0.99, 1.0)
        values = (self.values[0] / 5.0, *self.values, self.values[-1] * 4.0)
        at = rng.random()
        above = bisect_right(shares, at, hi=len(shares) - 1)
        part = (at - shares[above - 1]) / (shares[above] - shares[above - 1])
        return float(values[above - 1] * (values[above] / values[above - 1]) ** part)


@dataclass(frozen=True, slots=True)
class Capped:
    """Another distribution, cut off above."""

    draw: Draw
    at_most: float

    def __call__(self, rng: Random) -> float:
        return min(self.at_most, self.draw(rng))


@dataclass(frozen=True, kw_only=True, slots=True)
class Tool:
    """A tool of a generated agent."""

    name: str
    weight: float
    seconds: Draw


@dataclass(frozen=True, kw_only=True, slots=True)
class SubAgents:
    """Programs that a program sends out and waits for."""

    #: Share of the programs that send any.
    share: float
    #: How many at once.
    count: int
    shape: AgentShape


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentShape:
    """What a kind of agent looks like in numbers."""

    kind: str
    turns: Draw
    #: Final context of a program, in tokens.
    context_tokens: Draw
    output_tokens: Draw
    tools: tuple[Tool, ...]
    #: Share of the context's input that the first prompt holds (system prompt, task).
    first_prompt_share: float = 0.1
    #: Leading tokens that all programs of this kind begin with.
    shared_prefix_tokens: int = 0
    #: No context grows beyond this.
    context_tokens_max: int = 125_000
    sub_agents: SubAgents | None = None


def generate_programs(shape: AgentShape, count: int, rng: Random, *, prefix: str) -> list[Program]:
    """`count` programs of one shape, with their sub-agents after them."""
    programs: list[Program] = []
    for index in range(count):
        program = _program(shape, rng, f"{prefix}-{index}")
        programs.append(program)
        if shape.sub_agents is not None and len(program.turns) > 1 and rng.random() < shape.sub_agents.share:
            turn = rng.randrange(len(program.turns) - 1)
            for child in range(shape.sub_agents.count):
                sub = _program(shape.sub_agents.shape, rng, f"{prefix}-{index}.{child}")
                programs.append(replace(sub, parent=Parent(program_id=program.program_id, turn=turn)))
    return programs


def _program(shape: AgentShape, rng: Random, program_id: str) -> Program:
    count = max(1, round(shape.turns(rng)))
    outputs = [max(1, round(shape.output_tokens(rng))) for _ in range(count)]
    context = min(shape.context_tokens_max, shape.context_tokens(rng))
    inputs = max(context - sum(outputs), 64.0 * count)
    first = max(shape.shared_prefix_tokens + 32, round(inputs * (shape.first_prompt_share if count > 1 else 1.0)))
    # Observations differ in size as log-normals do, and together fill what is left of the context.
    parts = [rng.lognormvariate(0.0, 1.0) for _ in range(count - 1)]
    scale = max(0.0, inputs - first) / sum(parts) if parts else 0.0
    turns: list[Turn] = []
    prefix = 0
    for index in range(count):
        new = first if index == 0 else max(16, round(parts[index - 1] * scale))
        tool = None if index + 1 == count else _pick(shape.tools, rng)
        turns.append(
            Turn(
                input_tokens=prefix + new,
                prefix_tokens=prefix,
                output_tokens=outputs[index],
                tool=tool.name if tool else None,
                tool_s=tool.seconds(rng) if tool else None,
            )
        )
        prefix += new + outputs[index]
    return Program(
        program_id=program_id,
        turns=tuple(turns),
        kind=shape.kind,
        shared_prefix=shape.kind if shape.shared_prefix_tokens else None,
        shared_prefix_tokens=shape.shared_prefix_tokens,
    )


def _pick(tools: tuple[Tool, ...], rng: Random) -> Tool:
    at = rng.random() * sum(tool.weight for tool in tools)
    for tool in tools:
        at -= tool.weight
        if at < 0:
            return tool
    return tools[-1]


SWEBENCH = AgentShape(
    kind="swebench",
    turns=Normal(10.9, 2.1, 2.0),
    context_tokens=Normal(70_126, 19_732, 8_000),
    output_tokens=LogNormal(300, 300),
    tools=(Tool(name="bash", weight=1.0, seconds=LogNormal(0.925, 3.550)),),
)
BFCL = AgentShape(
    kind="bfcl",
    turns=Normal(6.3, 2.3, 2.0),
    context_tokens=LogNormal(0.4 * 93_256, 0.4 * 68_687),
    output_tokens=LogNormal(150, 150),
    tools=(Tool(name="web_search", weight=1.0, seconds=LogNormal(1.923, 2.133)),),
)
OPENHANDS = AgentShape(
    kind="openhands",
    turns=Normal(36, 12, 4.0),
    context_tokens=LogNormal(65_000, 25_000),
    output_tokens=LogNormal(220, 250),
    tools=(
        Tool(name="editor", weight=0.5, seconds=LogNormal(0.1, 0.1)),
        Tool(name="bash", weight=0.4, seconds=LogNormal(1.5, 4.0)),
        Tool(name="go_test", weight=0.1, seconds=LogNormal(12.0, 20.0)),
    ),
    shared_prefix_tokens=3_000,
)
SWESMITH = AgentShape(
    kind="swesmith",
    turns=Normal(17.8, 6.0, 3.0),
    context_tokens=LogNormal(14_300, 6_400),
    output_tokens=LogNormal(62, 110),
    tools=(Tool(name="bash", weight=1.0, seconds=Fixed(1.0)),),
    first_prompt_share=0.12,
)
# TraceLab's P25, P50, P90 and P99 by kind of tool; the weights are ours, so that all kinds together are as it says.
# Their last percent is cut at four times P99, for a run to end: the mean is 12.7 s where the source has 18.4.
_HEAVY_TOOLS = (
    Tool(name="shell", weight=0.55, seconds=Quantiles((0.11, 0.85, 23.0, 240.0))),
    Tool(name="read", weight=0.22, seconds=Quantiles((0.015, 0.045, 0.47, 7.5))),
    Tool(name="edit", weight=0.15, seconds=Quantiles((0.04, 0.075, 1.9, 56.0))),
    Tool(name="web", weight=0.06, seconds=Quantiles((2.2, 6.0, 63.0, 270.0))),
    Tool(name="agent", weight=0.02, seconds=Quantiles((0.05, 0.18, 130.0, 610.0))),
)
HEAVY_TAIL = AgentShape(
    kind="heavy_tail",
    turns=LogNormal(15, 12),
    context_tokens=LogNormal(38_000, 20_000),
    output_tokens=LogNormal(200, 300),
    tools=_HEAVY_TOOLS,
    shared_prefix_tokens=4_000,
)
MEMORYLESS = AgentShape(
    kind="memoryless",
    turns=Geometric(9.0),
    context_tokens=LogNormal(40_000, 25_000),
    output_tokens=LogNormal(250, 300),
    tools=(Tool(name="bash", weight=1.0, seconds=LogNormal(2.0, 6.0)),),
    shared_prefix_tokens=4_000,
)
INTERACTIVE = AgentShape(
    kind="interactive",
    # Median 4, P90 32.
    turns=Capped(LogNormal(14.9, 53.4), 120.0),
    context_tokens=LogNormal(58_000, 42_000),
    output_tokens=LogNormal(178, 300),
    # Median 9 s, P90 77 s, of which permission prompts and people are a part.
    tools=(Tool(name="tool_result", weight=1.0, seconds=Capped(LogNormal(36.8, 146.0), 900.0)),),
    first_prompt_share=0.85,
    shared_prefix_tokens=6_000,
)
SUB_AGENTS = replace(
    HEAVY_TAIL,
    kind="lead_agent",
    sub_agents=SubAgents(
        share=1 / 3,
        count=3,
        shape=replace(HEAVY_TAIL, kind="sub_agent", turns=LogNormal(6, 4), context_tokens=LogNormal(18_000, 8_000)),
    ),
)
CHAT = AgentShape(
    kind="chat",
    turns=LogNormal(9, 6),
    context_tokens=LogNormal(24_000, 12_000),
    output_tokens=LogNormal(250, 250),
    tools=(
        Tool(name="lookup", weight=0.5, seconds=LogNormal(0.4, 0.6)),
        Tool(name=USER_WAIT, weight=0.5, seconds=LogNormal(90.0, 120.0)),
    ),
    shared_prefix_tokens=2_000,
)
FIXED_LENGTH = AgentShape(
    kind="fixed_length",
    turns=Fixed(12),
    context_tokens=LogNormal(30_000, 10_000),
    output_tokens=LogNormal(150, 150),
    tools=(Tool(name="lookup", weight=1.0, seconds=LogNormal(0.05, 0.05)),),
    first_prompt_share=0.3,
    shared_prefix_tokens=6_000,
)


def _plain(shape: AgentShape) -> Callable[[int, Random], list[Program]]:
    return lambda count, rng: generate_programs(shape, count, rng, prefix=shape.kind)


def _drift(count: int, rng: Random) -> list[Program]:
    """The second half of the programs meets tools ten times as slow."""
    programs = generate_programs(replace(HEAVY_TAIL, kind="drift"), count, rng, prefix="drift")
    half = len(programs) // 2
    slow = [
        replace(
            program,
            turns=tuple(
                replace(turn, tool_s=None if turn.tool_s is None else 10.0 * turn.tool_s) for turn in program.turns
            ),
        )
        for program in programs[half:]
    ]
    return programs[:half] + slow


GENERATORS: Mapping[str, Callable[[int, Random], list[Program]]] = {
    "swebench": _plain(SWEBENCH),
    "bfcl": _plain(BFCL),
    "openhands": _plain(OPENHANDS),
    "swesmith": _plain(SWESMITH),
    "heavy_tail": _plain(HEAVY_TAIL),
    "memoryless": _plain(MEMORYLESS),
    "interactive": _plain(INTERACTIVE),
    "subagents": _plain(SUB_AGENTS),
    "chat": _plain(CHAT),
    "drift": _drift,
    "fixed_length": _plain(FIXED_LENGTH),
}


def generate(name: str, *, programs: int, seed: int) -> Trace:
    """A trace of the named generator; one name, count and seed always give the same trace.

    Raises:
        InvalidRequest: no such generator; the message lists those known.
    """
    if name not in GENERATORS:
        raise InvalidRequest(f"unknown generator {name!r}; known: {', '.join(sorted(GENERATORS))}", param="trace")
    if programs < 1:
        raise InvalidRequest("a trace needs at least one program", param="programs")
    return Trace(name=name, programs=tuple(GENERATORS[name](programs, Random(f"{name}/{seed}"))))

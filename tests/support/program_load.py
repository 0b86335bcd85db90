"""Seeded random agent programs on a `SchedulerHarness`: arrivals, tool waits, branches, cancellations, cache resets.

Everything a run does follows from its seed, and what the programs ask for does not depend on how they are scheduled: a
program's prompts are its own context and its tools' outputs, which come from the seed.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

from agent_program.ids import ToolKey
from support.engine_core import SchedulerHarness, prompt

TOOLS = ("pytest", "git", "cat")


@dataclass(slots=True)
class LoadProgram:
    """One program's script and where it is in it."""

    index: int
    name: str | None
    start_s: float
    #: Tokens that each turn adds to the prompt.
    prompts: list[list[int]]
    output_tokens: list[int]
    tool_s: list[float]
    tools: list[str]
    branch: str
    #: What the client does: `arm` as a replica would, `declare` the tool beforehand, or `nothing`.
    manner: str
    cancel_at: int | None
    says_last_turn: bool
    context: list[int] = field(default_factory=list)
    turn: int = 0
    #: When the next turn is due; None while one is in the engine.
    due_s: float | None = 0.0
    is_done: bool = False

    @property
    def turn_id(self) -> str:
        return f"{self.name or 'plain'}-{self.index}-{self.turn}"


def random_programs(rng: random.Random, *, programs: int, tokens_max: int) -> list[LoadProgram]:
    """Programs whose longest context stays below `tokens_max`."""
    made = []
    for index in range(programs):
        turns = rng.randint(1, 5)
        share = tokens_max // turns
        made.append(
            LoadProgram(
                index=index,
                # A few names come twice, some programs have none.
                name=None if rng.random() < 0.15 else f"p{rng.randrange(max(2, programs * 2 // 3))}",
                start_s=rng.uniform(0, 1),
                prompts=[prompt(rng.randrange(6), rng.randint(1, max(1, share // 3))) for _ in range(turns)],
                output_tokens=[rng.randint(1, max(1, share * 2 // 3)) for _ in range(turns)],
                tool_s=[rng.expovariate(1) for _ in range(turns)],
                tools=[rng.choice(TOOLS) for _ in range(turns)],
                branch=rng.choice(["0", "0", "1"]),
                manner=rng.choice(["arm", "arm", "declare", "nothing"]),
                cancel_at=rng.randrange(turns) if rng.random() < 0.15 else None,
                says_last_turn=rng.random() < 0.7,
            )
        )
        made[-1].due_s = made[-1].start_s
        made[-1].prompts[0] = [*prompt(99, 40), *made[-1].prompts[0]]  # a shared system prompt
    return made


class Load:
    """Drives programs against one engine."""

    def __init__(
        self, engine: SchedulerHarness, programs: list[LoadProgram], rng: random.Random, *, resets: bool
    ) -> None:
        self.engine = engine
        self.programs = programs
        self.answers: list[tuple[int, int, tuple[int, ...]]] = []
        #: Every turn's context, and the answer to it.
        self.answered: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        self._rng = rng
        self._resets = resets
        self._running: dict[str, LoadProgram] = {}

    def run(self, *, steps_max: int = 20_000) -> None:
        """Until every program has ended and the engine is idle."""
        for _ in range(steps_max):
            self._send_due()
            if all(program.is_done for program in self.programs) and not self.engine.scheduler.requests:
                self.engine.run()
                return
            if self.engine.scheduler.has_requests():
                self._step()
            else:
                self._let_time_pass()
            self._collect()
        raise AssertionError(f"programs did not finish: {[p.turn_id for p in self.programs if not p.is_done]}")

    def _step(self) -> None:
        scheduler = self.engine.scheduler
        waits = bool(scheduler.waiting) and not scheduler.running
        self.engine.step()
        # Progress: if nothing ran and something waited, something was scheduled in this very step.
        assert not waits or self.engine.step_tokens, "the engine idles while a turn waits"
        if self._resets and self._rng.random() < 0.005:
            assert scheduler.reset_prefix_cache(reset_running_requests=True)

    def _let_time_pass(self) -> None:
        due = [program.due_s for program in self.programs if program.due_s is not None and not program.is_done]
        self.engine.clock.advance(max(0.0, min(due, default=0.0) - self.engine.clock.now_s() + 1000.0) + 1e-6)
        self.engine.step()

    def _now_s(self) -> float:
        return self.engine.clock.now_s() - 1000.0

    def _send_due(self) -> None:
        for program in self.programs:
            if program.due_s is None or program.is_done or program.due_s > self._now_s():
                continue
            program.due_s = None
            program.context = [*program.context, *program.prompts[program.turn]]
            hints = {}
            if program.name is not None:
                is_last = program.turn == len(program.prompts) - 1
                hints = {"branch": program.branch, "is_last_turn": is_last and program.says_last_turn}
                if program.manner == "declare":
                    hints["next_tool"] = ToolKey(program.tools[program.turn])
            self.engine.submit(
                program.turn_id,
                program.context,
                program=program.name,
                output_tokens=program.output_tokens[program.turn],
                **hints,
            )
            self._running[program.turn_id] = program
            if program.cancel_at == program.turn and self._rng.random() < 0.3:
                self._cancel(program)

    def _collect(self) -> None:
        for turn_id, program in list(self._running.items()):
            if turn_id not in self.engine.scheduler.requests:
                del self._running[turn_id]
                self._turn_ended(program)
            elif program.cancel_at == program.turn and self._rng.random() < 0.2:
                self._cancel(program)

    def _cancel(self, program: LoadProgram) -> None:
        self.engine.abort(program.turn_id)
        self._running.pop(program.turn_id, None)
        if program.name is not None and self._rng.random() < 0.5:
            self.engine.scheduler.continuum_release(program.name)
        program.is_done = True

    def _turn_ended(self, program: LoadProgram) -> None:
        answer = self.engine.outputs[program.turn_id]
        self.answers.append((program.index, program.turn, tuple(answer)))
        self.answered.append((tuple(program.context), tuple(answer)))
        program.context = [*program.context, *answer]
        tool, tool_s = program.tools[program.turn], program.tool_s[program.turn]
        program.turn += 1
        program.is_done = program.turn == len(program.prompts)
        if math.isinf(tool_s):
            # The tool never comes back, and nobody says so.
            program.is_done = True
            if program.name is not None and program.manner == "arm":
                self.engine.scheduler.continuum_lease_arm(program.name, program.branch, tool, False)
                self.engine.scheduler.continuum_tool_event(program.name, "started", tool, 0.0, None)
            return
        if program.name is not None and program.manner == "arm":
            control = self.engine.scheduler
            control.continuum_lease_arm(program.name, program.branch, tool, program.is_done and program.says_last_turn)
            if not program.is_done:
                control.continuum_tool_event(program.name, "started", tool, 0.0, None)
                control.continuum_tool_event(program.name, "finished", tool, tool_s, "ok")
        program.due_s = self._now_s() + tool_s

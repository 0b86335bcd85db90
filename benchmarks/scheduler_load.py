"""A load for two schedulers at once, vLLM's own and ours, that stays the same for as long as it is measured.

Both get the same turns. What a cell of the grid fixes stays fixed: the batch is full, so many turns wait, and of ours so many
leases are held. To keep it so while turns end and others begin, a program whose turn ended goes on (its lease is armed with a
tool) while leases are wanted, and is over otherwise; and as many turns are submitted as are missing in the queue, of new
programs and of paused ones in turn.

Each context's first `context_tokens` lie in the cache from the start and stay there, as an agent's do, so that both schedulers
start whichever turn is next with the same small prefill, and their orders of turns do not make the one's steps larger than the
other's. Block hashes are names, not sha256: hashing would cost both the same and hide the difference.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from agent_program.clock import ManualClock
from agent_program.ids import ProgramId
from agent_program.turn import TurnHints
from benchmarks.replay.hardware import Deployment, gpu, model
from benchmarks.replay.vllm_config import EngineShape, build_vllm_config
from engine_replicas.vllm_scheduler import RetainingScheduler

_BLOCK = 16
_NEW_TOKENS = 32
#: What a turn of an agent generates (workloads differ between 90 and 280 tokens).
_OUTPUT_TOKENS = 128
_TOOLS = tuple(f"tool-{index}" for index in range(8))
_TOKEN = 3
#: Virtual seconds of a step, and of one that prefills when the contexts are computed: so slow that leases are worth holding
#: for as long as the history allows, by any policy. A measurement passes within the shortest lease.
_STEP_S = 0.001
_FILL_STEP_S = 100.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """What is fixed while a row of the grid is measured."""

    preset: str
    running: int
    waiting: int
    leases: int
    #: Turns end and others begin; else every running turn decodes and nothing else happens.
    has_turnover: bool
    context_tokens: int = 1024


class Subject:
    """One scheduler under the load of a cell."""

    def __init__(self, cell: Cell, *, is_ours: bool) -> None:
        self._cell = cell
        self._is_ours = is_ours
        self._clock = ManualClock(1000.0)
        self._contents = deque(range(cell.running + cell.leases + cell.waiting // 2 + 64))
        self.scheduler = self._build(len(self._contents))
        self._numbers = itertools.count()
        #: Program → its context's name; and the program of each turn in the engine.
        self._content: dict[str, int] = {}
        self._program_of: dict[str, str] = {}
        self._first_turns_waiting: set[str] = set()
        self._later_turns_waiting: set[str] = set()
        self._paused: deque[str] = deque()
        self._fill()

    def _build(self, contents: int) -> Any:
        tokens = int(1.2 * contents * (self._cell.context_tokens + _NEW_TOKENS + _OUTPUT_TOKENS)) + 4096
        shape = EngineShape(
            block_size=_BLOCK,
            max_batched_tokens=8192,
            max_running=max(self._cell.running, 1),
            max_model_tokens=self._cell.context_tokens + 8192,
            kv_tokens=tokens,
        )
        deployment = Deployment(model=model("llama-3.1-8b"), gpu=gpu("h100"))
        settings = {"continuum": {"preset": self._cell.preset}} if self._is_ours else {}
        vllm_config, kv_config = build_vllm_config(deployment, shape, additional_config=settings)
        arguments: dict[str, Any] = {
            "vllm_config": vllm_config,
            "kv_cache_config": kv_config,
            "structured_output_manager": StructuredOutputManager(vllm_config),
            "block_size": _BLOCK,
            "hash_block_size": _BLOCK,
            "log_stats": False,
        }
        return RetainingScheduler(**arguments, clock=self._clock) if self._is_ours else Scheduler(**arguments)

    # --- the state that a cell asks for --------------------------------------------------------------------------------

    def _fill(self) -> None:
        """Put every context into the cache, begin the leases, start the batch and fill the queue."""
        if self._is_ours:
            self.scheduler.continuum_push_latency(_history())
        for content in self._contents:
            self._submit(f"fill-{content}", None, content, output_tokens=1)
        self._run_dry(step_s=_FILL_STEP_S)
        for _ in range(self._cell.leases):
            self._submit_turn(self._new_program(), output_tokens=1)
        # In no time, so that these steps are no sample of what a prefill costs.
        self._run_dry(step_s=0.0)
        # A running turn's end is spread over the length of a turn, as if the batch had grown turn by turn.
        for index in range(self._cell.running):
            left = 1 + index * _OUTPUT_TOKENS // self._cell.running if self._cell.has_turnover else 4096
            self._submit_turn(self._new_program(), output_tokens=left + 1)
        self._turns_over(self._step(lambda call: call(), 0.0))
        self._refill_queue()

    def _run_dry(self, *, step_s: float) -> None:
        while self.scheduler.has_unfinished_requests():
            self._turns_over(self._step(lambda call: call(), step_s))

    def _new_program(self) -> str:
        program = f"program-{next(self._numbers)}"
        self._content[program] = self._contents.popleft()
        return program

    def _refill_queue(self) -> None:
        """Submit what is missing: new programs until they are half of the queue, then turns of paused ones."""
        wanted = self._cell.waiting + self._cell.running
        while len(self.scheduler.requests) < wanted:
            is_new = 2 * len(self._first_turns_waiting) <= self._cell.waiting or not self._paused
            if is_new and not self._contents and self._paused:
                is_new = False
            program = self._new_program() if is_new else self._paused.popleft()
            turn_id = self._submit_turn(program, output_tokens=_OUTPUT_TOKENS)
            (self._first_turns_waiting if is_new else self._later_turns_waiting).add(turn_id)

    def _submit_turn(self, program: str, *, output_tokens: int) -> str:
        turn_id = f"turn-{next(self._numbers)}"
        self._program_of[turn_id] = program
        self._submit(turn_id, program, self._content[program], output_tokens=output_tokens)
        return turn_id

    def _submit(self, turn_id: str, program: str | None, content: int, *, output_tokens: int) -> None:
        prefix_blocks = self._cell.context_tokens // _BLOCK

        def hasher(request: Request) -> list[bytes]:
            done, full = len(request.block_hashes), len(request._all_token_ids) // _BLOCK
            return [
                f"{content}:{index}".encode() if index < prefix_blocks else f"{turn_id}:{index}".encode()
                for index in range(done, full)
            ]

        hints = TurnHints(program_id=ProgramId(program)).to_xargs() if program is not None and self._is_ours else None
        params = SamplingParams(max_tokens=output_tokens, ignore_eos=True, extra_args=hints)
        self.scheduler.add_request(
            Request(
                request_id=turn_id,
                prompt_token_ids=[_TOKEN] * (self._cell.context_tokens + _NEW_TOKENS),
                sampling_params=params,
                pooling_params=None,
                arrival_time=self._clock.wall_s(),
                session_id=program if self._is_ours else None,
                block_hasher=hasher,
            )
        )

    # --- steps ---------------------------------------------------------------------------------------------------------

    def measured_step(self) -> tuple[float, float]:
        """One step: CPU seconds of this thread in `schedule` and `update_from_output`, and in what is told to the scheduler
        between steps."""
        seconds = 0.0

        def timed(call: Callable[[], Any]) -> Any:
            nonlocal seconds
            began_s = time.thread_time()
            result = call()
            seconds += time.thread_time() - began_s
            return result

        ended = self._step(timed, _STEP_S)
        began_s = time.thread_time()
        self._turns_over(ended)
        self._refill_queue()
        return seconds, time.thread_time() - began_s

    def _step(self, call: Callable[[Callable[[], Any]], Any], step_s: float) -> list[str]:
        """Schedule and process one step through `call`, `step_s` apart; the turns of programs that ended with it."""
        scheduler = self.scheduler
        output: SchedulerOutput = call(scheduler.schedule)
        requests = scheduler.requests
        names = list(output.num_scheduled_tokens)
        sampled = [[] if requests[name].is_prefill_chunk else [_TOKEN] for name in names]
        started = [row.req_id for row in output.scheduled_new_reqs]
        self._first_turns_waiting.difference_update(started)
        self._later_turns_waiting.difference_update(started)
        result = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=sampled,
        )
        self._clock.advance(step_s)
        call(lambda: scheduler.update_from_output(output, result))
        return [name for name in names if name not in requests and name in self._program_of]

    def _turns_over(self, turn_ids: list[str]) -> None:
        """The tool calls of turns are known: a program goes on while leases are wanted, else it ends here."""
        for turn_id in turn_ids:
            program = self._program_of.pop(turn_id)
            goes_on = len(self._paused) + len(self._later_turns_waiting) < self._cell.leases
            if self._is_ours:
                tool = _TOOLS[next(self._numbers) % len(_TOOLS)]
                self.scheduler.continuum_lease_arm(program, "0", tool if goes_on else None, not goes_on)
            if goes_on:
                self._paused.append(program)
            else:
                self._contents.append(self._content.pop(program))

    def counts(self) -> dict[str, int]:
        """What the scheduler holds: running, waiting, leases."""
        running, waiting = self.scheduler.get_request_counts()
        leases = self.scheduler.continuum_stats()["live_leases"] if self._is_ours else 0
        return {"running": running, "waiting": waiting, "leases": leases}


def _history() -> dict[str, Any]:
    """A snapshot of tool times between 3 and 6 s: leases then last for as long."""
    quantiles = [3.0 + 3.0 * index / 255 for index in range(256)]
    latency = {"count": 5000, "quantiles": quantiles, "censored_count": 0, "censored_quantiles": []}
    return {"version": 1, "global": latency, "tools": dict.fromkeys(_TOOLS, latency)}

"""One engine replica without a GPU: vLLM's own scheduler and KV-cache manager, and a model runner that yields tokens.

Everything that decides is vLLM's or ours, in the classes that production runs: vLLM resolves the scheduler class from its
own configuration, and every token goes through `schedule` and `update_from_output`. What is replaced is the forward pass:
its duration comes from a step-time model, its tokens are one filler a sequence, with a stop token in the last place.

*Jumps* keep it fast. When every running request decodes and nothing can change for a while, j-1 tokens are appended to
each request before one scheduler call, which then allocates and computes j tokens a request as j calls would have done.
A jump ends before the next event, the next finished turn, and the first step that could run out of blocks or budget;
with requests waiting, policies may change their mind with time, so it is short then. Jumps off gives the same replay one
step at a time; tests compare the two.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from agent_program.turn import TurnHints
from benchmarks.replay.clock import VirtualClock
from benchmarks.replay.hardware import Deployment
from benchmarks.replay.lineage import ContextLineage
from benchmarks.replay.step_time import StepLoad, StepTimeModel
from benchmarks.replay.vllm_config import EngineShape, build_vllm_config
from benchmarks.replay.vllm_offload import ReplayOffloadConnector
from engine_replicas.step_log import DECODE_EVERY

FILLER_TOKEN = 3
STOP_TOKEN = 2
#: What a client asks for; a turn's true length is unknown to the scheduler until it stops.
MAX_TOKENS_ASKED = 32768
#: With requests waiting, a jump covers at most this many seconds.
JUMP_S_MAX_WHILE_WAITING = 0.2
#: Equal samples of one jump beyond these would only push older ones out of the scheduler's window.
DECODE_SAMPLES_MAX = 16


@dataclass(kw_only=True, slots=True)
class RunningTurn:
    """A turn inside the engine, and what is measured of it."""

    request_id: str
    #: Opaque to the engine; given back when the turn is over.
    tag: Any
    request: Request
    output_tokens: int
    #: Leading tokens of the prompt that the previous turn computed.
    prefix_tokens: int
    window_tokens: int | None
    #: Prompt tokens found in the cache (or loaded) when it was first scheduled; None until then.
    cached_tokens: int | None = None
    #: Tokens that had been computed before a preemption and were computed again after it.
    recomputed_after_preemption: int = 0
    computed_before_preemption: int = 0
    #: Tokens that came from an offload tier before it was first scheduled, and how long they took.
    loaded_tokens: int = 0
    load_s: float = 0.0


@dataclass(kw_only=True, slots=True)
class Step:
    """A step in flight: scheduled, not yet finished."""

    output: SchedulerOutput
    load: StepLoad
    duration_s: float
    #: Decode steps that this one stands for.
    steps: int
    scheduled: list[RunningTurn] = field(default_factory=list)
    #: Turns scheduled for the first time, or again after a preemption, with this step.
    started: list[RunningTurn] = field(default_factory=list)
    preempted: list[RunningTurn] = field(default_factory=list)
    #: Turns that get a token from this step; how many by request id.
    sampled: dict[str, int] = field(default_factory=dict)


class ReplayEngine:
    """One replica. The caller owns time: `begin_step`, move the clock by `duration_s`, `end_step`."""

    def __init__(
        self,
        *,
        deployment: Deployment,
        shape: EngineShape,
        step_time: StepTimeModel,
        clock: VirtualClock,
        make_scheduler: Callable[..., Scheduler],
        additional_config: dict[str, Any] | None = None,
        jump: bool = True,
    ) -> None:
        vllm_config, kv_config = build_vllm_config(deployment, shape, additional_config=additional_config or {})
        self.scheduler = make_scheduler(
            vllm_config=vllm_config,
            kv_cache_config=kv_config,
            structured_output_manager=StructuredOutputManager(vllm_config),
            block_size=shape.block_size,
            hash_block_size=shape.block_size,
            log_stats=False,
        )
        self._step_time, self._clock, self._jump = step_time, clock, jump
        self._offload = self.scheduler.connector
        if isinstance(self._offload, ReplayOffloadConnector):
            self._offload.clock = clock
        self._window = deployment.model.window_tokens
        self._shape = shape
        self._turns: dict[str, RunningTurn] = {}
        #: The last step admitted nobody, and every running request has been prefilled.
        self._is_settled = False
        #: Decode steps inside jumps that the scheduler's step timer has not been told of.
        self._untold_steps = 0
        self.scheduler_calls = 0
        self.steps = 0
        self.busy_s = 0.0

    @property
    def total_blocks(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.num_gpu_blocks) - 1

    @property
    def free_blocks(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    @property
    def cached_blocks(self) -> int:
        """Blocks that hold content and are referenced by nobody."""
        blocks = self.scheduler.kv_cache_manager.block_pool.blocks
        # A property would cost more than all the rest here: pools have tens of thousands of blocks.
        return len([block for block in blocks if not block.ref_cnt and block._block_hash is not None])

    @property
    def has_work(self) -> bool:
        """A turn waits or runs."""
        return bool(self._turns)

    @property
    def turns(self) -> int:
        return len(self._turns)

    @property
    def wake_s(self) -> float | None:
        """When a load from an offload tier is done; None with none under way."""
        return self._offload.link.next_done_s if self._offload is not None else None

    def close(self) -> None:
        """Let go of what the scheduler holds outside this process's memory (a step log)."""
        self.scheduler.shutdown()

    def program_over(self, program_id: str) -> None:
        """Tell the offload tiers, where there are any, that a program has ended."""
        if self._offload is not None:
            self._offload.program_over(program_id)

    def add_turn(
        self,
        *,
        request_id: str,
        tag: Any,
        hints: TurnHints,
        lineage: ContextLineage,
        input_tokens: int,
        prefix_tokens: int,
        output_tokens: int,
        arrival_s: float,
    ) -> None:
        """Queue a turn, as EngineCore does between two steps."""
        block_size = self._shape.block_size

        def block_hasher(request: Request) -> list[bytes]:
            done, full = len(request.block_hashes), len(request._all_token_ids) // block_size
            if full <= done:
                return []
            return (
                [lineage.hash_at(index) for index in range(done, full)] if done else lineage.hashes(full * block_size)
            )

        request = Request(
            request_id=request_id,
            prompt_token_ids=[FILLER_TOKEN] * input_tokens,
            sampling_params=SamplingParams(
                max_tokens=MAX_TOKENS_ASKED, stop_token_ids=[STOP_TOKEN], extra_args=dict(hints.to_xargs())
            ),
            pooling_params=None,
            arrival_time=arrival_s,
            block_hasher=block_hasher,
            session_id=hints.program_id,
        )
        self._turns[request_id] = RunningTurn(
            request_id=request_id,
            tag=tag,
            request=request,
            output_tokens=output_tokens,
            prefix_tokens=prefix_tokens,
            window_tokens=self._window,
        )
        self.scheduler.add_request(request)
        self._is_settled = False

    # --- a step --------------------------------------------------------------------------------------------------------

    def begin_step(self, horizon_s: float) -> Step | None:
        """Schedule one step, or several decode steps at once that end before `horizon_s`.

        None where the scheduler finds nothing to run: everything that waits, waits for something.
        """
        steps = self._jump_steps(horizon_s)
        if steps > 1:
            for request in self.scheduler.running:
                request.append_output_token_ids([FILLER_TOKEN] * (steps - 1))
        output = self.scheduler.schedule()
        self.scheduler_calls += 1
        preempted = self._note_preempted(output)
        if not output.num_scheduled_tokens:
            # vLLM runs its model runner even then, for the sake of transfers.
            self._hand_back(output, [], [])
            self._is_settled = False
            return None
        step = self._measure(output, steps)
        step.preempted = preempted
        # A jump that was not one: somebody was admitted or preempted beside it. Time is counted for all its steps all the same.
        self._is_settled = not step.started and not preempted and not step.load.prefill
        self.steps += steps
        self.busy_s += step.duration_s
        return step

    def end_step(self, step: Step) -> list[RunningTurn]:
        """Hand the step's tokens to the scheduler, at the time the step ends; returns the turns that ended with it."""
        request_ids: list[str] = []
        sampled: list[list[int]] = []
        ended: list[RunningTurn] = []
        for turn in step.scheduled:
            request_ids.append(turn.request_id)
            if turn.request_id not in step.sampled:
                sampled.append([])
                continue
            is_last = turn.request.num_output_tokens + 1 >= turn.output_tokens
            sampled.append([STOP_TOKEN if is_last else FILLER_TOKEN])
            if is_last:
                ended.append(turn)
        # A jump is not one step: under a copy of its output, the scheduler's step timer does not take it for a sample.
        output = step.output if step.steps == 1 else copy.copy(step.output)
        if step.steps > 1:
            self._tell_decode_time(step)
        self._hand_back(output, request_ids, sampled)
        for turn in ended:
            del self._turns[turn.request_id]
        if ended:
            self._is_settled = False
        return ended

    def _tell_decode_time(self, step: Step) -> None:
        """What our scheduler's step timer would have seen of the steps of a jump: every so many are a sample."""
        estimates = getattr(self.scheduler, "_estimates", None)
        if estimates is None:
            return
        self._untold_steps += step.steps
        samples, self._untold_steps = divmod(self._untold_steps, DECODE_EVERY)
        for _ in range(min(samples, DECODE_SAMPLES_MAX)):
            estimates.decode.step_ran(int(step.load.decode_kv_tokens), step.duration_s / step.steps)

    def _hand_back(self, output: SchedulerOutput, request_ids: list[str], sampled: list[list[int]]) -> None:
        """What the model runner returns: sampled tokens, and the transfers that are done."""
        done = self._offload.take_done() if self._offload is not None else []
        for load in done:
            turn = self._turns[load.request_id]
            turn.loaded_tokens += load.tokens
            turn.load_s += load.done_s - load.started_s
            self._is_settled = False
        transfers = KVConnectorOutput(finished_recving={load.request_id for load in done}) if done else None
        self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=request_ids,
                req_id_to_index={request_id: index for index, request_id in enumerate(request_ids)},
                sampled_token_ids=sampled,
                kv_connector_output=transfers,
            ),
        )

    # --- inside --------------------------------------------------------------------------------------------------------

    def _jump_steps(self, horizon_s: float) -> int:
        running = self.scheduler.running
        if not (self._jump and self._is_settled and running):
            return 1
        turns = [self._turns[request.request_id] for request in running]
        # The step that yields the last token runs alone, so that its turn ends at its own time.
        steps = min(turn.output_tokens - turn.request.num_output_tokens for turn in turns) - 1
        steps = min(steps, self._shape.max_batched_tokens // len(running))
        if steps < 2:
            return 1
        now_s = self._clock.now_s()
        horizon_s = min(horizon_s, self.wake_s or horizon_s)
        # Wherever they wait: in a queue of vLLM's, for a load, or held back by a policy.
        if len(self._turns) > len(running):
            horizon_s = min(horizon_s, now_s + JUMP_S_MAX_WHILE_WAITING)
        load = StepLoad(
            decode_seqs=len(running),
            decode_kv_tokens=float(sum(request.num_tokens for request in running)),
            decode_window_tokens=self._window_tokens(request.num_tokens for request in running),
        )
        steps = int(min(float(steps), (horizon_s - now_s) / self._step_time.step_s(load)))
        block_size = self._shape.block_size
        while steps > 1:
            needed = sum(
                -(-(request.num_tokens + steps - 1) // block_size) - -(-request.num_computed_tokens // block_size)
                for request in running
            )
            if needed <= self.free_blocks:
                return steps
            steps //= 2
        return 1

    def _window_tokens(self, contexts: Any) -> float:
        return 0.0 if self._window is None else float(sum(min(tokens, self._window) for tokens in contexts))

    def _note_preempted(self, output: SchedulerOutput) -> list[RunningTurn]:
        preempted = []
        for request_id in sorted(output.preempted_req_ids or ()):
            turn = self._turns.get(request_id)
            if turn is not None:
                turn.computed_before_preemption = turn.request.num_tokens - 1
                preempted.append(turn)
        return preempted

    def _measure(self, output: SchedulerOutput, steps: int) -> Step:
        started_ids = {row.req_id for row in output.scheduled_new_reqs} | output.scheduled_cached_reqs.resumed_req_ids
        step = Step(output=output, load=StepLoad(), duration_s=0.0, steps=steps)
        prefill: list[tuple[int, int]] = []
        decode_contexts: list[int] = []
        for request_id, count in output.num_scheduled_tokens.items():
            turn = self._turns[request_id]
            request = turn.request
            step.scheduled.append(turn)
            computed = request.num_computed_tokens
            if request_id in started_ids:
                self._note_start(turn, computed - count)
                step.started.append(turn)
                prefill.append((count, computed - count))
            elif count == steps and computed >= request.num_tokens:
                decode_contexts.append(computed)
            else:
                prefill.append((count, computed - count))
            if computed >= request.num_tokens:
                step.sampled[request_id] = steps if (count == steps and request_id not in started_ids) else 1
        batch = len(decode_contexts)
        # Contexts are those at the end of a jump; its steps read on average (steps - 1)/2 tokens less.
        mean_kv = float(sum(decode_contexts)) - batch * (steps - 1) / 2
        window = self._window_tokens(decode_contexts)
        last = StepLoad(decode_seqs=batch, decode_kv_tokens=mean_kv, decode_window_tokens=window, prefill=prefill)
        step.load = last
        step.duration_s = self._step_time.step_s(last)
        if steps > 1:
            decode = StepLoad(decode_seqs=batch, decode_kv_tokens=mean_kv, decode_window_tokens=window)
            step.duration_s += (steps - 1) * self._step_time.step_s(decode)
        return step

    @staticmethod
    def _note_start(turn: RunningTurn, cached: int) -> None:
        if turn.cached_tokens is None:
            turn.cached_tokens = cached
        elif turn.computed_before_preemption:
            turn.recomputed_after_preemption += max(0, turn.computed_before_preemption - cached)
            turn.computed_before_preemption = 0

"""The real vLLM scheduler in this process, with a deterministic stand-in for the model: no weights, no workers.

The model of `SchedulerHarness` answers a context with a token that depends on the context alone, so that turns are the same
whatever the scheduler does with them. Time is a `ManualClock` that each step moves by what the step computes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from agent_program.clock import ManualClock
from agent_program.ids import ProgramId
from agent_program.turn import TurnHints
from engine_replicas.config import SchedulingSettings
from engine_replicas.vllm_scheduler import RetainingAsyncScheduler, RetainingScheduler

VOCABULARY = 1000
_TINY_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
}


def tiny_model(directory: Path) -> Path:
    """A model directory that holds a configuration and nothing else."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(_TINY_LLAMA))
    return directory


def full_attention(block_size: int) -> KVCacheSpec:
    return FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32)


def sliding_window(block_size: int, window: int) -> KVCacheSpec:
    return SlidingWindowSpec(
        block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32, sliding_window=window
    )


class SchedulerHarness:
    """Submits turns, takes steps, and answers for the model."""

    def __init__(
        self,
        model: Path,
        settings: SchedulingSettings | None,
        *,
        blocks: int = 64,
        block_size: int = 16,
        max_num_seqs: int = 16,
        step_tokens_max: int = 512,
        max_model_len: int = 4096,
        is_async: bool = False,
        policy: Literal["fcfs", "priority"] = "fcfs",
        specs: Sequence[KVCacheSpec] | None = None,
        retention_interval: int | None = None,
        vllm: Mapping[str, Any] | None = None,
    ) -> None:
        """Build a scheduler over a pool of `blocks` usable blocks; stock vLLM where `settings` is None.

        `vllm` holds further parts of vLLM's configuration: speculative decoding, LoRA, a KV connector.
        """
        self.clock = ManualClock(now_s=1000.0)
        self.block_size = block_size
        self.step_s = 0.01
        self.token_s = 0.0001
        #: Every turn's output tokens, by turn.
        self.outputs: dict[str, list[int]] = {}
        #: Context tokens found in the cache when the turn was first scheduled, by turn.
        self.hits: dict[str, int] = {}
        #: Turns in the order in which they were first scheduled.
        self.first_scheduled: list[str] = []
        self.preemptions = 0
        #: Tokens that the last step scheduled.
        self.step_tokens = 0
        #: The most leases there were at the end of a step that preempted somebody.
        self.leases_beside_preemption = 0
        self._in_flight: list[tuple[SchedulerOutput, frozenset[str]]] = []
        self._is_async = is_async
        self._drafts = (
            0 if not vllm or "speculative_config" not in vllm else vllm["speculative_config"].num_speculative_tokens
        )
        self._has_leases = settings is not None
        self.scheduler = _build(
            model,
            settings,
            clock=self.clock,
            blocks=blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            step_tokens_max=step_tokens_max,
            max_model_len=max_model_len,
            is_async=is_async,
            policy=policy,
            specs=specs or [full_attention(block_size)],
            retention_interval=retention_interval,
            vllm=vllm or {},
        )
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(block_size, sha256)

    # --- turns -------------------------------------------------------------------------------------------------------

    def submit(
        self,
        turn_id: str,
        prompt: Sequence[int],
        *,
        program: str | None = None,
        output_tokens: int = 1,
        stop: list[str] | None = None,
        priority: int = 0,
        sampling: Mapping[str, Any] | None = None,
        request: Mapping[str, Any] | None = None,
        **hints: Any,
    ) -> Request:
        """Put a turn into the queue; `sampling` and `request` are further arguments of vLLM's classes of those names."""
        xargs = TurnHints(program_id=ProgramId(program), **hints).to_xargs() if program is not None else None
        params = SamplingParams(
            max_tokens=output_tokens, ignore_eos=True, stop=stop, extra_args=xargs, **(sampling or {})
        )
        made = Request(
            request_id=turn_id,
            prompt_token_ids=list(prompt),
            sampling_params=params,
            pooling_params=None,
            arrival_time=self.clock.wall_s(),
            session_id=program,
            priority=priority,
            block_hasher=self._hasher,
            **(request or {}),
        )
        self.scheduler.add_request(made)
        self.outputs.setdefault(turn_id, [])
        return made

    def abort(self, turn_id: str) -> None:
        """What the front end does when a client leaves, or when it saw a stop string."""
        self.scheduler.finish_requests(turn_id, RequestStatus.FINISHED_ABORTED)

    def run_turn(self, turn_id: str, prompt: Sequence[int], **options: Any) -> list[int]:
        """Submit a turn, run until it has ended, and return its context with its answer."""
        self.submit(turn_id, prompt, **options)
        self.run(lambda: turn_id not in self.scheduler.requests)
        return [*prompt, *self.outputs[turn_id]]

    # --- steps -------------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """One engine step; in async mode the output of the step before is processed after this one is scheduled."""
        has_work = self.scheduler.has_requests()
        if has_work:
            output = self.scheduler.schedule()
            self._observe(output)
            # Whether a step reaches the end of a context is settled when it is scheduled.
            requests = self.scheduler.requests
            samples = frozenset(name for name in output.num_scheduled_tokens if not requests[name].is_prefill_chunk)
            self._in_flight.append((output, samples))
        if self._in_flight and (not self._is_async or not has_work or len(self._in_flight) > 1):
            self._process(*self._in_flight.pop(0))

    def _observe(self, output: SchedulerOutput) -> None:
        self.step_tokens = output.total_num_scheduled_tokens
        for new in output.scheduled_new_reqs:
            if new.req_id not in self.hits:
                self.hits[new.req_id] = new.num_computed_tokens
                self.first_scheduled.append(new.req_id)
        if output.preempted_req_ids:
            self.preemptions += len(output.preempted_req_ids)
            leases = self.stats()["live_leases"] if self._has_leases else 0
            self.leases_beside_preemption = max(self.leases_beside_preemption, leases)

    def run(self, until: Callable[[], bool] | None = None, *, steps_max: int = 5000) -> None:
        """Step until `until` holds, or until nothing is left to do."""
        for _ in range(steps_max):
            if until is not None and until():
                return
            if not self.scheduler.has_requests() and not self._in_flight:
                assert until is None, "the engine is idle and the condition does not hold"
                return
            self.step()
        raise AssertionError(f"not done after {steps_max} steps")

    def _process(self, output: SchedulerOutput, samples: frozenset[str]) -> None:
        if output.total_num_scheduled_tokens:
            self.clock.advance(self.step_s + self.token_s * output.total_num_scheduled_tokens)
        request_ids = list(output.num_scheduled_tokens)
        drafts = {name: len(tokens) for name, tokens in output.scheduled_spec_decode_tokens.items()}
        sampled = [self._sample(name, name in samples, drafts.get(name, 0)) for name in request_ids]
        model_output = ModelRunnerOutput(
            req_ids=request_ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(request_ids)},
            sampled_token_ids=sampled,
            kv_connector_output=self._transfers(output),
        )
        for engine_output in self.scheduler.update_from_output(output, model_output).values():
            for one in engine_output.outputs:
                self.outputs[one.request_id].extend(one.new_token_ids)
        if self._drafts and not self._is_async:
            # Scheduled ahead, the drafts stay with the worker.
            proposed = [[0] * self._drafts if name in samples else [] for name in request_ids]
            self.scheduler.update_draft_token_ids(DraftTokenIds(request_ids, proposed))

    def _transfers(self, output: SchedulerOutput) -> KVConnectorOutput | None:
        """What a worker says of transfers to and from a tier below; here there is none."""
        return None

    def _sample(self, request_id: str, is_prompt_done: bool, drafts: int) -> list[int]:
        """The tokens that a step answers with: one, and as many more as of its drafts are right."""
        request = self.scheduler.requests.get(request_id)
        if request is None:
            return [0]
        if not is_prompt_done:
            return []
        context = list(request.all_token_ids)
        right = len(context) % (drafts + 1)
        for _ in range(1 + right):
            context.append(next_token(context))
        return context[-1 - right :]

    # --- what can be seen --------------------------------------------------------------------------------------------

    @property
    def free_blocks(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    @property
    def total_blocks(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.num_gpu_blocks) - 1

    def stats(self) -> dict[str, Any]:
        return dict(self.scheduler.continuum_stats())

    def leases(self) -> dict[str, int]:
        return dict(self.stats()["leases"])


def next_token(context: Sequence[int]) -> int:
    """The stand-in model: a token that depends on the length and the end of the context."""
    return (sum(context[-4:]) * 31 + len(context) * 7 + 3) % VOCABULARY


def prompt(seed: int, length: int) -> list[int]:
    """A prompt that shares no block with one of another seed."""
    return [(seed * 7919 + position * 13 + 1) % VOCABULARY for position in range(length)]


def _build(
    model: Path,
    settings: SchedulingSettings | None,
    *,
    clock: ManualClock,
    blocks: int,
    block_size: int,
    max_num_seqs: int,
    step_tokens_max: int,
    max_model_len: int,
    is_async: bool,
    policy: Literal["fcfs", "priority"],
    specs: Sequence[KVCacheSpec],
    retention_interval: int | None,
    vllm: Mapping[str, Any],
) -> Scheduler:
    model_config = ModelConfig(model=str(model), dtype="float32", seed=0, skip_tokenizer_init=True)
    model_config.max_model_len = max_model_len
    cache_config = CacheConfig(block_size=block_size, enable_prefix_caching=True)
    cache_config.num_gpu_blocks = blocks + 1
    scheduler_config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=step_tokens_max,
        max_model_len=max_model_len,
        is_encoder_decoder=False,
        enable_chunked_prefill=True,
        async_scheduling=False,
        policy=policy,
    )
    vllm_config = VllmConfig(
        model_config=model_config,
        cache_config=cache_config,
        scheduler_config=scheduler_config,
        additional_config={"continuum": settings.model_dump(mode="json")} if settings is not None else {},
        **vllm,
    )
    # The CPU platform, and some ways of drafting, turn async scheduling off; the scheduler itself cares for neither.
    vllm_config.scheduler_config.async_scheduling = is_async
    groups = [KVCacheGroupSpec([f"layer.{index}"], spec) for index, spec in enumerate(specs)]
    arguments: dict[str, Any] = {
        "vllm_config": vllm_config,
        "kv_cache_config": KVCacheConfig(
            num_blocks=blocks + 1,
            kv_cache_tensors=[],
            kv_cache_groups=groups,
            prefix_cache_retention_interval=retention_interval,
        ),
        "structured_output_manager": StructuredOutputManager(vllm_config),
        "block_size": block_size,
        "hash_block_size": block_size,
        "log_stats": True,
    }
    if settings is None:
        return (AsyncScheduler if is_async else Scheduler)(**arguments)
    return (RetainingAsyncScheduler if is_async else RetainingScheduler)(**arguments, clock=clock)

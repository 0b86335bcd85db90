"""vLLM's scheduler with leases. The one file that touches vLLM's scheduling classes.

vLLM's own scheduling loop runs unchanged; this class stands around it and turns its hooks into events of the
`RetentionController`, which decides:

    add_request          a turn arrived
    schedule             first: lapsed leases end, queues are put in order; afterwards: turns that got their first blocks
    allocate_slots       (wrapped) somebody needs blocks and there are none: leases are reclaimed until it fits
    update_from_output   how long the step took
    _free_blocks         a turn ended: before vLLM lets go of its blocks, a lease may take references to them
    reset_prefix_cache, set_pause_state
                         every lease ends first

To retain is to hold one more reference on the hashed blocks of a finished turn (`BlockPool.touch`), to let go is
`BlockPool.free_blocks`. The next turn finds the blocks by hash, as vLLM's prefix cache does for any request. A held block is
never written: only full, hashed blocks are held, and vLLM writes into unhashed ones only.

When memory is short:
- a *running* turn that cannot grow takes leases, before vLLM preempts anybody;
- a *waiting* turn takes leases only when nothing runs: otherwise running turns will free blocks and leases will lapse, and
  yielding to every newcomer would make leases worthless (the paper's semantics). When nothing runs it takes as many as it
  needs, at once: retention never keeps the engine idle.

Loaded by `scheduler_cls="engine_replicas.vllm_scheduler.make_scheduler"`; settings come as
`additional_config["continuum"]`. Without program ids on any request the scheduler is stock vLLM.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any

import vllm
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator, UnitaryKVCacheCoordinator
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import FCFSRequestQueue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.request import Request, RequestStatus

from agent_program.clock import Clock, SystemClock
from agent_program.ids import ID_BYTES_MAX, ProgramId, ToolKey
from agent_program.tool_events import ToolEventKind, ToolOutcome
from agent_program.turn import TurnHints
from engine_replicas.admission import NoAdmission
from engine_replicas.config import RetentionName, SchedulingSettings
from engine_replicas.ordering import Fcfs
from engine_replicas.policies import Policies, named_policies, new_estimates
from engine_replicas.retention.events import FinishedTurn, HeldKv, TurnEnding
from engine_replicas.retention.lease import LeaseEnd, LeaseEndReason
from engine_replicas.retention.policy import Estimates
from engine_replicas.retention.prefill_cost import PrefillStep
from engine_replicas.retention.reclaim import WaitingNeed
from engine_replicas.scheduler_meter import SchedulerMeter
from engine_replicas.shadowing import new_controller
from engine_replicas.step_log import StepLog, StepTimer
from engine_replicas.vllm_host_tier import policies_of
from engine_replicas.vllm_turn_queue import TurnQueue

SUPPORTED_VLLM = "0.32.0"

logger = logging.getLogger(__name__)


class UnsupportedVllm(ImportError):
    """The installed vLLM is not the one that this scheduler was written for."""


#: vLLM's methods that are overridden, wrapped or called here, with their leading parameters in the supported version.
VLLM_METHODS: dict[Callable[..., Any], tuple[str, ...]] = {
    Scheduler.add_request: ("self", "request"),
    Scheduler.schedule: ("self", "throttle_prefills"),
    Scheduler.update_from_output: ("self", "scheduler_output", "model_runner_output"),
    Scheduler._free_blocks: ("self", "request"),
    Scheduler.reset_prefix_cache: ("self", "reset_running_requests", "reset_connector"),
    Scheduler.set_pause_state: ("self", "pause_state"),
    Scheduler.shutdown: ("self",),
    KVCacheManager.allocate_slots: ("self", "request", "num_new_tokens"),
    BlockPool.touch: ("self", "blocks"),
    BlockPool.free_blocks: ("self", "ordered_blocks"),
    BlockPool.get_num_free_blocks: ("self",),
    KVCacheCoordinator.find_longest_cache_hit: ("self", "block_hashes", "max_cache_hit_length"),
    KVCacheCoordinator.get_blocks: ("self", "request_id"),
}


def check_vllm(methods: dict[Callable[..., Any], tuple[str, ...]]) -> None:
    """Compare methods of the installed vLLM with the leading parameters that they should have.

    Raises:
        UnsupportedVllm: one takes other parameters.
    """
    for method, parameters in methods.items():
        found = tuple(inspect.signature(method).parameters)
        if found[: len(parameters)] != parameters:
            raise UnsupportedVllm(
                f"engine_replicas supports vLLM {SUPPORTED_VLLM}; in the installed {vllm.__version__}, "
                f"{method.__qualname__} takes {found} where {parameters} was expected"
            )


check_vllm(VLLM_METHODS)


class _Retaining(Scheduler):
    """Leases around vLLM's scheduler; mixed in before `Scheduler` or `AsyncScheduler`."""

    def __init__(
        self,
        *args: Any,
        clock: Clock | None = None,
        policies: Callable[[SchedulingSettings, Estimates], Policies] = named_policies,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        settings = _settings(self.vllm_config)
        self._clock = clock or SystemClock()
        learn = partial(
            new_estimates,
            settings,
            step_tokens_max=self.max_num_scheduled_tokens,
            kv_tokens_total=self._kv_tokens_total,
            has_tier=self.connector is not None,
        )
        self._estimates = learn()
        deciding = policies(settings, self._estimates)
        self._host_tiers = policies_of(self.connector)
        self._controller, self._fitted = new_controller(
            settings,
            self._estimates,
            new_estimates=learn,
            blocks_total=self._blocks_total,
            block_tokens=self.block_size,
            free_blocks=self.kv_cache_manager.block_pool.get_num_free_blocks,
            policy=deciding.retention,
            reclaiming=deciding.reclaiming,
            is_caching=self.kv_cache_manager.enable_caching,
            when_program_ended=self._program_ended,
        )
        self._held: dict[int, list[KVCacheBlock]] = {}
        #: Loads from a tier below that are under way: request → (tokens, since when).
        self._loads: dict[str, tuple[int, float]] = {}
        self._meter = SchedulerMeter()
        # Under vLLM's policy `priority` the operator has said who goes first.
        is_ours = isinstance(self.waiting, FCFSRequestQueue)
        self._queue = TurnQueue(
            self,
            self._controller,
            ordering=deciding.ordering if is_ours else Fcfs(),
            admission=deciding.admission if is_ours else NoAdmission(),
            settings=settings,
            kv_tokens_total=self._kv_tokens_total,
        )
        self._step_timer = StepTimer(StepLog(settings.step_log_path) if settings.step_log_path else None)
        self._say_what_to_expect(settings, is_ordered_by_vllm=deciding.ordering.reorders and not is_ours)
        self._allocate_stock = self.kv_cache_manager.allocate_slots
        self.kv_cache_manager.allocate_slots = self._allocate_reclaiming

    def _say_what_to_expect(self, settings: SchedulingSettings, *, is_ordered_by_vllm: bool) -> None:
        logger.info(
            "retention %s, ordering %s, %d KV blocks",
            settings.retention_name.value,
            settings.ordering_name.value,
            self._blocks_total,
        )
        if is_ordered_by_vllm:
            logger.warning(
                "vLLM's scheduling policy `priority` orders turns; %s does not", settings.ordering_name.value
            )
        if settings.retention_name is RetentionName.END_OF_TURN:
            return
        if not self.kv_cache_manager.enable_caching:
            logger.warning("prefix caching is off: no KV can be found again, so none is retained")
        elif (
            len(self.kv_cache_config.kv_cache_groups) > 1 and self.kv_cache_config.prefix_cache_retention_interval == 0
        ):
            logger.warning(
                "vLLM keeps no checkpoints of decoded tokens for this hybrid model: a program's next turn computes its last "
                "answer again; set prefix_cache_retention_interval to None, or to a multiple of the block size"
            )

    # --- vLLM's hooks ------------------------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        is_new = request.request_id not in self.requests
        super().add_request(request)
        if not is_new:
            return
        now_s = self._clock.now_s()
        self._queue.arrived(request, now_s)
        hints = _hints(request)
        if hints is not None:
            self._controller.turn_arrived(request.request_id, hints, now_s, has_stop_strings=_has_stop_strings(request))
            for tier in self._host_tiers:
                tier.turn_arrived(request.request_id, hints.program_id)

    def _program_ended(self, program_id: ProgramId) -> None:
        for tier in self._host_tiers:
            tier.program_ended(program_id)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        now_s = self._clock.now_s()
        self._let_go(self._controller.expire(now_s))
        self._queue.before_step(now_s)
        output = super().schedule(throttle_prefills)
        self._queue.after_step(output, now_s)
        started_s, now_s = now_s, self._clock.now_s()
        self._meter.step_scheduled(now_s - started_s)
        for scheduled in output.scheduled_new_reqs:
            self._let_go(self._controller.turn_scheduled(scheduled.req_id, scheduled.num_computed_tokens, now_s))
        self._step_timer.scheduled(output, self.requests, now_s)
        return output

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: Any) -> Any:
        now_s = self._clock.now_s()
        step = self._step_timer.finished(scheduler_output, now_s)
        for known in self._fitted:
            if isinstance(step, PrefillStep):
                known.prefill.step_ran(step)
            elif step is not None:
                known.decode.step_ran(step.pairs, step.duration_s)
        transfers = model_runner_output.kv_connector_output
        if transfers is not None and self._loads:
            self._loads_done(transfers.finished_recving or (), now_s)
        return super().update_from_output(scheduler_output, model_runner_output)

    def _free_blocks(self, request: Request) -> None:
        self._queue.left(request)
        self._loads.pop(request.request_id, None)
        if self._controller.has_turns:
            self._turn_finished(request)
        super()._free_blocks(request)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        self._let_go(self._controller.release_all(LeaseEndReason.CACHE_RESET, self._clock.now_s()))
        self._queue.preempted_all()
        return super().reset_prefix_cache(reset_running_requests, reset_connector)

    def set_pause_state(self, pause_state: PauseState) -> None:
        is_paused = pause_state != PauseState.UNPAUSED
        self._let_go(self._controller.pause(is_paused, self._clock.now_s()))
        super().set_pause_state(pause_state)

    def shutdown(self) -> None:
        self._step_timer.close()
        super().shutdown()

    # --- utility calls; plain values in and out (`vllm_plugin.py`) -----------------------------------------------------

    def continuum_lease_arm(
        self, program_id: str, branch: str, tool_key: str | None, is_last_turn: bool
    ) -> dict[str, Any]:
        armed = self._controller.arm(
            ProgramId(program_id), branch, ToolKey(tool_key) if tool_key else None, is_last_turn, self._clock.now_s()
        )
        self._let_go(armed.ended)
        outcomes = self._controller.lease_outcomes(ProgramId(program_id))
        return {"ttl_s": armed.ttl_s, "blocks": armed.blocks, "reason": armed.reason, "outcomes": outcomes}

    def continuum_release(self, program_id: str) -> dict[str, Any]:
        ended = self._controller.release_program(ProgramId(program_id), self._clock.now_s())
        self._let_go(ended)
        return {"leases": len(ended), "blocks": sum(len(end.lease.blocks) for end in ended)}

    def continuum_tool_event(
        self, program_id: str, kind: str, tool_key: str, elapsed_s: float, outcome: str | None = None
    ) -> None:
        self._controller.tool_event(
            ProgramId(program_id),
            ToolEventKind(kind),
            ToolKey(tool_key),
            elapsed_s,
            ToolOutcome(outcome) if outcome is not None else None,
            self._clock.now_s(),
        )

    def continuum_push_latency(self, snapshot: dict[str, Any]) -> int:
        return self._controller.take_snapshot(snapshot)

    def continuum_explain(self, program_id: str) -> dict[str, Any]:
        return self._controller.explain(ProgramId(program_id), self._clock.now_s())

    def continuum_stats(self) -> dict[str, Any]:
        # An idle engine takes no steps, so this is where its leases lapse.
        self._let_go(self._controller.expire(self._clock.now_s()))
        running, waiting = self.get_request_counts()
        return {
            **self._controller.stats(),
            **self._queue.stats(),
            **self._meter.to_plain(),
            "block_tokens": self.block_size,
            "total_blocks": self._blocks_total,
            "free_blocks": self.kv_cache_manager.block_pool.get_num_free_blocks(),
            "running": running,
            "waiting": waiting,
            "queued_tokens": sum(request.num_tokens for request in self.waiting),
        }

    # --- memory ----------------------------------------------------------------------------------------------------------

    @property
    def _blocks_total(self) -> int:
        """Blocks that requests can use: one of the pool is vLLM's null block."""
        return self.kv_cache_manager.block_pool.num_gpu_blocks - 1

    @property
    def _kv_tokens_total(self) -> int:
        return self._blocks_total * self.block_size

    def _allocate_reclaiming(self, request: Request, *args: Any, **kwargs: Any) -> KVCacheBlocks | None:
        """`allocate_slots`, which takes leases before it gives up; see the top of the file for when it may."""
        blocks = self._allocate_stock(request, *args, **kwargs)
        if blocks is not None and "delay_cache_blocks" not in kwargs:
            return blocks  # a running turn grows: nearly every call
        if blocks is None and self._controller.has_leases:
            blocks = self._take_leases(request, lambda: self._allocate_stock(request, *args, **kwargs), kwargs)
        if blocks is not None and kwargs.get("delay_cache_blocks"):
            self._load_started(request, kwargs["num_external_computed_tokens"])
        elif blocks is None and request.status != RequestStatus.RUNNING:
            self._queue.refused(request, self._clock.now_s())
        return blocks

    def _load_started(self, request: Request, tokens: int) -> None:
        now_s = self._clock.now_s()
        self._loads[request.request_id] = (tokens, now_s)
        self._let_go(self._controller.turn_loads(request.request_id, tokens, now_s))

    def _loads_done(self, request_ids: Iterable[str], now_s: float) -> None:
        for request_id in request_ids:
            tokens, started_s = self._loads.pop(request_id, (0, now_s))
            for known in self._fitted:
                known.reload.loaded(tokens, now_s - started_s)
            self._meter.loaded(tokens)

    def _take_leases(
        self, request: Request, allocate: Callable[[], KVCacheBlocks | None], arguments: dict[str, Any]
    ) -> KVCacheBlocks | None:
        now_s = self._clock.now_s()
        reason = self._may_reclaim(request)
        blocks: KVCacheBlocks | None = None
        if reason is None and self._controller.has_prices:
            ended = self._controller.outbid(request.request_id, self._need(request, arguments), now_s)
            self._let_go(ended)
            return allocate() if ended else None
        while blocks is None and reason is not None:
            ended = self._controller.reclaim(request.request_id, reason, now_s)
            if not ended:
                break
            self._let_go(ended)
            blocks = allocate()
        return blocks

    def _need(self, request: Request, arguments: dict[str, Any]) -> WaitingNeed:
        """What a waiting request lacks: its whole context, less what it finds in blocks that somebody holds, less what is free."""
        pool = self.kv_cache_manager.block_pool
        found = arguments.get("new_computed_blocks")
        held = sum(1 for group in found.blocks for block in group if block.ref_cnt > 0) if found is not None else 0
        wanted = -(-request.num_tokens // self.block_size) - held + self.kv_cache_manager.watermark_blocks
        return WaitingNeed(
            blocks_missing=max(1, wanted - pool.get_num_free_blocks()),
            own_tokens=request.num_tokens,
            running_tokens=self._running_tokens(),
        )

    def _running_tokens(self) -> int:
        return sum(request.num_computed_tokens for request in self.running)

    def _may_reclaim(self, request: Request) -> LeaseEndReason | None:
        if request.status == RequestStatus.RUNNING:
            return LeaseEndReason.RUNNING_TURN_NEEDS_BLOCKS
        # A load that is done is no progress any more: its request waits for blocks like any other.
        makes_progress = self.running or any(
            held.status == RequestStatus.WAITING_FOR_REMOTE_KVS
            and held.request_id not in self.finished_recving_kv_req_ids
            for held in self.kv_holding_waiting
        )
        return None if makes_progress else LeaseEndReason.NOTHING_RUNS

    def _turn_finished(self, request: Request) -> None:
        kept: list[KVCacheBlock] = []

        def collect() -> HeldKv:
            blocks, tokens = self._replayable(request)
            kept.extend(blocks)
            return HeldKv(blocks=self._names_of(blocks), tokens=tokens)

        finished = FinishedTurn(
            turn_id=request.request_id,
            ending=_ending(request, self.max_model_len),
            # The last token was sampled and never computed; a step scheduled ahead counts tokens that do not exist.
            context_tokens=max(0, min(request.num_computed_tokens, request.num_tokens - 1)),
            collect=collect,
            other_tokens=self._running_tokens() - request.num_computed_tokens,
        )
        changes = self._controller.turn_finished(finished, self._clock.now_s())
        if changes.begun is not None:
            for pool, blocks in groupby(kept, key=attrgetter("pool")):
                pool.touch(list(blocks))
            self._held[changes.begun.lease_id] = kept
        self._let_go(changes.ended)

    def _names_of(self, blocks: list[KVCacheBlock]) -> frozenset[int]:
        """The blocks' names in the ledger: their ids; blocks of other pools than the main one get names below zero."""
        main = self.kv_cache_manager.block_pool
        return frozenset([block.block_id if block.pool is main else ~id(block) for block in blocks])

    def _replayable(self, request: Request) -> tuple[list[KVCacheBlock], int]:
        """The blocks that the next turn would hit, in order, and the tokens in them.

        With one full-attention group these are the request's own hashed blocks. Any other layout drops some (outside a
        window, between checkpoints), so there the cache itself is asked.
        """
        coordinator = self.kv_cache_manager.coordinator
        if isinstance(coordinator, UnitaryKVCacheCoordinator) and not self.use_eagle_block_drop:
            manager = coordinator.single_type_managers[0]
            if type(manager) is FullAttentionManager:
                (own,) = coordinator.get_blocks(request.request_id)
                hashed = [block for block in own if block.block_hash is not None and not block.is_null]
                return hashed, len(hashed) * manager.block_size
        groups, tokens, _ = coordinator.find_longest_cache_hit(request.block_hashes, request.num_tokens - 1)
        unique = {id(block): block for group in groups for block in group if not block.is_null}
        return list(unique.values()), tokens

    def _let_go(self, ended: tuple[LeaseEnd, ...]) -> None:
        """Give back the blocks of leases that are over, the end of a context first: it is evicted first."""
        if ended:
            self._queue.memory_freed()
        for end in ended:
            self._meter.lease_ended(end)
            blocks = self._held.pop(end.lease.lease_id)
            self.kv_cache_manager.block_pool.free_blocks(reversed(blocks))


class RetainingScheduler(_Retaining, Scheduler):
    """For engines that schedule and execute in turn."""


class RetainingAsyncScheduler(_Retaining, AsyncScheduler):
    """For engines that schedule ahead of execution."""


def make_scheduler(*args: Any, **kwargs: Any) -> Scheduler:
    """What `scheduler_cls` names: the scheduler that fits the engine's scheduling mode, with the utility calls registered."""
    from engine_replicas.vllm_plugin import register

    register()
    vllm_config = kwargs["vllm_config"] if "vllm_config" in kwargs else args[0]
    is_async = vllm_config.scheduler_config.async_scheduling
    return (RetainingAsyncScheduler if is_async else RetainingScheduler)(*args, **kwargs)


def _settings(vllm_config: Any) -> SchedulingSettings:
    config = vllm_config.additional_config
    return SchedulingSettings.model_validate(config.get("continuum") if isinstance(config, dict) else None)


def _hints(request: Request) -> TurnHints | None:
    """What is known of the request's program; None where it belongs to none. A resumable request keeps its own KV."""
    program_id = request.session_id
    if not program_id or len(program_id) > ID_BYTES_MAX or request.sampling_params is None or request.resumable:
        return None
    return TurnHints.from_xargs(program_id, request.sampling_params.extra_args)


def _has_stop_strings(request: Request) -> bool:
    return request.sampling_params is not None and bool(request.sampling_params.stop)


def _ending(request: Request, max_model_len: int) -> TurnEnding:
    if request.status in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED):
        return TurnEnding.CUT if request.num_tokens >= max_model_len else TurnEnding.ENDED
    is_aborted = request.status == RequestStatus.FINISHED_ABORTED
    if is_aborted and _has_stop_strings(request) and request.num_output_tokens:
        return TurnEnding.MAYBE_ENDED
    return TurnEnding.CUT

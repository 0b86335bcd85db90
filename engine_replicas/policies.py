"""From settings to policies: which classes the names stand for, and what they learn from."""

from __future__ import annotations

from engine_replicas.config import OrderingName, RetentionName, SchedulingSettings
from engine_replicas.ordering import Fcfs, Ordering, ProgramFcfs
from engine_replicas.retention.eta import EtaEstimator
from engine_replicas.retention.policy import Continuum, EndOfTurn, Estimates, RetentionPolicy, StaticTtl
from engine_replicas.retention.prefill_cost import PrefillCost
from engine_replicas.retention.queueing_delay import QueueingDelay
from engine_replicas.retention.tool_latency import ToolLatencyView


def new_estimates(settings: SchedulingSettings, *, step_tokens_max: int) -> Estimates:
    """Estimators that know nothing yet; an engine computes at most `step_tokens_max` tokens a step."""
    return Estimates(
        tools=ToolLatencyView(window=settings.duration_window, tools_max=settings.tools_max),
        queueing_delay=QueueingDelay(window=settings.queueing_delay_window),
        eta=EtaEstimator(window=settings.program_window, programs_min=settings.eta_programs_min),
        prefill=PrefillCost(chunk_tokens_max=step_tokens_max),
    )


def retention_policy(settings: SchedulingSettings, estimates: Estimates) -> RetentionPolicy:
    """The retention policy that the settings name."""
    match settings.retention_name:
        case RetentionName.END_OF_TURN:
            return EndOfTurn()
        case RetentionName.STATIC_TTL:
            return StaticTtl(settings.ttl_s)
        case RetentionName.CONTINUUM:
            return Continuum(estimates, k_cold_start=settings.k_cold_start)


def ordering_policy(settings: SchedulingSettings) -> Ordering:
    """The ordering that the settings name."""
    match settings.ordering_name:
        case OrderingName.FCFS:
            return Fcfs()
        case OrderingName.PROGRAM_FCFS:
            return ProgramFcfs()

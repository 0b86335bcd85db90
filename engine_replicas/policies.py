"""From settings to policies: which classes the names stand for, and what they learn from."""

from __future__ import annotations

from dataclasses import dataclass

from engine_replicas.admission import Admission, NoAdmission, WorkingSet
from engine_replicas.config import AdmissionName, OrderingName, RetentionName, SchedulingSettings
from engine_replicas.ordering import Adaptive as AdaptiveOrder
from engine_replicas.ordering import Fcfs, Ordering, Plas, ProgramFcfs
from engine_replicas.retention.decode_cost import DecodeCost
from engine_replicas.retention.eta import EtaEstimator
from engine_replicas.retention.policy import (
    Adaptive,
    Continuum,
    EndOfTurn,
    Estimates,
    InferCept,
    RetentionPolicy,
    StaticTtl,
)
from engine_replicas.retention.prefill_cost import PrefillCost
from engine_replicas.retention.queueing_delay import QueueingDelay
from engine_replicas.retention.reclaim import CheapestFirst, LatestArrival, Reclaiming
from engine_replicas.retention.reload_cost import ReloadCost
from engine_replicas.retention.tool_latency import ToolLatencyView


def new_estimates(
    settings: SchedulingSettings, *, step_tokens_max: int, kv_tokens_total: int, has_tier: bool = False
) -> Estimates:
    """Estimators that know nothing yet, for an engine that computes at most `step_tokens_max` tokens a step and holds
    `kv_tokens_total`, with or without a tier below."""
    prefill = PrefillCost(chunk_tokens_max=step_tokens_max)
    return Estimates(
        tools=ToolLatencyView(window=settings.duration_window, tools_max=settings.tools_max),
        queueing_delay=QueueingDelay(window=settings.queueing_delay_window),
        eta=EtaEstimator(window=settings.program_window, programs_min=settings.eta_programs_min),
        prefill=prefill,
        reload=ReloadCost(prefill, kv_tokens_total=kv_tokens_total, has_tier=has_tier),
        decode=DecodeCost(),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Policies:
    """Everything that decides in one scheduler."""

    retention: RetentionPolicy
    reclaiming: Reclaiming
    ordering: Ordering
    admission: Admission


def named_policies(settings: SchedulingSettings, estimates: Estimates) -> Policies:
    """The policies that the settings name, learning from `estimates`."""
    return Policies(
        retention=_retention(settings, estimates),
        reclaiming=_reclaiming(settings, estimates),
        ordering=_ordering(settings),
        admission=_admission(settings),
    )


def _retention(settings: SchedulingSettings, estimates: Estimates) -> RetentionPolicy:
    match settings.retention_name:
        case RetentionName.END_OF_TURN:
            return EndOfTurn()
        case RetentionName.STATIC_TTL:
            return StaticTtl(settings.ttl_s)
        case RetentionName.INFERCEPT:
            return InferCept(estimates)
        case RetentionName.CONTINUUM:
            return Continuum(estimates, k_cold_start=settings.k_cold_start)
        case RetentionName.ADAPTIVE:
            return Adaptive(estimates, ttl_s=settings.priced_ttl_max_s)


def _reclaiming(settings: SchedulingSettings, estimates: Estimates) -> Reclaiming:
    if settings.retention_name is RetentionName.ADAPTIVE:
        return CheapestFirst(estimates.reload, estimates.decode)
    return LatestArrival()


def _ordering(settings: SchedulingSettings) -> Ordering:
    match settings.ordering_name:
        case OrderingName.FCFS:
            return Fcfs()
        case OrderingName.PROGRAM_FCFS:
            return ProgramFcfs()
        case OrderingName.PLAS:
            return Plas()
        case OrderingName.ADAPTIVE:
            return AdaptiveOrder()


def _admission(settings: SchedulingSettings) -> Admission:
    match settings.admission_name:
        case AdmissionName.NONE:
            return NoAdmission()
        case AdmissionName.WORKING_SET:
            return WorkingSet(fraction=settings.admission_fraction, wait_max_s=settings.admission_wait_max_s)

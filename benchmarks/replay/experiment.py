"""One cell of a comparison: a workload on a deployment under a policy. Plain data in, plain data out.

A `Cell` says everything that a run depends on, so its canonical JSON identifies the result; `run_cell` is a pure function
of it (and of the code, whose digest result caches add).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from agent_program.errors import InvalidRequest
from benchmarks.replay.alone import alone_s, saturation_rate_per_s
from benchmarks.replay.clairvoyant import Foresight, Oracle, OracleCalls, clairvoyant_policies
from benchmarks.replay.clock import VirtualClock
from benchmarks.replay.control import NoControl, SchedulerControl, UtilityCalls
from benchmarks.replay.faults import ReplicaLoss, SlowedStepTime, SlowReplica, check_faults
from benchmarks.replay.figures import occupancy_row, program_row, summarize, ttl_rows
from benchmarks.replay.hardware import Deployment, gpu, model
from benchmarks.replay.records import RunRecord
from benchmarks.replay.replica import Replica
from benchmarks.replay.simulation import Simulation
from benchmarks.replay.step_time import RooflineStepTime, StepTimeModel
from benchmarks.replay.trace import Trace
from benchmarks.replay.vllm_config import EngineShape, context_tokens
from benchmarks.replay.vllm_engine import ReplayEngine
from benchmarks.replay.workload import ArrivalKind, Arrivals, DeclaredTurns, ToolTimes, Workload, build_workload
from continuum_router.config import RouterSettings
from engine_replicas.config import SchedulingSettings
from engine_replicas.vllm_scheduler import make_scheduler

#: vLLM's own scheduler class, untouched: what the `vllm` preset must equal.
STOCK = "stock"
#: Policies that know the future (see `clairvoyant.py`), and which halves of it each uses.
CLAIRVOYANT = {
    "clairvoyant": Foresight(order=True, retention=True),
    "clairvoyant_order": Foresight(order=True, retention=False),
    "clairvoyant_retention": Foresight(order=False, retention=True),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """A named way to schedule."""

    name: str
    #: Settings of our scheduler, as production would be given them; None runs vLLM's own class.
    scheduling: Mapping[str, Any] | None

    @property
    def foresight(self) -> Foresight | None:
        """What it knows of the future; None for policies that could run in production."""
        return CLAIRVOYANT.get(self.name.split("+")[0])

    @classmethod
    def named(cls, name: str) -> Policy:
        """A preset, `program_fcfs` (the paper's order without retention), `static:SECONDS` (a fixed time to live in the
        paper's order), `stock`, or `clairvoyant`, `clairvoyant_order` and `clairvoyant_retention`. Settings of the scheduler
        may follow: `continuum+ordering=fcfs+ttl_max_s=60`.

        Raises:
            InvalidRequest: nothing of that name, or no such setting.
        """
        if name == STOCK:
            return cls(name=name, scheduling=None)
        base, *overrides = name.split("+")
        try:
            scheduling = _scheduling("adaptive" if base in CLAIRVOYANT else base) | _overrides(overrides)
            SchedulingSettings.model_validate(scheduling)
        except ValueError as error:
            raise InvalidRequest(f"unknown policy {name!r}: {error}", param="presets") from error
        return cls(name=name, scheduling=scheduling)


def _scheduling(name: str) -> dict[str, Any]:
    if name.startswith("static:"):
        ttl_s = float(name.removeprefix("static:"))
        return {"preset": "continuum", "retention": "static_ttl", "ttl_s": ttl_s, "ttl_max_s": max(120.0, ttl_s)}
    if name == "program_fcfs":
        return {"preset": "vllm", "ordering": "program_fcfs"}
    return {"preset": name}


def _overrides(settings: Sequence[str]) -> dict[str, Any]:
    found = {}
    for setting in settings:
        key, separator, value = setting.partition("=")
        if not separator:
            raise ValueError(f"{setting!r} is not of the form setting=value")
        found[key] = value
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """All that one run depends on, the trace aside."""

    gpu: str = "h100"
    model: str = "llama-3.1-8b"
    tensor_parallel: int = 1
    replicas: int = 1
    policy: Policy
    seed: int = 1
    #: How many programs; None runs the whole trace.
    programs: int | None = 100
    #: Arrivals relative to saturation (1 = the GPU has no idle time left with perfect reuse), or None for `arrivals`.
    load: float | None = 1.0
    arrivals: Arrivals | None = None
    tool_times: ToolTimes = ToolTimes.RECORDED
    tool_time_scale: float = 1.0
    declared: DeclaredTurns = DeclaredTurns.NONE
    shape: EngineShape = field(default_factory=EngineShape)
    #: Settings of the router, as production would be given them.
    router: Mapping[str, Any] = field(default_factory=dict)
    losses: tuple[ReplicaLoss, ...] = ()
    slow: tuple[SlowReplica, ...] = ()
    jump: bool = True

    @property
    def deployment(self) -> Deployment:
        return Deployment(model=model(self.model), gpu=gpu(self.gpu), tensor_parallel=self.tensor_parallel)

    @property
    def kv_tokens(self) -> int:
        return self.shape.kv_tokens or self.deployment.kv_capacity_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class CellResult:
    """What a run gave."""

    cell: Cell
    #: Programs per second offered; None for closed or recorded arrivals.
    rate_per_s: float | None
    #: Programs of the trace that cannot run on this deployment.
    left_out: tuple[tuple[str, int], ...]
    run: RunRecord
    #: What the step times come from.
    step_time_label: str

    def to_dict(self, *, with_rows: bool = False) -> dict[str, Any]:
        """Plain data for JSON: the cell, its labels, its figures; rows by program and over time on request."""
        cell, deployment = self.cell, self.cell.deployment
        out: dict[str, Any] = {
            "policy": cell.policy.name,
            "deployment": deployment.label,
            "uncalibrated_because": list(deployment.uncalibrated_because),
            "step_time_label": self.step_time_label,
            "replicas": cell.replicas,
            "declared": cell.declared.value,
            "load": cell.load,
            "rate_per_s": self.rate_per_s,
            "seed": cell.seed,
            "kv_tokens": cell.kv_tokens,
            "left_out": dict(self.left_out),
            **summarize(self.run),
        }
        if with_rows:
            out["by_program"] = [program_row(program) for program in self.run.programs]
            out["occupancy"] = [occupancy_row(sample) for sample in self.run.occupancy]
            out["ttl_rows"] = ttl_rows(self.run.programs)
            out["scheduler"] = [dict(replica.scheduler_stats) for replica in self.run.replicas]
        return out


def run_cell(
    cell: Cell,
    trace: Trace,
    *,
    step_time: StepTimeModel | None = None,
    durations: Mapping[str, Sequence[float]] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> CellResult:
    """Run one cell.

    Args:
        trace: programs longer than the model's context or the KV cache are left out and counted.
        step_time: None takes the roofline model of the cell's deployment.
        durations: measured tool times by class, for cells that resample them.

    Raises:
        InvalidRequest: a cell that contradicts itself, faults that cannot happen, settings that do not exist, or a trace with
            no program that fits.
        ReplayStalled: the scheduler under test stops making progress.
    """
    check_faults(cell.replicas, cell.losses, cell.slow)
    times = step_time or RooflineStepTime(cell.deployment)
    fitting = trace.within(context_tokens(cell.deployment, cell.shape))
    if not fitting.programs:
        raise InvalidRequest(f"no program of {trace.name} fits {cell.kv_tokens} tokens of KV", param="trace")
    workload, rate_per_s = _workload(cell, fitting, times, durations)
    clock = VirtualClock()
    oracle = None
    if cell.policy.foresight is not None:
        oracle = Oracle(workload.programs, times, cell.shape.max_batched_tokens)
    replicas = [_replica(cell, index, times, clock, oracle) for index in range(cell.replicas)]
    simulation = Simulation(
        workload=workload,
        replicas=replicas,
        clock=clock,
        block_size=cell.shape.block_size,
        alone_s=partial(alone_s, step_time=times, chunk_tokens=cell.shape.max_batched_tokens),
        router=_router_settings(cell),
        losses=cell.losses,
        on_progress=on_progress,
    )
    try:
        run = simulation.run()
    finally:
        for replica in replicas:
            replica.engine.close()
    return CellResult(cell=cell, rate_per_s=rate_per_s, left_out=fitting.left_out, run=run, step_time_label=times.label)


def _router_settings(cell: Cell) -> RouterSettings:
    try:
        return RouterSettings.model_validate(cell.router)
    except ValueError as error:
        raise InvalidRequest(f"settings of the router: {error}", param="router") from error


def saturation_rate(cell: Cell, trace: Trace, step_time: StepTimeModel | None = None) -> float:
    """Programs per second of load 1 on all replicas of the cell."""
    return cell.replicas * saturation_rate_per_s(
        trace.programs,
        step_time or RooflineStepTime(cell.deployment),
        kv_tokens=cell.kv_tokens,
        chunk_tokens=cell.shape.max_batched_tokens,
        running_max=cell.shape.max_running,
    )


def _workload(
    cell: Cell, trace: Trace, times: StepTimeModel, durations: Mapping[str, Sequence[float]] | None
) -> tuple[Workload, float | None]:
    arrivals = cell.arrivals or Arrivals(rate_per_s=1.0)
    if cell.load is not None:
        if arrivals.kind in (ArrivalKind.CLOSED, ArrivalKind.RECORDED):
            raise InvalidRequest(f"a load cannot be set for {arrivals.kind.value} arrivals", param="load")
        rate = cell.load * saturation_rate(cell, trace, times)
        arrivals = Arrivals(kind=arrivals.kind, rate_per_s=rate, burstiness=arrivals.burstiness)
    workload = build_workload(
        trace,
        arrivals=arrivals,
        seed=cell.seed,
        programs=cell.programs,
        tool_times=cell.tool_times,
        durations=durations,
        tool_time_scale=cell.tool_time_scale,
        declared=cell.declared,
    )
    return workload, arrivals.rate_per_s if arrivals.kind in (ArrivalKind.POISSON, ArrivalKind.BURSTY) else None


def _replica(cell: Cell, index: int, times: StepTimeModel, clock: VirtualClock, oracle: Oracle | None) -> Replica:
    policy, slow_factor = cell.policy, 1.0
    for slow in cell.slow:
        if slow.replica == index:
            times, slow_factor = SlowedStepTime(times, slow, clock), slow_factor * slow.factor
    make: Callable[..., Scheduler] = Scheduler if policy.scheduling is None else partial(make_scheduler, clock=clock)
    if oracle is not None:
        policies = partial(clairvoyant_policies, oracle=oracle, foresight=policy.foresight or Foresight())
        make = partial(make_scheduler, clock=clock, policies=policies)
    engine = ReplayEngine(
        deployment=cell.deployment,
        shape=cell.shape,
        step_time=times,
        clock=clock,
        make_scheduler=make,
        additional_config={} if policy.scheduling is None else {"continuum": dict(policy.scheduling)},
        jump=cell.jump,
    )
    control: SchedulerControl = NoControl(engine.scheduler)
    if oracle is not None:
        control = OracleCalls(engine.scheduler, oracle)
    elif policy.scheduling is not None:
        control = UtilityCalls(engine.scheduler)
    return Replica(engine=engine, control=control, slow_factor=slow_factor)

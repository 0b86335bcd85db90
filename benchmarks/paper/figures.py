"""The paper's figures as data (`figures.toml` says what each field means), and the runs that re-do them."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from benchmarks.replay.experiment import Cell, Policy
from benchmarks.replay.generators import BFCL, SWEBENCH, AgentShape, LogNormal, Normal, generate_programs
from benchmarks.replay.hardware import gpu
from benchmarks.replay.offload import Tier
from benchmarks.replay.sweep import Task
from benchmarks.replay.trace import Trace
from benchmarks.replay.vllm_config import EngineShape
from benchmarks.replay.workload import Arrivals

FIGURES = Path(__file__).with_name("figures.toml")
#: Programs of every experiment of the paper.
PROGRAMS = 100
_SHAPES: Mapping[str, AgentShape] = {"swebench": SWEBENCH, "bfcl": BFCL}
#: The fields of a point that are no policy.
_SETTINGS = frozenset({"rate", "turns"})


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class WorkloadSpec(_Strict):
    """Programs like the paper's."""

    generator: str
    output_tokens: float = Field(gt=0)
    fitted_to: str


class Panel(_Strict):
    """One model on one GPU in one figure."""

    figure: int
    workload: str
    model: str
    gpu: str
    tensor_parallel: int = 1
    offload_gb: float | None = None
    rate: float | None = None
    points: tuple[Mapping[str, float], ...]

    @property
    def label(self) -> str:
        """The panel in words."""
        count = f"{self.tensor_parallel} × " if self.tensor_parallel > 1 else ""
        tier = "" if self.offload_gb is None else f", {self.offload_gb:g} GB of host memory"
        return f"{self.workload}, {self.model} on {count}{self.gpu}{tier}"


class Figures(_Strict):
    """The whole file."""

    policies: Mapping[str, str]
    workloads: Mapping[str, WorkloadSpec]
    panels: tuple[Panel, ...]

    @model_validator(mode="after")
    def _points_name_known_policies(self) -> Figures:
        for panel in self.panels:
            for point in panel.points:
                unknown = set(point) - _SETTINGS - set(self.policies)
                if unknown:
                    raise ValueError(f"figure {panel.figure}: unknown policies {sorted(unknown)}")
        return self


@cache
def load_figures(path: Path = FIGURES) -> Figures:
    """The figures.

    Raises:
        ValidationError: an unknown key, or a point with a policy that `policies` does not have.
    """
    return Figures.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))


@dataclass(frozen=True, kw_only=True, slots=True)
class PaperPrograms:
    """Programs fitted to the paper's Table 2, with what it leaves open filled in."""

    generator: str
    output_tokens: float
    #: Mean turns, where a figure varies them; the deviation grows with it, the tokens stay.
    turns: float | None = None

    @property
    def name(self) -> str:
        turns = "" if self.turns is None else f", {self.turns:g} turns"
        return f"{self.generator} as in the paper{turns}"

    def load(self, *, seed: int, programs: int | None) -> Trace:
        """The programs of a seed."""
        shape = _SHAPES[self.generator]
        shape = replace(shape, output_tokens=LogNormal(self.output_tokens, self.output_tokens))
        if self.turns is not None:
            assert isinstance(shape.turns, Normal)
            # Outputs are a property of the program's work: more turns share the same tokens.
            factor = self.turns / shape.turns.mean
            per_turn = self.output_tokens / factor
            shape = replace(
                shape,
                turns=Normal(self.turns, shape.turns.sd * factor, shape.turns.at_least),
                output_tokens=LogNormal(per_turn, per_turn),
            )
        rng = Random(f"paper/{self.generator}/{seed}")
        return Trace(name=self.name, programs=tuple(generate_programs(shape, programs or PROGRAMS, rng, prefix="p")))


@dataclass(frozen=True, kw_only=True, slots=True)
class PointRun:
    """One policy at one point of a figure."""

    panel: Panel
    #: What the point varies: `rate` or `turns`, and its value.
    varied: tuple[str, float]
    policy: str
    paper_s: float
    seed: int
    task: Task


def point_runs(figures: Figures, numbers: Sequence[int], seeds: Sequence[int]) -> Iterator[PointRun]:
    """Every run of the figures with these numbers."""
    for panel in figures.panels:
        if panel.figure not in numbers:
            continue
        for point in panel.points:
            for policy in (name for name in figures.policies if name in point):
                for seed in seeds:
                    yield _run(figures, panel, point, policy, seed)


def _run(figures: Figures, panel: Panel, point: Mapping[str, float], policy: str, seed: int) -> PointRun:
    workload = figures.workloads[panel.workload]
    rate = panel.rate if panel.rate is not None else point["rate"]
    cell = Cell(
        gpu=panel.gpu,
        model=panel.model,
        tensor_parallel=panel.tensor_parallel,
        policy=Policy.named(figures.policies[policy]),
        seed=seed,
        programs=PROGRAMS,
        load=None,
        arrivals=Arrivals(rate_per_s=rate),
        shape=EngineShape(offload=_tiers(panel)),
    )
    source = PaperPrograms(generator=workload.generator, output_tokens=workload.output_tokens, turns=point.get("turns"))
    return PointRun(
        panel=panel,
        varied=("turns", point["turns"]) if "turns" in point else ("rate", rate),
        policy=policy,
        paper_s=point[policy],
        seed=seed,
        task=Task(source=source, cell=cell, with_rows=False),
    )


def _tiers(panel: Panel) -> tuple[Tier, ...]:
    if panel.offload_gb is None:
        return ()
    rate = panel.tensor_parallel * gpu(panel.gpu).host_link_bytes_per_s
    return (Tier(name="dram", capacity_bytes=1e9 * panel.offload_gb, bytes_per_s=rate),)


def rows_of_points(runs: Sequence[PointRun], results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row a point and policy: our mean completion time and the paper's, and both over `vllm`'s at the same point."""
    means: dict[tuple[str, tuple[str, float], int, str], list[float]] = {}
    first: dict[tuple[str, tuple[str, float], int, str], tuple[PointRun, Mapping[str, Any]]] = {}
    for run, result in zip(runs, results, strict=True):
        key = (run.panel.label, run.varied, run.panel.figure, run.policy)
        means.setdefault(key, []).append(result["completion_s"]["mean"])
        first.setdefault(key, (run, result))
    rows = []
    for key, values in means.items():
        run, result = first[key]
        stock = (*key[:3], "vllm")
        ours_s = sum(values) / len(values)
        ours = ours_s / (sum(means[stock]) / len(means[stock]))
        paper = run.paper_s / first[stock][0].paper_s
        rows.append(
            {
                "figure": run.panel.figure,
                "panel": run.panel.label,
                run.varied[0]: run.varied[1],
                "policy": run.policy,
                "seeds": len(values),
                "ours_s": round(ours_s, 1),
                "paper_s": run.paper_s,
                "ours_over_vllm": round(ours, 3),
                "paper_over_vllm": round(paper, 3),
                "off_by": round(ours / paper - 1.0, 3),
                "uncalibrated": bool(result["uncalibrated_because"]),
            }
        )
    return rows

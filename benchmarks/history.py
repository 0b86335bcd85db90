"""`python -m benchmarks.history [--json] [--seconds N] [--rate N]`: what recording tool times costs the one who records them.

Samples are recorded at a steady rate on one event loop, as a tool actor does, into the real writer over the embedded store, while
a reader takes snapshots as an engine does. Then the store is stopped for a while.

    samples_per_s             recorded, and how many of them reached the store
    record_us                 one `record`, which is all that a tool call waits for
    loop_lag_ms               how late the event loop was, writes included
    snapshot_ms               a whole snapshot for an engine
    away_record_us            one `record` while the store is away
    dropped                   samples given up in all that
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from agent_program.ids import ToolKey
from agent_program.tool_events import LatencySample, SampleSource, ToolOutcome
from deployments.embedded_store import EmbeddedStore
from tool_runtime.config import HistorySettings
from tool_runtime.history_writer import HistoryWriter
from tool_runtime.redis_history import RedisHistory, redis_history

_TICK_S = 0.01
_TOOLS = 40


class Recorder:
    """Records at a rate, and measures what that takes."""

    def __init__(self, writer: HistoryWriter, rate: int) -> None:
        self._writer = writer
        self._per_tick = max(1, round(rate * _TICK_S))
        self.recorded = 0
        self.record_s: list[float] = []
        self.lag_s: list[float] = []

    async def run(self, seconds: float) -> None:
        """Record for so long."""
        begun_s = time.perf_counter()
        ticks = round(seconds / _TICK_S)
        for tick in range(1, ticks + 1):
            for _ in range(self._per_tick):
                self._record()
            late_s = begun_s + tick * _TICK_S - time.perf_counter()
            await asyncio.sleep(max(0.0, late_s))
            self.lag_s.append(max(0.0, time.perf_counter() - begun_s - tick * _TICK_S))

    def _record(self) -> None:
        sample = LatencySample(
            tool=ToolKey(f"tool{self.recorded % _TOOLS}"),
            duration_s=1.0 + self.recorded % 97,
            outcome=ToolOutcome.OK,
            source=SampleSource.TOOL_RUNTIME,
            at_wall_s=0.0,
        )
        begun_s = time.perf_counter()
        self._writer.record(sample)
        self.record_s.append(time.perf_counter() - begun_s)
        self.recorded += 1


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def spread(values: list[float], unit: float) -> dict[str, float]:
    """p50, p99 and the largest, in a unit of so many seconds."""
    ordered = sorted(values)
    at = {"p50": len(ordered) // 2, "p99": len(ordered) * 99 // 100, "max": len(ordered) - 1}
    return {name: round(ordered[index] / unit, 3) for name, index in at.items()}


async def measure(seconds: float, rate: int) -> dict[str, Any]:
    """All figures, over a store of its own."""
    settings = HistorySettings()
    with tempfile.TemporaryDirectory(prefix="continuum-history-") as directory:
        store = EmbeddedStore(port=_free_port(), data_dir=Path(directory), memory_mib=256)
        await store.start()
        url = store.url
        writer = HistoryWriter(
            redis_history(settings, url),
            flush_interval_s=settings.flush_interval_s,
            buffered_samples_max=settings.buffered_samples_max,
        )
        reader = redis_history(settings, url)
        try:
            return await _figures(writer, reader, store, seconds, rate)
        finally:
            await writer.close()
            await reader.close()
            await store.stop()


async def _figures(
    writer: HistoryWriter, reader: RedisHistory, store: EmbeddedStore, seconds: float, rate: int
) -> dict[str, Any]:
    recorder = Recorder(writer, rate)
    snapshots: list[float] = []
    begun_s = time.perf_counter()
    recording = asyncio.create_task(recorder.run(seconds))
    while not recording.done():
        read_s = time.perf_counter()
        await reader.snapshot()
        snapshots.append(time.perf_counter() - read_s)
        await asyncio.wait({recording}, timeout=0.5)
    took_s = time.perf_counter() - begun_s
    await writer.flush()
    dropped = writer.dropped
    await store.stop()
    away = Recorder(writer, rate)
    await away.run(min(seconds, 2.0))
    await store.start()
    return {
        "samples_per_s": {
            "wanted": rate,
            "recorded": round(recorder.recorded / took_s),
            "stored": round((recorder.recorded - dropped) / took_s),
        },
        "record_us": spread(recorder.record_s, 1e-6),
        "loop_lag_ms": spread(recorder.lag_s, 1e-3),
        "snapshot_ms": {"p50": round(statistics.median(snapshots) * 1e3, 1), "count": len(snapshots)},
        "away_record_us": spread(away.record_s, 1e-6),
        "dropped": {"store_there": dropped, "store_away": writer.dropped - dropped},
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.history", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--seconds", type=float, default=5.0, help="seconds of recording (default: %(default)s)")
    parser.add_argument("--rate", type=int, default=10_000, help="samples a second (default: %(default)s)")
    options = parser.parse_args()
    report = asyncio.run(measure(options.seconds, options.rate))
    if options.json:
        print(json.dumps(report, indent=2))
        return
    for name, value in report.items():
        print(f"{name:20} " + "  ".join(f"{key} {number}" for key, number in value.items()))


if __name__ == "__main__":
    main()

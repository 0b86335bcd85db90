"""Random programs on the real scheduler, one scenario a seed, with every promise of the scheduler checked in every step.

A seed chooses all there is to choose: the policy, the scheduling mode, the pool (down to one request's worth), the kinds of KV,
the programs with their branches, cancellations and shared prompts, tools that answer at once and tools that never do, and
resets of the cache and pauses of the engine. `make nightly` runs ten thousand:

    PYTHONPATH=tests python -m support.random_runs --seeds 10000
    PYTHONPATH=tests python -m support.random_runs --first 4711 --seeds 1      # one again
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm.v1.core.sched.interface import PauseState

from engine_replicas.config import SchedulingSettings
from support.engine_core import SchedulerHarness, full_attention, next_token, sliding_window, tiny_model
from support.program_load import Load, LoadProgram, random_programs

BLOCK = 16

_EVERYTHING = {
    "retained_fraction_max": 1.0,
    "tenant_retained_fraction_max": 1.0,
    "program_retained_fraction_max": 1.0,
}
POLICIES: dict[str, dict[str, Any]] = {
    "vllm": {"preset": "vllm"},
    "continuum": {"preset": "continuum", "k_cold_start": 3},
    "static": {"retention": "static_ttl", "ttl_s": 2.0},
    "forever": {"retention": "static_ttl", "ttl_s": 10_000, "ttl_max_s": 10_000, **_EVERYTHING},
    "autellix": {"preset": "autellix"},
    "infercept": {"preset": "infercept"},
    "adaptive": {"preset": "adaptive"},
    "adaptive_and_open": {"preset": "adaptive", **_EVERYTHING},
    "adaptive_and_tight": {
        "preset": "adaptive",
        "tenant_retained_fraction_max": 0.5,
        "program_retained_fraction_max": 0.3,
        "admission_fraction": 0.4,
        "admission_wait_max_s": 5.0,
        "lane_fraction": 0.0,
    },
    "retained_but_fcfs": {"retention": "static_ttl", "ttl_s": 2.0, "ordering": "fcfs"},
}


class CheckedLoad(Load):
    """A load that looks at the scheduler's books after every step."""

    def _step(self) -> None:
        super()._step()
        if self._resets and self._rng.random() < 0.005:
            self._pause()
        engine, scheduler = self.engine, self.engine.scheduler
        pool = scheduler.kv_cache_manager.block_pool
        in_use = sum(1 for block in pool.blocks if block.ref_cnt > 0 and not block.is_null)
        assert in_use == engine.total_blocks - engine.free_blocks, "blocks are lost, or counted twice"
        queued = [*scheduler.running, *scheduler.waiting, *scheduler.kv_holding_waiting]
        assert len(queued) == len({id(request) for request in queued}), "a request is queued twice"
        assert {request.request_id for request in queued} == set(scheduler.requests), "a request is in no queue"
        held = {id(block): block for blocks in scheduler._held.values() for block in blocks}
        assert all(block.ref_cnt > 0 and block.block_hash is not None for block in held.values())

    def _pause(self) -> None:
        """Stop for a few steps, running turns too or not, as an operator does who puts the engine to sleep or changes weights."""
        scheduler = self.engine.scheduler
        scheduler.set_pause_state(self._rng.choice([PauseState.PAUSED_NEW, PauseState.PAUSED_ALL]))
        for _ in range(self._rng.randint(1, 5)):
            self.engine.step()
            assert not self.engine.stats()["live_leases"], "something is retained while the engine is paused"
        scheduler.set_pause_state(PauseState.UNPAUSED)


def settings_of(policy: str) -> SchedulingSettings:
    return SchedulingSettings(**POLICIES[policy])


def played(model: Path, seed: int) -> CheckedLoad:
    """Play the seed's scenario to its end and check what must hold then.

    Raises:
        AssertionError: a promise was broken.
    """
    rng = random.Random(f"scenario {seed}")
    policy = rng.choice(sorted(POLICIES))
    programs = random_programs(rng, programs=rng.randint(4, 20), tokens_max=rng.choice([96, 256, 512]))
    for program in programs:
        draw_tool_times(rng, program)
    longest = max(sum(map(len, program.prompts)) + sum(program.output_tokens) for program in programs)
    # Scheduled ahead, a turn takes a slot for a token that it may not need.
    blocks = math.ceil(math.ceil((longest + 1) / BLOCK) * rng.choice([1.0, 1.1, 1.5, 2.0, 4.0]))
    is_hybrid = rng.random() < 0.2
    engine = SchedulerHarness(
        model,
        settings_of(policy),
        blocks=2 * blocks if is_hybrid else blocks,
        max_num_seqs=rng.choice([1, 2, 4, 8]),
        step_tokens_max=rng.choice([32, 64, 128, 512]),
        is_async=rng.random() < 0.5,
        specs=[full_attention(BLOCK), sliding_window(BLOCK, 64)] if is_hybrid else None,
    )
    load = CheckedLoad(engine, programs, rng, resets=rng.random() < 0.3)
    load.run()
    check_end(load)
    return load


def draw_tool_times(rng: random.Random, program: LoadProgram) -> None:
    """From instant to never."""
    for index in range(len(program.tool_s)):
        kind = rng.random()
        if kind < 0.2:
            program.tool_s[index] = 0.0
        elif kind < 0.3:
            program.tool_s[index] = rng.expovariate(1 / 300)
        elif kind < 0.35:
            program.tool_s[index] = math.inf


def check_end(load: CheckedLoad) -> None:
    """After the last turn, and after every deadline."""
    engine = load.engine
    assert engine.leases_beside_preemption == 0, "somebody was preempted while there were leases to take"
    stats = engine.stats()
    assert engine.free_blocks == engine.total_blocks - stats["retained_blocks"]
    engine.clock.advance(100_000)
    stats = engine.stats()
    assert engine.free_blocks == engine.total_blocks
    assert stats["leases_begun"] == sum(stats["leases"].values()), "a lease ended twice, or never"
    assert (stats["live_turns"], stats["live_leases"]) == (0, 0)
    assert engine.scheduler.reset_prefix_cache()
    for context, answer in load.answered:
        known = list(context)
        for token in answer:
            assert token == next_token(known), "the answer is not what the model says to this context"
            known.append(token)


def failures(model: Path, seeds: range, *, progress: bool) -> Iterator[tuple[int, str]]:
    """The seeds whose scenario breaks a promise, each with the traceback."""
    started_s = time.monotonic()
    policies: Counter[str] = Counter()
    for count, seed in enumerate(seeds, start=1):
        try:
            load = played(model, seed)
        except Exception:  # noqa: BLE001 - whatever a scenario raises is what the run is for
            yield seed, traceback.format_exc()
        else:
            policies[load.engine.stats()["retention"]] += 1
        if progress and count % 100 == 0:
            sys.stderr.write(f"{count} of {len(seeds)} seeds, {time.monotonic() - started_s:.0f} s {dict(policies)}\n")
            sys.stderr.flush()


def main() -> int:
    """Run the seeds; name those that fail."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=int(os.environ.get("SEEDS", "10000")), help="how many seeds")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    arguments = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    logging.getLogger("vllm").setLevel(logging.ERROR)
    failed: list[int] = []
    with tempfile.TemporaryDirectory() as directory:
        model = tiny_model(Path(directory) / "model")
        seeds = range(arguments.first, arguments.first + arguments.seeds)
        for seed, why in failures(model, seeds, progress=True):
            failed.append(seed)
            sys.stdout.write(f"seed {seed} fails:\n{why}\n")
            sys.stdout.flush()
    sys.stdout.write(f"{arguments.seeds} seeds, {len(failed)} failed{': ' if failed else ''}{failed or ''}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())

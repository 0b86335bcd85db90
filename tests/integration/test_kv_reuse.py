"""A paused program's KV outlives other programs' turns with `continuum`, and does not with `end_of_turn`.

The same turns are driven through two running platforms, which differ in the retention policy only. The engine runs one turn
at a time, and its KV pool holds the probe's context and one other turn, so that three other turns must evict the probe's KV
unless a lease holds it.

No time is fixed in advance, because machines differ: the policy first learns how long evicted turns wait (T) from a queue
of sixteen turns, and the tool's history is then written in terms of that T. What the paper's formula makes of it, a lease of
nine tenths of T, is several times as long as the three turns take.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest

from support.platform import Json, Platform, running_platform
from support.waiting import wait_for

pytestmark = [pytest.mark.integration, pytest.mark.slow]

BLOCK_TOKENS, BLOCKS = 32, 64
#: Words of the probe's context, and of every other turn: about 1,000 and 700 of the pool's 2,016 tokens.
PROBE_WORDS, OTHER_WORDS = 950, 650
QUEUED_TURNS, OTHER_TURNS = 16, 3
TOOL = "probe_tool"


def words(count: int, name: str) -> str:
    """A text of its own for each name, about one token a word."""
    return " ".join([f"Report of {name}:", *(("the build was green and the tests ran " * count).split()[:count])])


@dataclass
class Drive:
    """One run of the scenario on one platform."""

    platform: Platform
    texts: dict[str, list[str]] = field(default_factory=dict)

    def turn(self, program: str, messages: list[Json], **hints: Any) -> Json:
        body = {
            "messages": messages,
            "program_id": program,
            "continuum": hints,
            "temperature": 0,
            "max_tokens": 8,
            "min_tokens": 8,
        }
        response = self.platform.client.post("/v1/chat/completions", json=body, timeout=240)
        assert response.status_code == 200, response.text
        answer: Json = response.json()
        self.texts.setdefault(program, []).append(answer["choices"][0]["message"]["content"])
        return answer

    def other_turn(self, name: str) -> None:
        self.turn(name, [{"role": "user", "content": words(OTHER_WORDS, name)}], is_last_turn=True)

    def learn_how_long_evicted_turns_wait(self) -> float:
        """Queue the second turns of sixteen programs at once; returns T as the engine now knows it."""
        names = [f"queued-{number}" for number in range(QUEUED_TURNS)]
        for name in names:
            self.turn(name, [{"role": "user", "content": name}])
        with ThreadPoolExecutor(QUEUED_TURNS) as pool:
            list(pool.map(self.other_turn, names))
        return wait_for(
            lambda: self.platform.metric("continuum_engine_queueing_delay_seconds"), what="the engine to know T"
        )

    def learn_how_long_the_tool_takes(self, seconds: float) -> None:
        self.turn("teacher", [{"role": "user", "content": "Begin."}])
        for _ in range(8):
            for event in ({"kind": "started"}, {"kind": "finished", "elapsed_s": seconds, "outcome": "ok"}):
                response = self.platform.client.post("/v1/programs/teacher/tool_events", json={"tool": TOOL, **event})
                assert response.status_code == 202, response.text

    def probe(self) -> float:
        """The share of its previous context that the probe's second turn finds, after three turns of others."""
        messages: list[Json] = [{"role": "user", "content": words(PROBE_WORDS, "probe")}]
        first = self.turn("probe", messages, next_tool=TOOL)
        for number in range(OTHER_TURNS):
            self.other_turn(f"other-{number}")
        messages += [
            {"role": "assistant", "content": first["choices"][0]["message"]["content"]},
            {"role": "user", "content": "The tool says: all is well."},
        ]
        second = self.turn("probe", messages, is_last_turn=True)
        context = first["usage"]["prompt_tokens"] + first["usage"]["completion_tokens"]
        return float(second["usage"]["prompt_tokens_details"]["cached_tokens"] / context)


def drive(retention: str) -> tuple[float, dict[str, list[str]]]:
    settings: Json = {
        # In float32 no two tokens tie, so that a recomputed context gives the very same output as a kept one.
        "engine": {"num_gpu_blocks_override": BLOCKS, "max_model_len": 1536, "max_num_seqs": 1, "dtype": "float32"},
        "scheduling": {"retention": retention, "k_cold_start": 4},
        "replicas": {"engine": 1},
    }
    with running_platform(settings) as platform:
        one = Drive(platform)
        evicted_wait_s = one.learn_how_long_evicted_turns_wait()
        one.learn_how_long_the_tool_takes(0.9 * evicted_wait_s)
        return one.probe(), one.texts


def test_a_paused_program_finds_its_kv_with_continuum_only_and_says_the_same_either_way() -> None:
    kept, texts_kept = drive("continuum")
    lost, texts_lost = drive("end_of_turn")
    assert kept >= 0.9, f"with continuum the next turn found {kept:.0%} of its context"
    assert lost < 0.3, f"with end_of_turn the next turn found {lost:.0%} of its context"
    assert texts_kept == texts_lost

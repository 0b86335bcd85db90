"""A policy that looks on: what it would have done is counted, and nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from agent_program.ids import ProgramId, ToolKey
from agent_program.turn import TurnHints
from engine_replicas.config import RetentionName, SchedulingPreset, SchedulingSettings, ShadowSettings
from engine_replicas.policies import named_policies, new_estimates
from engine_replicas.retention.controller import RetentionController
from engine_replicas.retention.events import FinishedTurn, HeldKv, TurnEnding
from engine_replicas.retention.lease import LeaseEndReason
from engine_replicas.shadowing import new_controller

BLOCK = 16
ALICE = ProgramId("alice")


class Engine:
    """An engine of 100 blocks, in which one policy acts and another looks on."""

    def __init__(self, shadow: dict[str, Any] | None, **settings: Any) -> None:
        self.free_blocks = 100
        named = SchedulingSettings.model_validate({"preset": "vllm", **settings, "shadow": shadow})

        def learn() -> Any:
            return new_estimates(named, step_tokens_max=512, kv_tokens_total=100 * BLOCK)

        self.estimates = learn()
        deciding = named_policies(named, self.estimates)
        self.controller: RetentionController
        self.controller, self.fitted = new_controller(
            named,
            self.estimates,
            new_estimates=learn,
            blocks_total=100,
            block_tokens=BLOCK,
            free_blocks=lambda: self.free_blocks,
            policy=deciding.retention,
            reclaiming=deciding.reclaiming,
        )
        self._turns = 0
        self._blocks = 0

    def turn(self, program: ProgramId, *, at_s: float, tokens: int, hit: int = 0, **hints: Any) -> str:
        """A turn that arrives, runs for a second and leaves `tokens` behind."""
        self._turns += 1
        turn_id = f"t{self._turns}"
        self.controller.turn_arrived(turn_id, TurnHints(program_id=program, **hints), at_s)
        self.controller.turn_scheduled(turn_id, hit, at_s)
        self._blocks += 100
        blocks = frozenset(range(self._blocks, self._blocks + tokens // BLOCK))
        self.controller.turn_finished(
            FinishedTurn(
                turn_id=turn_id,
                ending=TurnEnding.ENDED,
                context_tokens=tokens,
                collect=lambda: HeldKv(blocks=blocks, tokens=tokens),
            ),
            at_s + 1.0,
        )
        return turn_id

    def shadow(self) -> dict[str, Any]:
        return dict(self.controller.stats()["shadow"])


STATIC = {"preset": "vllm", "retention": "static_ttl", "ttl_s": 10.0}


def test_it_counts_what_it_would_have_saved() -> None:
    engine = Engine(STATIC)
    engine.turn(ALICE, at_s=0.0, tokens=160)
    # Back after 5 s; the engine retained nothing and found 32 tokens by luck: 160 − 32 would have been saved.
    engine.turn(ALICE, at_s=6.0, tokens=320, hit=32)
    seen = engine.shadow()
    assert (seen["would_save_tokens"], seen["would_recompute_tokens"]) == (128, 0)
    assert seen["agreement"] == {"both": 0, "neither": 0, "only_real": 0, "only_shadow": 1}
    assert seen["block_seconds"] == {"shadow": 10 * 5.0, "real": 0.0}
    assert engine.controller.stats()["live_leases"] == 0


def test_it_counts_what_it_would_have_lost() -> None:
    engine = Engine({"preset": "vllm"}, retention="static_ttl", ttl_s=10.0)
    engine.turn(ALICE, at_s=0.0, tokens=160)
    engine.turn(ALICE, at_s=6.0, tokens=320, hit=160)
    seen = engine.shadow()
    assert (seen["would_save_tokens"], seen["would_recompute_tokens"]) == (0, 160)
    assert seen["agreement"]["only_real"] == 1
    assert seen["block_seconds"] == {"shadow": 0.0, "real": 50.0}


def test_a_shadow_of_the_same_policy_agrees() -> None:
    engine = Engine({"preset": "vllm", "retention": "static_ttl", "ttl_s": 10.0}, retention="static_ttl", ttl_s=10.0)
    engine.turn(ALICE, at_s=0.0, tokens=160)
    engine.turn(ALICE, at_s=6.0, tokens=160, hit=160)
    engine.controller.expire(100.0)
    engine.turn(ALICE, at_s=101.0, tokens=160)
    seen = engine.shadow()
    assert seen["agreement"] == {"both": 1, "neither": 1, "only_real": 0, "only_shadow": 0}
    assert seen["block_seconds"]["shadow"] == seen["block_seconds"]["real"]


def test_leases_on_paper_lapse() -> None:
    engine = Engine(STATIC)
    engine.turn(ALICE, at_s=0.0, tokens=160)
    engine.controller.expire(10.0)
    assert engine.shadow()["live_leases"] == 1
    engine.controller.expire(11.5)
    assert engine.shadow()["leases"] == {"expired": 1}


def test_leases_on_paper_fit_beside_what_runs() -> None:
    engine = Engine(STATIC)
    engine.turn(ALICE, at_s=0.0, tokens=40 * BLOCK)
    engine.turn(ProgramId("bob"), at_s=0.0, tokens=30 * BLOCK)
    engine.free_blocks = 55  # 45 run: one of the two has to go
    engine.controller.expire(2.0)
    seen = engine.shadow()
    assert (seen["leases"], seen["retained_blocks"]) == ({"reclaimed": 1}, 40)


def test_a_tool_is_waited_for_as_the_policy_says() -> None:
    engine = Engine({"preset": "continuum"})
    engine.turn(ALICE, at_s=0.0, tokens=160)
    assert engine.shadow()["retained_blocks"] == 10  # provisional
    engine.controller.arm(ALICE, "0", ToolKey("pytest"), False, 1.1)
    assert engine.shadow()["leases"] == {"released": 1}  # nothing is known: not worth a second


def test_the_end_of_a_program_and_of_the_cache_end_leases_on_paper() -> None:
    engine = Engine(STATIC)
    engine.turn(ALICE, at_s=0.0, tokens=160)
    engine.controller.release_program(ALICE, 2.0)
    engine.turn(ProgramId("bob"), at_s=3.0, tokens=160)
    engine.controller.release_all(LeaseEndReason.CACHE_RESET, 5.0)
    assert engine.shadow()["leases"] == {"released": 2}
    assert engine.shadow()["retained_blocks"] == 0


def test_it_fits_costs_of_its_own_and_shares_what_is_only_read() -> None:
    engine = Engine({"preset": "adaptive"})
    real, seen = engine.fitted
    assert seen.tools is real.tools
    assert seen.prefill is not real.prefill


def test_without_a_shadow_nothing_is_said() -> None:
    engine = Engine(None)
    engine.turn(ALICE, at_s=0.0, tokens=160)
    assert "shadow" not in engine.controller.stats()
    assert engine.fitted == (engine.estimates,)


def test_the_settings_name_it() -> None:
    settings = SchedulingSettings.model_validate({"preset": "continuum", "shadow": {"preset": "adaptive"}})
    of_shadow = settings.of_shadow()
    assert of_shadow is not None
    assert of_shadow.retention_name is RetentionName.ADAPTIVE
    assert SchedulingSettings().of_shadow() is None
    assert ShadowSettings().preset is SchedulingPreset.ADAPTIVE
    with pytest.raises(ValidationError, match="ordering"):
        SchedulingSettings.model_validate({"shadow": {"ordering": "fcfs"}})

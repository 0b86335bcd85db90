"""What a priced decision compared can be asked afterwards, on both sides: who took a lease, and whose it was."""

from __future__ import annotations

from typing import Any

import pytest

from agent_program.ids import ProgramId
from agent_program.turn import TurnHints
from engine_replicas.config import SchedulingSettings
from engine_replicas.policies import named_policies, new_estimates
from engine_replicas.retention.controller import RetentionController
from engine_replicas.retention.events import FinishedTurn, HeldKv, TurnEnding
from engine_replicas.retention.lease import LeaseEndReason
from engine_replicas.retention.prefill_cost import PrefillStep
from engine_replicas.retention.reclaim import WaitingNeed

ALICE, BOB = ProgramId("alice"), ProgramId("bob")


def engine(preset: str) -> RetentionController:
    """Alice has been away for 4 s, with 10 blocks of 16 tokens that take 0.16 s to compute; Bob's turn waits."""
    settings = SchedulingSettings.model_validate({"preset": preset})
    estimates = new_estimates(settings, step_tokens_max=512, kv_tokens_total=1600)
    estimates.prefill.step_ran(PrefillStep(tokens=160, pairs=160 * 80, duration_s=0.16))
    for tokens in range(100, 1000, 50):
        estimates.decode.step_ran(tokens, 0.01 + 1e-5 * tokens)
    deciding = named_policies(settings, estimates)
    controller = RetentionController(
        settings=settings,
        policy=deciding.retention,
        estimates=estimates,
        blocks_total=100,
        reclaiming=deciding.reclaiming,
    )
    controller.turn_arrived("a", TurnHints(program_id=ALICE), 0.0)
    controller.turn_scheduled("a", 0, 0.0)
    held = HeldKv(blocks=frozenset(range(10)), tokens=160)
    controller.turn_finished(
        FinishedTurn(turn_id="a", ending=TurnEnding.ENDED, context_tokens=160, collect=lambda: held), 1.0
    )
    controller.turn_arrived("b", TurnHints(program_id=BOB), 5.0)
    return controller


def last(controller: RetentionController, program: ProgramId) -> dict[str, Any]:
    decision: dict[str, Any] = controller.explain(program, 5.0)["decisions"][-1]
    return decision


def test_a_lease_says_what_it_is_worth() -> None:
    (lease,) = engine("adaptive").explain(ALICE, 5.0)["leases"]
    # Away for 4 s: hazard 1/4. Worth 0.25 · 0.16 s a second, a tenth of it for each block.
    assert lease["hazard_per_s"] == 0.25
    assert lease["benefit_s"] == pytest.approx(0.16)
    assert (lease["value_rate"], lease["per_block"]) == (pytest.approx(0.04), pytest.approx(0.004))


def test_an_outbid_lease_is_explained_on_both_sides() -> None:
    controller = engine("adaptive")
    need = WaitingNeed(blocks_missing=10, own_tokens=400, running_tokens=500)
    (end,) = controller.outbid("b", need, 5.0)
    assert end.reason is LeaseEndReason.OUTBID
    taken, lost = last(controller, BOB), last(controller, ALICE)
    assert (taken["event"], taken["victims"], taken["leases"], taken["blocks"]) == ("leases_taken", [ALICE], 1, 10)
    assert taken["offered_rate"] > taken["prices"][0]["value_rate"] == pytest.approx(0.04)
    assert (lost["event"], lost["reason"]) == ("lease_ended", "outbid")
    assert lost["value_rate"] == taken["prices"][0]["value_rate"]


def test_a_lease_that_a_running_turn_needs_is_explained_without_an_offer() -> None:
    controller = engine("adaptive")
    controller.reclaim("b", LeaseEndReason.RUNNING_TURN_NEEDS_BLOCKS, 5.0)
    taken = last(controller, BOB)
    assert taken["prices"][0]["hazard_per_s"] == 0.25
    assert "offered_rate" not in taken


def test_leases_without_a_price_have_none_in_their_explanation() -> None:
    controller = engine("continuum")
    controller.reclaim("b", LeaseEndReason.NOTHING_RUNS, 5.0)
    assert last(controller, BOB)["victims"] == [ALICE]
    assert "prices" not in last(controller, BOB)
    assert "per_block" not in last(controller, ALICE)

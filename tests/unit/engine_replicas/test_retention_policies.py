"""How long each policy retains KV, and what it says about why."""

import math

import pytest

from agent_program.ids import ToolKey
from engine_replicas.retention.decode_cost import DecodeCost
from engine_replicas.retention.eta import EtaEstimator
from engine_replicas.retention.policy import (
    Continuum,
    DecisionReason,
    EndedTurn,
    EndOfTurn,
    Estimates,
    StaticTtl,
)
from engine_replicas.retention.prefill_cost import PrefillCost, PrefillStep
from engine_replicas.retention.queueing_delay import QueueingDelay
from engine_replicas.retention.reload_cost import ReloadCost
from engine_replicas.retention.tool_latency import ToolLatencyView

PYTEST, GIT = ToolKey("pytest"), ToolKey("git")
TURN = EndedTurn(tool=PYTEST, context_tokens=1000)


def estimates(*, delay_s: float = 0.0, reload_s_per_1k: float = 0.0, lengths: tuple[int, ...] = ()) -> Estimates:
    known = Estimates(
        tools=ToolLatencyView(window=1000, tools_max=100),
        queueing_delay=QueueingDelay(window=10),
        eta=EtaEstimator(window=100, programs_min=2),
        prefill=(prefill := PrefillCost(chunk_tokens_max=1_000_000)),
        reload=ReloadCost(prefill, kv_tokens_total=100_000),
        decode=DecodeCost(),
    )
    if delay_s:
        known.queueing_delay.evicted_turn_waited(delay_s)
    if reload_s_per_1k:
        known.prefill.step_ran(PrefillStep(tokens=1000, pairs=1, duration_s=reload_s_per_1k))
    for turns in lengths:
        known.eta.program_finished(turns)
    return known


def test_stock_retains_nothing() -> None:
    assert EndOfTurn().decide(TURN).ttl_s == 0.0


def test_static_grants_the_same_to_every_turn() -> None:
    decision = StaticTtl(2.5).decide(TURN)
    assert (decision.ttl_s, decision.reason) == (2.5, DecisionReason.STATIC)


def test_only_a_policy_that_looks_at_tools_waits_for_them() -> None:
    policies = (EndOfTurn(), StaticTtl(1.0), Continuum(estimates(), k_cold_start=100))
    assert [policy.depends_on_tool for policy in policies] == [False, False, True]


def test_a_cold_continuum_grants_the_logarithm_of_what_is_saved() -> None:
    # T = 6 s, PrefillReload = 1.389 s: B = 7.389 = e², so the TTL is 2 s.
    decision = Continuum(estimates(delay_s=6.0, reload_s_per_1k=math.e**2 - 6.0), k_cold_start=100).decide(TURN)
    assert decision.ttl_s == pytest.approx(2.0)
    assert decision.reason is DecisionReason.COLD_START


def test_at_start_up_nothing_is_retained_because_nothing_is_known_to_be_saved() -> None:
    assert Continuum(estimates(), k_cold_start=100).decide(TURN).ttl_s == 0.0


def test_up_to_k_durations_the_global_history_is_not_trusted() -> None:
    known = estimates(delay_s=10.0)
    policy = Continuum(known, k_cold_start=3)
    for _ in range(3):
        known.tools.add_wait(None, 0.5)
    assert policy.decide(TURN).reason is DecisionReason.COLD_START
    known.tools.add_wait(None, 0.5)
    decision = policy.decide(TURN)
    # B = 10: P(0.5)·10 − 0.5 is the maximum.
    assert (decision.ttl_s, decision.reason) == (0.5, DecisionReason.GLOBAL_HISTORY)


def test_beyond_k_durations_of_its_own_a_tool_stands_for_itself() -> None:
    known = estimates(delay_s=10.0)
    policy = Continuum(known, k_cold_start=3)
    for _ in range(10):
        known.tools.add_wait(GIT, 0.1)
    for _ in range(3):
        known.tools.add_wait(PYTEST, 4.0)
    # 10 of 13 return within 0.1 s: 10/13·10 − 0.1 = 7.6 against 10 − 4 = 6.
    assert policy.decide(TURN).ttl_s == 0.1
    known.tools.add_wait(PYTEST, 4.0)
    decision = policy.decide(TURN)
    assert (decision.ttl_s, decision.reason, decision.samples) == (4.0, DecisionReason.TOOL_HISTORY, 4)


def test_a_turn_whose_tool_is_unknown_is_judged_by_all_tools() -> None:
    known = estimates(delay_s=10.0)
    for _ in range(5):
        known.tools.add_wait(PYTEST, 1.0)
    decision = Continuum(known, k_cold_start=3).decide(EndedTurn(tool=None, context_tokens=1000))
    assert decision.reason is DecisionReason.GLOBAL_HISTORY


def test_eta_scales_the_queueing_delay_and_not_the_reload() -> None:
    # Lengths 2 and 4: pairs (1,1), (1,3), (2,2), (3,1) → Corr = −5/11, eta = 5/11.
    known = estimates(delay_s=11.0, reload_s_per_1k=2.0, lengths=(2, 4))
    for _ in range(5):
        known.tools.add_wait(PYTEST, 1.0)
    decision = Continuum(known, k_cold_start=3).decide(TURN)
    assert decision.eta == pytest.approx(5 / 11)
    assert decision.benefit_s == pytest.approx(11.0 * 5 / 11 + 2.0)


def test_a_decision_names_its_inputs() -> None:
    known = estimates(delay_s=6.0, reload_s_per_1k=1.0)
    decision = Continuum(known, k_cold_start=100).decide(TURN)
    assert (decision.queueing_delay_s, decision.prefill_reload_s, decision.benefit_s) == (6.0, 1.0, 7.0)
    assert decision.samples == 0

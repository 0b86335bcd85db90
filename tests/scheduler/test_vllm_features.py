"""vLLM's own features beside leases and queues of ours, for the paper's preset and for the one that hides turns from a step."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from vllm.config import SpeculativeConfig
from vllm.config.lora import LoRAConfig
from vllm.lora.request import LoRARequest
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.request import RequestStatus

from support.engine_core import SchedulerHarness, full_attention, prompt, sliding_window

Build = Callable[..., SchedulerHarness]

#: Shares so large that one program may hold the pool: what is looked at here is not the caps.
OPEN = {
    "retained_fraction_max": 1.0,
    "program_retained_fraction_max": 1.0,
    "tenant_retained_fraction_max": 1.0,
    "provisional_ttl_s": 50.0,
}
PRESETS = [
    {"preset": "continuum", **OPEN},
    {"preset": "adaptive", **OPEN},
    # Holds back every first turn that it can.
    {"preset": "adaptive", **OPEN, "admission_fraction": 0.05, "lane_fraction": 0.0},
]
both = pytest.mark.parametrize("settings", PRESETS, ids=["continuum", "adaptive", "adaptive_strict"])


def is_whole(engine: SchedulerHarness) -> None:
    """With every lease over the pool is whole, and nothing is left behind."""
    engine.scheduler.reset_prefix_cache()
    stats = engine.stats()
    assert engine.free_blocks == engine.total_blocks
    assert (stats["live_turns"], stats["live_leases"], stats["running"], stats["waiting"]) == (0, 0, 0, 0)
    assert not engine.scheduler.requests
    assert not engine.scheduler.deferred_waiting


def answers_of(engine: SchedulerHarness, **first: Any) -> dict[str, list[int]]:
    """Six programs of two turns on a pool that holds two of them, and what they answered."""
    for index in range(6):
        engine.submit(f"p{index}-1", prompt(index, 150), program=f"p{index}", output_tokens=40, **first)
    contexts: dict[int, list[int]] = {}
    for _ in range(4000):
        if not engine.scheduler.has_requests():
            break
        engine.step()
        for index in range(6):
            if index not in contexts and f"p{index}-1" not in engine.scheduler.requests:
                contexts[index] = [*prompt(index, 150), *engine.outputs[f"p{index}-1"]]
                engine.submit(f"p{index}-2", contexts[index] + prompt(9, 20), program=f"p{index}", output_tokens=30)
    engine.run()
    assert {len(engine.outputs[f"p{index}-2"]) for index in range(6)} == {30}
    return dict(engine.outputs)


# --- speculative decoding -------------------------------------------------------------------------------------------------


def speculating(tokens: int) -> dict[str, Any]:
    return {
        "speculative_config": SpeculativeConfig(
            model="ngram", num_speculative_tokens=tokens, prompt_lookup_max=tokens, prompt_lookup_min=1
        )
    }


@both
def test_drafts_change_no_answer_and_leave_no_block_behind(engine: Build, settings: dict[str, Any]) -> None:
    pool = {"blocks": 30, "step_tokens_max": 128}
    plain = engine(**settings, pool=pool)
    drafting = engine(**settings, pool={**pool, "vllm": speculating(3)})
    assert answers_of(drafting) == answers_of(plain)
    is_whole(drafting)


@both
def test_a_turn_that_ended_on_accepted_drafts_is_found_again(engine: Build, settings: dict[str, Any]) -> None:
    drafting = engine(**settings, pool={"blocks": 60, "vllm": speculating(3)})
    context = drafting.run_turn("a1", prompt(1, 160), program="a", output_tokens=50)
    drafting.run_turn("a2", context + prompt(2, 20), program="a")
    # All but the last token has KV, in blocks of 16: 209 tokens are 13 blocks. What is hashed late costs at most one.
    assert drafting.hits["a2"] in (192, 208)
    is_whole(drafting)


# --- LoRA -----------------------------------------------------------------------------------------------------------------


def adapter(number: int) -> dict[str, Any]:
    return {"lora_request": LoRARequest(f"adapter-{number}", number, "/nowhere")}


ONE_ADAPTER = {"lora_config": LoRAConfig(max_loras=1, max_lora_rank=8)}


@both
def test_with_one_adapter_at_a_time_programs_of_two_adapters_all_end(engine: Build, settings: dict[str, Any]) -> None:
    adapting = engine(**settings, pool={"blocks": 40, "vllm": ONE_ADAPTER})
    for index in range(8):
        adapting.submit(
            f"p{index}", prompt(index, 60), program=f"p{index}", output_tokens=20, request=adapter(1 + index % 2)
        )
    adapting.run()
    assert {len(answer) for answer in adapting.outputs.values()} == {20}
    is_whole(adapting)


@both
def test_a_program_finds_its_kv_under_its_own_adapter_only(engine: Build, settings: dict[str, Any]) -> None:
    adapting = engine(**settings, pool={"blocks": 60, "vllm": ONE_ADAPTER})
    context = adapting.run_turn("a1", prompt(1, 160), program="a", request=adapter(1))
    adapting.run_turn("other", context + prompt(2, 5), program="b", request=adapter(2))
    adapting.run_turn("a2", context + prompt(2, 5), program="a", request=adapter(1))
    assert (adapting.hits["other"], adapting.hits["a2"]) == (0, 160)


# --- structured output ----------------------------------------------------------------------------------------------------


class AnyToken:
    """A grammar that allows everything, and counts."""

    def __init__(self) -> None:
        self.accepted = 0

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        self.accepted += len(tokens)
        return True

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        return tokens

    def is_terminated(self) -> bool:
        return False


def constrained() -> dict[str, Any]:
    return {"sampling": {"structured_outputs": StructuredOutputsParams(regex="[a-z]*")}}


@both
def test_turns_whose_grammar_is_not_ready_wait_and_hold_nobody_up(engine: Build, settings: dict[str, Any]) -> None:
    built = engine(**settings, pool={"blocks": 60})
    waiting = built.submit("a1", prompt(1, 100), program="a", output_tokens=5, **constrained())
    grammar: Future[AnyToken] = Future()
    waiting.structured_output_request.grammar = grammar
    built.submit("b1", prompt(2, 100), program="b", output_tokens=30)
    built.run(lambda: len(built.outputs["b1"]) == 30)
    assert built.first_scheduled == ["b1"]
    ready = AnyToken()
    grammar.set_result(ready)
    built.run()
    assert (len(built.outputs["a1"]), ready.accepted) == (5, 5)
    is_whole(built)


@both
def test_a_grammar_that_does_not_compile_fails_its_turn_though_something_runs(
    engine: Build, settings: dict[str, Any]
) -> None:
    built = engine(**settings, pool={"blocks": 60})
    built.submit("busy", prompt(2, 300), program="b", output_tokens=200)
    for _ in range(3):
        built.step()
    broken: Future[AnyToken] = Future()
    broken.set_exception(ValueError("no such grammar"))
    turn = built.submit("a1", prompt(1, 100), program="a", output_tokens=5, **constrained())
    turn.structured_output_request.grammar = broken
    for _ in range(5):
        built.step()
    assert "busy" in built.scheduler.requests
    assert turn.status == RequestStatus.FINISHED_ERROR
    built.run()
    is_whole(built)


# --- parallel samples, overlapping and resumed ids ------------------------------------------------------------------------


@both
def test_parallel_samples_of_one_turn_leave_one_lease(engine: Build, settings: dict[str, Any]) -> None:
    built = engine(**settings, pool={"blocks": 80})
    # vLLM makes a request of each sample, under one session id.
    for sample in range(3):
        built.submit(f"{sample}_a1", prompt(1, 160), program="a", output_tokens=20 + sample)
    built.run()
    assert built.stats()["live_leases"] == 1
    assert built.stats()["retained_blocks"] == 11  # 160 + 21 tokens of the last to end
    is_whole(built)


@both
def test_branches_of_one_program_keep_a_lease_each(engine: Build, settings: dict[str, Any]) -> None:
    built = engine(**settings, pool={"blocks": 80})
    for branch in "012":
        built.submit(f"a{branch}", prompt(int(branch), 96), program="a", branch=branch, output_tokens=8)
    built.run()
    assert built.stats()["live_leases"] == 3
    built.scheduler.continuum_release("a")
    assert built.free_blocks == built.total_blocks


@both
def test_a_program_id_comes_back_after_its_program_ended(engine: Build, settings: dict[str, Any]) -> None:
    built = engine(**settings, pool={"blocks": 60})
    built.run_turn("a1", prompt(1, 96), program="a", is_last_turn=True)
    assert built.stats()["live_leases"] == 0
    built.run_turn("a2", prompt(2, 96), program="a")
    assert built.stats()["live_leases"] == 1
    is_whole(built)


# --- resumable requests ---------------------------------------------------------------------------------------------------


@both
def test_a_resumable_session_runs_through_beside_programs(engine: Build, settings: dict[str, Any]) -> None:
    built = engine(**settings, pool={"blocks": 60})
    streaming = {"request": {"resumable": True}}
    built.submit("s", prompt(1, 60), program="s", output_tokens=5, **streaming)
    for index in range(4):
        built.submit(f"p{index}", prompt(10 + index, 150), program=f"p{index}", output_tokens=40)
    built.run(lambda: len(built.outputs["s"]) == 5)
    for chunk in range(3):
        built.submit("s", prompt(2 + chunk, 30), program="s", output_tokens=5, **streaming)
        built.run(lambda: len(built.outputs["s"]) == 5 * (chunk + 2))  # noqa: B023
    built.run(lambda: set(built.scheduler.requests) == {"s"})
    built.submit("s", [], program="s", output_tokens=1, request={"resumable": False})
    built.run()
    assert {len(built.outputs[f"p{index}"]) for index in range(4)} == {40}
    is_whole(built)


# --- several kinds of KV --------------------------------------------------------------------------------------------------


def state(block_size: int) -> MambaSpec:
    return MambaSpec(
        block_size=block_size, shapes=((1,),), dtypes=(torch.float32,), mamba_cache_mode="all", tokens_per_state=-1
    )


GROUPS = {
    "full": lambda: [full_attention(16)],
    "window": lambda: [full_attention(16), sliding_window(16, 64)],
    "state": lambda: [full_attention(16), state(16)],
}


@both
@pytest.mark.parametrize("groups", GROUPS)
def test_every_kind_of_kv_is_held_as_far_as_the_next_turn_finds_it(
    engine: Build, settings: dict[str, Any], groups: str
) -> None:
    built = engine(**settings, pool={"blocks": 120, "specs": GROUPS[groups]()})
    context = built.run_turn("a1", prompt(1, 160), program="a", output_tokens=49)
    (lease,) = built.scheduler.continuum_explain("a")["leases"]
    assert lease["tokens"] in (192, 208)
    built.run_turn("a2", context + prompt(2, 20), program="a")
    assert built.hits["a2"] == lease["tokens"]
    is_whole(built)


@both
@pytest.mark.parametrize("groups", ["window", "state"])
def test_pressure_on_several_kinds_of_kv_loses_nobody(engine: Build, settings: dict[str, Any], groups: str) -> None:
    built = engine(**settings, pool={"blocks": 70, "specs": GROUPS[groups](), "step_tokens_max": 96})
    answers_of(built)
    is_whole(built)


# --- ends of turns, pauses, cancels ---------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("step_tokens", [16, 48, 512])
def test_chunks_of_any_size_give_the_same_answers(engine: Build, settings: dict[str, Any], step_tokens: int) -> None:
    chunked = engine(**settings, pool={"blocks": 30, "step_tokens_max": step_tokens})
    stock = engine(is_stock=True, pool={"blocks": 200})
    answers = answers_of(chunked)
    is_whole(chunked)
    for index in range(6):
        alone = stock.run_turn(f"p{index}-1", prompt(index, 150), output_tokens=40)
        assert answers[f"p{index}-1"] == alone[150:]


@both
def test_under_vllms_priorities_nobody_is_hidden_and_priority_decides(engine: Build, settings: dict[str, Any]) -> None:
    built = engine(**settings, pool={"blocks": 40, "policy": "priority", "max_num_seqs": 1})
    built.submit("busy", prompt(9, 100), program="x", output_tokens=10)
    built.step()
    for number in (3, 1, 2):
        built.submit(f"p{number}", prompt(number, 100), program=f"p{number}", priority=number)
    built.run()
    assert built.first_scheduled == ["busy", "p1", "p2", "p3"]
    is_whole(built)


@both
def test_turns_that_are_held_back_count_as_waiting_whenever_they_are_counted(
    engine: Build, settings: dict[str, Any]
) -> None:
    built = engine(**settings, pool={"blocks": 60})
    built.submit("busy", prompt(1, 300), program="busy", output_tokens=50)
    built.step()
    for index in range(5):
        built.submit(f"p{index}", prompt(2 + index, 300), program=f"p{index}")
    for _ in range(10):
        built.step()
        stats = built.scheduler.make_stats()
        assert stats is not None
        assert stats.num_running_reqs + stats.num_waiting_reqs + stats.num_skipped_waiting_reqs == len(
            built.scheduler.requests
        )
        assert sum(built.scheduler.get_request_counts()) == len(built.scheduler.requests)
        assert built.scheduler.get_num_unfinished_requests() == len(built.scheduler.requests)
    built.run()
    is_whole(built)


@both
def test_every_waiting_turn_can_be_cancelled_in_any_step(engine: Build, settings: dict[str, Any]) -> None:
    built = engine(**settings, pool={"blocks": 40, "max_num_seqs": 4})
    for index in range(12):
        built.submit(f"p{index}", prompt(index, 100 + 20 * index), program=f"p{index}", output_tokens=20)
    for index in (3, 11, 0, 7, 5):
        built.step()
        built.abort(f"p{index}")
    built.run()
    finished = {name for name, answer in built.outputs.items() if len(answer) == 20}
    assert finished >= {f"p{index}" for index in (1, 2, 4, 6, 8, 9, 10)}
    is_whole(built)


@both
@pytest.mark.parametrize("state", [PauseState.PAUSED_NEW, PauseState.PAUSED_ALL])
def test_a_pause_in_the_middle_of_a_crowd_ends_where_it_began(
    engine: Build, settings: dict[str, Any], state: PauseState
) -> None:
    built = engine(**settings, pool={"blocks": 40, "max_num_seqs": 4})
    for index in range(8):
        built.submit(f"p{index}", prompt(index, 120), program=f"p{index}", output_tokens=30)
    for _ in range(8):
        built.step()
    built.scheduler.set_pause_state(state)
    for _ in range(5):
        built.step()
    assert built.stats()["live_leases"] == 0
    built.scheduler.set_pause_state(PauseState.UNPAUSED)
    built.run()
    assert {len(answer) for answer in built.outputs.values()} == {30}
    is_whole(built)


@both
def test_a_weight_update_in_the_middle_of_a_crowd_loses_nobody(engine: Build, settings: dict[str, Any]) -> None:
    built = engine(**settings, pool={"blocks": 40, "max_num_seqs": 4})
    for index in range(8):
        built.submit(f"p{index}", prompt(index, 120), program=f"p{index}", output_tokens=30)
    for _ in range(5):
        for _ in range(6):
            built.step()
        assert built.scheduler.reset_prefix_cache(reset_running_requests=True)
    built.run()
    assert {len(answer) for answer in built.outputs.values()} == {30}
    is_whole(built)


@both
def test_sleep_pauses_empties_and_wakes(engine: Build, settings: dict[str, Any]) -> None:
    # The steps of vLLM's `EngineCore.sleep` and `wake_up` that reach a scheduler.
    built = engine(**settings, pool={"blocks": 60})
    context = built.run_turn("a1", prompt(1, 160), program="a")
    built.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    built.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    assert built.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    assert built.free_blocks == built.total_blocks
    built.submit("a2", context + prompt(2, 20), program="a")
    for _ in range(3):
        built.step()
    assert built.first_scheduled == ["a1"]
    built.scheduler.set_pause_state(PauseState.UNPAUSED)
    built.run()
    assert built.hits["a2"] == 0
    is_whole(built)


@both
def test_a_turn_that_vllm_fails_is_not_retained(engine: Build, settings: dict[str, Any]) -> None:
    built = engine(**settings, pool={"blocks": 60})
    built.submit("a1", prompt(1, 160), program="a", output_tokens=50)
    built.run(lambda: len(built.outputs["a1"]) > 10)
    built.scheduler.finish_requests("a1", RequestStatus.FINISHED_ERROR)
    built.run()
    assert built.stats()["live_leases"] == 0
    is_whole(built)


@both
def test_a_turn_that_reached_its_token_limit_is_retained_and_one_that_reached_the_models_is_not(
    engine: Build, settings: dict[str, Any]
) -> None:
    built = engine(**settings, pool={"blocks": 80, "max_model_len": 200})
    built.run_turn("a1", prompt(1, 100), program="a", output_tokens=20)
    assert built.stats()["live_leases"] == 1
    built.run_turn("b1", prompt(2, 150), program="b", output_tokens=400)
    assert built.stats()["live_leases"] == 1
    is_whole(built)


@both
def test_a_stop_string_ends_a_turn_from_outside_and_its_kv_waits_for_the_replica(
    engine: Build, settings: dict[str, Any]
) -> None:
    built = engine(**settings, pool={"blocks": 60})
    built.submit("a1", prompt(1, 160), program="a", output_tokens=50, stop=["\n"])
    built.run(lambda: len(built.outputs["a1"]) > 10)
    built.abort("a1")
    built.run()
    assert built.stats()["live_leases"] == 1
    built.clock.advance(60)
    built.stats()
    assert built.free_blocks == built.total_blocks


@both
def test_requests_without_ids_are_served_among_programs(engine: Build, settings: dict[str, Any]) -> None:
    built = engine(**settings, pool={"blocks": 40, "max_num_seqs": 3})
    for index in range(10):
        name = None if index % 2 else f"p{index}"
        built.submit(f"r{index}", prompt(index, 150), program=name, output_tokens=20)
    built.run()
    assert {len(answer) for answer in built.outputs.values()} == {20}
    assert built.stats()["programs"] == 5
    is_whole(built)


# --- nobody waits for ever ------------------------------------------------------------------------------------------------


@both
def test_a_large_newcomer_starts_though_others_never_stop_coming_back(engine: Build, settings: dict[str, Any]) -> None:
    patience = {"admission_wait_max_s": 5.0, "backfill_wait_max_s": 5.0, "turn_wait_max_s": 20.0}
    built = engine(**{**settings, **patience, "provisional_ttl_s": 1.5}, pool={"blocks": 40, "step_tokens_max": 128})
    turns = dict.fromkeys("abcd", 0)
    contexts = {name: prompt(ord(name), 100) for name in turns}
    built.submit("large", prompt(1, 560), program="large", output_tokens=10)
    started_s = built.clock.now_s()
    while "large" not in built.first_scheduled:
        for name in turns:
            if f"{name}-{turns[name]}" not in built.scheduler.requests:
                turns[name] += 1
                # Contexts stay small, and there is always one more turn.
                context = contexts[name] + prompt(turns[name], 20)
                built.submit(f"{name}-{turns[name]}", context, program=name, output_tokens=30)
        built.step()
        assert built.clock.now_s() - started_s < 60
    built.run()
    assert len(built.outputs["large"]) == 10
    is_whole(built)

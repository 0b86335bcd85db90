"""vLLM's own host-memory manager with our cache policy: the KV of programs that ended leaves first."""

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from agent_program.ids import ProgramId
from engine_replicas.vllm_host_tier import EndedProgramsFirst, policies_of

MODULE = "engine_replicas.vllm_host_tier"
A, B, C = ProgramId("a"), ProgramId("b"), ProgramId("c")


def key(name: str) -> OffloadKey:
    return make_offload_key(name.encode().ljust(32, b"."), 0)


class HostTier:
    """vLLM's manager of six chunks, as its connector drives it."""

    def __init__(self, policy: str = "EndedProgramsFirst", chunks: int = 6) -> None:
        module = MODULE if policy == "EndedProgramsFirst" else None
        self.manager = CPUOffloadingManager(chunks, cache_policy=policy, cache_policy_module_path=module)
        (self.policy,) = policies_of(self.connector) or (None,)
        self._turns = 0

    @property
    def connector(self) -> SimpleNamespace:
        return SimpleNamespace(connector_scheduler=SimpleNamespace(manager=self.manager))

    def turn(
        self,
        program: ProgramId | None,
        stores: Sequence[str],
        *,
        found_on_gpu: Sequence[str] = (),
        ends_program: bool = False,
    ) -> None:
        """A turn that stores these chunks behind those it found on the GPU, and finishes."""
        self._turns += 1
        context = ReqContext(req_id=f"r{self._turns}")
        self.manager.on_new_request(context)
        if self.policy is not None and program is not None:
            self.policy.turn_arrived(context.req_id, program)
        for position, name in enumerate([*found_on_gpu, *stores]):
            context.set_offload_key_position(key(name), 16 * (position + 1))
        keys = [key(name) for name in stores]
        prepared = self.manager.prepare_store(keys, context)
        assert prepared is not None
        self.manager.complete_store(prepared.keys_to_store, context)
        if ends_program and self.policy is not None:
            assert program is not None
            self.policy.program_ended(program)
        self.manager.on_request_finished(context)

    def holds(self, *names: str) -> list[str]:
        context = ReqContext(req_id="look")
        return [name for name in names if self.manager.lookup(key(name), context) is LookupResult.HIT]


def test_stock_lru_drops_the_paused_program_and_keeps_the_ended_one() -> None:
    tier = HostTier("lru")
    tier.turn(A, ["a1", "a2", "a3"])
    tier.turn(B, ["b1", "b2", "b3"])
    tier.turn(C, ["c1", "c2"])
    assert tier.holds("a1", "a2", "a3", "b1", "b2", "b3") == ["a1", "b1", "b2", "b3"]


def test_the_kv_of_a_program_that_ended_leaves_first_its_end_before_its_start() -> None:
    tier = HostTier()
    tier.turn(A, ["a1", "a2", "a3"])
    tier.turn(B, ["b1", "b2", "b3"])
    tier.policy.program_ended(B)
    tier.turn(C, ["c1", "c2"])
    assert tier.holds("a1", "a2", "a3", "b1", "b2", "b3") == ["a1", "a2", "a3", "b1"]


def test_the_last_turn_of_a_program_is_dead_from_the_start() -> None:
    tier = HostTier()
    tier.turn(A, ["a1", "a2", "a3"])
    tier.turn(B, ["b1", "b2", "b3"], ends_program=True)
    tier.turn(C, ["c1", "c2", "c3"])
    assert tier.holds("a1", "a2", "a3", "b1", "b2", "b3") == ["a1", "a2", "a3"]


def test_programs_that_ended_leave_in_the_order_in_which_they_ended() -> None:
    tier = HostTier()
    for program in (A, B, C):
        tier.turn(program, [f"{program}1", f"{program}2"])
    tier.policy.program_ended(B)
    tier.policy.program_ended(A)
    tier.turn(None, ["x1", "x2", "x3"])
    assert tier.holds("a1", "a2", "b1", "b2", "c1", "c2") == ["a1", "c1", "c2"]


def test_a_shared_prefix_outlives_the_program_that_stored_it() -> None:
    tier = HostTier()
    tier.turn(A, ["system", "a1"])
    tier.turn(B, ["b1", "b2"], found_on_gpu=["system"])
    tier.turn(C, ["c1"])
    tier.policy.program_ended(A)
    tier.turn(None, ["x1", "x2"])
    assert tier.holds("system", "a1") == ["system"]


def test_a_dead_chunk_that_somebody_uses_after_all_lives_again() -> None:
    tier = HostTier()
    tier.turn(A, ["a1", "a2", "a3"])
    tier.turn(B, ["b1", "b2"])
    tier.policy.program_ended(A)
    tier.turn(A, ["a1", "a2", "a3", "a4"])
    tier.turn(C, ["c1", "c2"])
    assert tier.holds("a1", "a2", "a3", "a4") == ["a1", "a2", "a3", "a4"]


def test_what_is_being_loaded_is_not_evicted_however_dead_it_is() -> None:
    tier = HostTier()
    tier.turn(A, ["a1", "a2", "a3"])
    tier.turn(B, ["b1", "b2", "b3"])
    loading = ReqContext(req_id="loading")
    tier.manager.on_new_request(loading)
    tier.manager.prepare_load([key("b1"), key("b2")], loading)
    tier.policy.program_ended(B)
    tier.turn(C, ["c1", "c2"])
    assert tier.holds("b1", "b2", "b3") == ["b1", "b2"]
    tier.manager.complete_load([key("b1"), key("b2")], loading)
    tier.turn(C, ["c3", "c4"])
    assert tier.holds("a1", "b1", "b2") == ["a1"]


def test_an_emptied_tier_forgets_who_owned_what() -> None:
    tier = HostTier()
    tier.turn(A, ["a1", "a2"])
    tier.manager.reset_cache()
    tier.policy.program_ended(A)
    tier.turn(B, ["b1"])
    assert tier.holds("a1", "b1") == ["b1"]


@pytest.mark.parametrize("seed", range(20))
def test_without_programs_it_is_vllms_policy(seed: int) -> None:
    import random

    rng = random.Random(seed)
    ours, stock = HostTier(chunks=8), HostTier("lru", chunks=8)
    names = [f"n{number}" for number in range(20)]
    for _ in range(60):
        stores = rng.sample(names, rng.randint(1, 4))
        ours.turn(None, stores)
        stock.turn(None, stores)
        assert ours.holds(*names) == stock.holds(*names)


def test_the_policy_is_found_in_a_connector_of_several() -> None:
    tier = HostTier()
    several = SimpleNamespace(sub_connectors=[SimpleNamespace(connector_scheduler=None), tier.connector])
    assert policies_of(several) == [tier.policy]
    assert isinstance(tier.policy, EndedProgramsFirst)
    assert policies_of(HostTier("lru").connector) == []
    assert policies_of(None) == []

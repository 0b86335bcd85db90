"""A cache policy for vLLM's offloading connector: the KV of programs that have ended leaves host memory first.

It is vLLM's least-recently-used policy but for one thing: when a program ends, the chunks that only it has used become older
than everything else (`host_tier.py`). Named in the connector's settings, it needs no change to vLLM:

    --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {
        "cpu_bytes_to_use": 200000000000, "offload_prompt_only": false,
        "eviction_policy": "EndedProgramsFirst", "cache_policy_module_path": "engine_replicas.vllm_host_tier"}}'

The connector tells its policy about requests and not about programs, so the scheduler, which lives in the same process, does:
`policies_of` finds the policy in the scheduler's connector.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from vllm.v1.kv_offload.base import OffloadKey, ReqContext
from vllm.v1.kv_offload.cpu.policies.base import ChunkStatus
from vllm.v1.kv_offload.cpu.policies.lru import LRUCachePolicy

from agent_program.ids import ProgramId
from engine_replicas.host_tier import ChunkOwners


class EndedProgramsFirst(LRUCachePolicy):
    """Least recently used, after what belongs to programs that have ended."""

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self._owners = ChunkOwners()
        #: Requests in the engine → their program; None once it has ended.
        self._turns: dict[str, ProgramId | None] = {}
        # Ranks of live chunks count up from 1; those of dead ones count up to 0, so that the longest dead go first.
        self._next_dead_rank = -(2**62)

    # --- from the scheduler ------------------------------------------------------------------------------------------------

    def turn_arrived(self, request_id: str, program_id: ProgramId) -> None:
        """A turn of the program entered the engine; it is remembered until vLLM says that the request has finished."""
        self._turns[request_id] = program_id

    def program_ended(self, program_id: ProgramId) -> None:
        """No turn of the program will come any more, whatever of it is still being stored."""
        for request_id, owner in self._turns.items():
            if owner == program_id:
                self._turns[request_id] = None
        self._age(self._owners.ended(program_id))

    # --- from vLLM ---------------------------------------------------------------------------------------------------------

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[OffloadKey]],
        insertion_only_keys: set[OffloadKey],
        reused_keys: set[OffloadKey],
        req_context: ReqContext,
    ) -> None:
        super().on_request_finished(key_groups, insertion_only_keys, reused_keys, req_context)
        is_turn = req_context.req_id in self._turns
        program_id = self._turns.pop(req_context.req_id, None)
        # What vLLM reports leaves out chunks that the turn found on the GPU; its context holds them all the same.
        context = dict.fromkeys([*req_context._offload_key_positions, *(key for keys in key_groups for key in keys)])
        present = [key for key in context if key in self.chunks]
        if is_turn and program_id is None:
            # The last turn of a program that is over: what it alone stored is dead from the start.
            self._age([key for key in reversed(present) if key in insertion_only_keys])
        else:
            self._owners.used(present, program_id)

    def evict(self, n: int, protected: set[OffloadKey]) -> list[tuple[OffloadKey, ChunkStatus]] | None:
        evicted = super().evict(n, protected)
        self._owners.gone(key for key, _ in evicted or ())
        return evicted

    def remove(self, key: OffloadKey) -> None:
        super().remove(key)
        self._owners.gone((key,))

    def clear(self) -> None:
        super().clear()
        self._owners.clear()

    def _age(self, keys: Iterable[Any]) -> None:
        """Make them older than everything that lives, in this order."""
        for key in keys:
            if key not in self.chunks:
                continue
            self._ranks[key] = self._next_dead_rank
            self._next_dead_rank += 1
            if key in self._evictable:
                self._push_evictable(key)
        self._maybe_compact_heap()


def policies_of(connector: Any) -> list[EndedProgramsFirst]:
    """The policies of this kind in a scheduler's connector, which may be a composite, or None."""
    if connector is None:
        return []
    if hasattr(connector, "sub_connectors"):
        return [policy for part in connector.sub_connectors for policy in policies_of(part)]
    manager = getattr(getattr(connector, "connector_scheduler", None), "manager", None)
    tiers = (manager, getattr(manager, "primary_tier", None))
    found = [getattr(tier, "_policy", None) for tier in tiers]
    return [policy for policy in found if isinstance(policy, EndedProgramsFirst)]

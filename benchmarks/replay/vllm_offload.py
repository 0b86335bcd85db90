"""The tiers behind vLLM's own connector interface, so that vLLM's asynchronous-load path is what runs.

The scheduler asks for tokens beyond its own hit, allocates blocks for them, parks the request in WAITING_FOR_REMOTE_KVS, and
takes it up again when the worker side reports the load done. Here the worker side is the engine of the replay, which asks
`take_done` at the end of every step.
"""

from __future__ import annotations

from typing import Any

from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

from benchmarks.replay.clock import VirtualClock
from benchmarks.replay.offload import Link, Load, Tier, TieredStore


def offload_config(tiers: tuple[Tier, ...], block_bytes: float, *, drops_ended: bool) -> KVTransferConfig:
    """vLLM's configuration of the connector below."""
    return KVTransferConfig(
        kv_connector="ReplayOffloadConnector",
        kv_connector_module_path="benchmarks.replay.vllm_offload",
        kv_role="kv_both",
        kv_connector_extra_config={
            "tiers": [
                {"name": tier.name, "capacity_bytes": tier.capacity_bytes, "bytes_per_s": tier.bytes_per_s}
                for tier in tiers
            ],
            "block_bytes": block_bytes,
            "drops_ended": drops_ended,
        },
    )


class ReplayOffloadConnector(KVConnectorBase_V1):
    """Write-through tiers with asynchronous loads, in virtual time."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._block_size = int(vllm_config.cache_config.block_size)
        self._drops_ended = bool(extra["drops_ended"])
        self.store = TieredStore([Tier(**tier) for tier in extra["tiers"]], float(extra["block_bytes"]))
        self.link = Link()
        #: Set by the engine that owns the time.
        self.clock = VirtualClock()
        self._requests: dict[str, Request] = {}
        self._stored: dict[str, int] = {}
        self._of_program: dict[str, set[bytes]] = {}

    # --- the scheduler's side of vLLM's interface ----------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        self._requests[request.request_id] = request

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        first = num_computed_tokens // self._block_size
        # The last token is always computed: its output is what the turn is for.
        last = (request.num_tokens - 1) // self._block_size
        blocks = self.store.run_length(request.block_hashes[first:last])
        return blocks * self._block_size, blocks > 0

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        if not num_external_tokens:
            return
        count = num_external_tokens // self._block_size
        # So far the request holds its local hit and, behind it, the blocks to load into.
        start = len(blocks.blocks[0]) - count
        hashes = request.block_hashes[start : start + count]
        seconds = self.store.seconds_to_load(hashes)
        self.store.store(hashes)
        self.link.start(request.request_id, tokens=num_external_tokens, seconds=seconds, now_s=self.clock.now_s())

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        for request_id in scheduler_output.num_scheduled_tokens:
            request = self._requests[request_id]
            # What earlier steps computed; this step's blocks are not filled yet.
            self._store_up_to(request, request.num_computed_tokens)
        return KVConnectorMetadata()

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._store_up_to(request, min(request.num_computed_tokens, request.num_tokens - 1))
        self._requests.pop(request.request_id, None)
        self._stored.pop(request.request_id, None)
        return False, None

    # --- for the engine of the replay ----------------------------------------------------------------------------------

    def take_done(self) -> list[Load]:
        """Loads that are done by now."""
        return self.link.take_done(self.clock.now_s())

    def program_over(self, program_id: str) -> None:
        """Forget what an ended program left, if the tier is told about programs at all."""
        hashes = self._of_program.pop(program_id, set())
        if self._drops_ended:
            self.store.drop(hashes)

    def _store_up_to(self, request: Request, tokens: int) -> None:
        done = self._stored.get(request.request_id, 0)
        full = min(tokens // self._block_size, len(request.block_hashes))
        if full > done:
            hashes = request.block_hashes[done:full]
            self.store.store(hashes)
            self._stored[request.request_id] = full
            if request.session_id:
                self._of_program.setdefault(request.session_id, set()).update(hashes)

    # --- the worker's side: nothing runs here --------------------------------------------------------------------------

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        raise NotImplementedError("the replay has no worker")

    def wait_for_layer_load(self, layer_name: str) -> None:
        raise NotImplementedError("the replay has no worker")

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        raise NotImplementedError("the replay has no worker")

    def wait_for_save(self) -> None:
        raise NotImplementedError("the replay has no worker")

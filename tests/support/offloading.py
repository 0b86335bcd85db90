"""The scheduler harness with vLLM's own offloading connector, whose worker is a double: transfers are done when their time is up.

The connector's scheduler side is real: it decides what to store, finds what a turn may load, and parks the turn until the load
is done. Only the copying is missing, which needs a GPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput

from engine_replicas.config import SchedulingSettings
from support.engine_core import SchedulerHarness

#: vLLM rounds a chunk of host memory up to this.
CHUNK_BYTES = 4096


def offloading(chunks: int, *, policy: str = "EndedProgramsFirst") -> dict[str, Any]:
    """vLLM's configuration of a host tier of so many chunks, one block each."""
    extra: dict[str, Any] = {
        "cpu_bytes_to_use": chunks * CHUNK_BYTES,
        "offload_prompt_only": False,
        "eviction_policy": policy,
    }
    if policy == "EndedProgramsFirst":
        extra["cache_policy_module_path"] = "engine_replicas.vllm_host_tier"
    return {
        "kv_transfer_config": KVTransferConfig(
            kv_connector="OffloadingConnector", kv_role="kv_both", kv_connector_extra_config=extra
        )
    }


class OffloadingHarness(SchedulerHarness):
    """A scheduler over a GPU pool and a host tier below it."""

    def __init__(
        self,
        model: Path,
        settings: SchedulingSettings | None,
        *,
        host_chunks: int,
        host_policy: str = "EndedProgramsFirst",
        load_s: float = 0.02,
        **pool: Any,
    ) -> None:
        super().__init__(model, settings, vllm=offloading(host_chunks, policy=host_policy), **pool)
        #: How long a load takes.
        self.load_s = load_s
        #: Loads that were started: turn → when.
        self.loads: dict[str, float] = {}
        self._loading: dict[int, tuple[str, float]] = {}

    def _transfers(self, output: SchedulerOutput) -> KVConnectorOutput | None:
        now_s = self.clock.now_s()
        meta: Any = output.kv_connector_metadata
        done = OffloadingWorkerMetadata()
        for job_id in meta.store_jobs:
            done.mark_completed(job_id)
        for job_id, job in meta.load_jobs.items():
            self._loading[job_id] = (job.req_id, now_s + self.load_s)
            self.loads[job.req_id] = now_s
        if self._loading and not output.total_num_scheduled_tokens:
            # Nothing computes, so time passes with the copying.
            self.clock.advance(max(0.0, min(ends_s for _, ends_s in self._loading.values()) - now_s))
        flushed = meta.jobs_to_flush or set()
        ready = [job for job, (_, ends_s) in self._loading.items() if ends_s <= self.clock.now_s() or job in flushed]
        received = set()
        for job_id in ready:
            done.mark_completed(job_id)
            received.add(self._loading.pop(job_id)[0])
        if not done.completed_jobs:
            return None
        return KVConnectorOutput(finished_recving=received or None, kv_connector_worker_meta=done)

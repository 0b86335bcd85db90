"""Settings of the engine half: which model, how much memory, which parsers, how long a turn may take.

What is None is left to vLLM, except where the sentence says otherwise. Unknown keys are an error.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

EMBEDDED_MODEL = "embedded"
EMBEDDED_SERVED_NAME = "smollm2-135m-instruct"
EMBEDDED_CONTEXT_MAX = 8192
#: vLLM's CPU attention kernels want blocks of a multiple of this; its default there is 128.
CPU_BLOCK_SIZE = 32

#: Arguments of vLLM that other settings, or the platform itself, decide.
_OWNED_ENGINE_ARGS = frozenset(
    {
        "additional_config",
        "async_scheduling",
        "block_size",
        "chat_template",
        "distributed_executor_backend",
        "enable_prefix_caching",
        "enforce_eager",
        "kv_cache_memory_bytes",
        "max_model_len",
        "max_num_batched_tokens",
        "max_num_seqs",
        "model",
        "num_gpu_blocks_override",
        "scheduler_cls",
        "seed",
        "served_model_name",
        "tensor_parallel_size",
    }
)


class Device(StrEnum):
    """What the engine computes on."""

    CPU = "cpu"
    GPU = "gpu"


class TensorParallelExecutor(StrEnum):
    """Who starts the workers of a tensor-parallel engine."""

    #: Processes of this machine: the replica asks Ray for all its GPUs.
    MP = "mp"
    #: Ray actors in the replica's placement group, one GPU bundle each.
    RAY = "ray"


class ToolStrictLevel(StrEnum):
    """What vLLM constrains by grammar."""

    #: Forced calls, and the arguments of tools that say `strict`.
    AUTO = "auto"
    #: The envelope of every call.
    FUNCTION = "function"
    #: The envelope and the arguments of every call: what is generated always matches the tool's schema.
    PARAMETER = "parameter"


class EngineSettings(BaseModel):
    """One vLLM engine. Every replica of a deployment runs the same one."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    model: str = Field(
        default=EMBEDDED_MODEL, min_length=1, description="Model directory or hub name; `embedded` is SmolLM2-135M."
    )
    served_model_name: str | None = Field(
        default=None,
        min_length=1,
        max_length=256,
        description="The name that clients use; by default the model's, for the embedded one smollm2-135m-instruct.",
    )
    device: Device = Field(
        default=Device.CPU, description="What the engine computes on; the installed vLLM must agree."
    )
    dtype: str = Field(default="auto", description="vLLM's dtype of weights and KV.")
    max_model_len: int | None = Field(
        default=4096,
        ge=64,
        description="Longest context of a turn with its output, in tokens; None is the model's own.",
    )
    block_size: int | None = Field(
        default=None, ge=1, description="Tokens in a KV block; None is 32 on a CPU and vLLM's choice on a GPU."
    )
    kv_cache_gib: float | None = Field(
        default=None, gt=0, description="Memory for KV, in GiB; None is 1 on a CPU, and on a GPU what vLLM finds free."
    )
    num_gpu_blocks_override: int | None = Field(
        default=None, ge=2, description="Exact number of KV blocks, whatever the memory; for tests and comparisons."
    )
    max_num_seqs: int | None = Field(default=None, ge=1, description="Turns in a batch; None is 16 on a CPU.")
    max_num_batched_tokens: int | None = Field(
        default=None, ge=1, description="Tokens in a step, prefill included; None is 2048 on a CPU."
    )
    enforce_eager: bool | None = Field(
        default=None,
        description="Run without torch.compile; None is true on a CPU, where compiling costs a minute of start-up for a "
        "quarter more throughput, and false on a GPU.",
    )
    cpu_threads: int | None = Field(
        default=1,
        ge=1,
        description="Threads of a CPU engine; None leaves OMP_NUM_THREADS as it is. Threads wait for one another at every "
        "layer, so that more of them than idle cores are many times slower than one.",
    )
    tensor_parallel_size: int = Field(default=1, ge=1, description="GPUs that one engine is split over.")
    tensor_parallel_executor: TensorParallelExecutor = Field(
        default=TensorParallelExecutor.MP, description="Who starts the workers of a tensor-parallel engine."
    )
    tool_call_parser: str | None = Field(
        default="hermes_exact",
        description="vLLM's parser of tool calls, or `hermes_exact` (one spelling per call, so that the next turn's prompt "
        "repeats the same tokens); None turns tool calls off.",
    )
    tool_strict_level: ToolStrictLevel = Field(
        default=ToolStrictLevel.PARAMETER, description="How far the grammar constrains the tool calls of a turn."
    )
    reasoning_parser: str | None = Field(
        default=None, description="vLLM's parser of reasoning, where the model reasons."
    )
    chat_template: str | None = Field(
        default=None, description="File with a chat template; None is the model's own, for the embedded one ours."
    )
    seed: int = Field(default=0, ge=0, description="Seed of the engine; a turn that gives its own is not affected.")
    scheduler_cls: str | None = Field(
        default="engine_replicas.vllm_scheduler.make_scheduler",
        description="Import path of the scheduler; None runs vLLM's own, without leases, for comparison.",
    )
    engine_args: dict[str, Any] = Field(
        default_factory=dict, description="Further arguments of vLLM's AsyncEngineArgs, by their names there."
    )
    engine_log_level: str = Field(default="WARNING", description="Log level of vLLM in this replica and its processes.")

    turn_timeout_s: float | None = Field(
        default=600.0, gt=0, description="A turn that takes longer, queueing included, is aborted, in seconds."
    )
    engine_rpc_timeout_s: float = Field(
        default=30.0, gt=0, description="How long the replica waits for its scheduler's answer, in seconds."
    )
    engine_silence_max_s: float = Field(
        default=180.0,
        gt=0,
        description="An engine core that answered nothing for longer counts as dead; more than its longest step, in seconds.",
    )
    stats_period_s: float = Field(
        default=1.0, gt=0, description="How often the scheduler's counters are read for the router, in seconds."
    )
    latency_snapshot_period_s: float = Field(
        default=5.0, gt=0, description="How often tool-latency history is read from the store, in seconds."
    )
    shutdown_timeout_s: float = Field(
        default=15.0, gt=0, description="How long a stopping replica waits for its engine's processes, in seconds."
    )

    @field_validator("engine_args")
    @classmethod
    def _not_owned(cls, value: dict[str, Any]) -> dict[str, Any]:
        if owned := sorted(_OWNED_ENGINE_ARGS & value.keys()):
            raise ValueError(f"{', '.join(owned)}: set by the settings of the same name, or by the platform")
        return value

    @model_validator(mode="after")
    def _fits(self) -> EngineSettings:
        if self.is_embedded and (self.max_model_len or 0) > EMBEDDED_CONTEXT_MAX:
            raise ValueError(f"max_model_len: the embedded model's context ends at {EMBEDDED_CONTEXT_MAX} tokens")
        if self.device is Device.CPU:
            if self.block_size is not None and self.block_size % CPU_BLOCK_SIZE:
                raise ValueError(f"block_size: a multiple of {CPU_BLOCK_SIZE} on a CPU")
            if self.tensor_parallel_size != 1:
                raise ValueError("tensor_parallel_size: 1 on a CPU")
        return self

    @property
    def is_embedded(self) -> bool:
        """The model that comes with the platform, prepared on first use."""
        return self.model == EMBEDDED_MODEL

    @property
    def model_name(self) -> str:
        """The name that clients use."""
        return self.served_model_name or (EMBEDDED_SERVED_NAME if self.is_embedded else self.model)

    @property
    def has_leases(self) -> bool:
        """The scheduler is ours, so that it knows programs."""
        return self.scheduler_cls is not None

"""vLLM's configuration of an engine that is not there: from a model's geometry alone, no weights and no GPU.

vLLM itself computes the KV layout (block groups, block count) from the layers and the memory, as it would on the GPU.
Tensor parallelism divides every layer's KV over the GPUs and multiplies the memory, so one set of block tables, with the
memory of all GPUs, stands for the replica; its effect on time is in the step-time model.
"""

from __future__ import annotations

import contextlib
import json
import logging
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheSpec, SlidingWindowSpec

from benchmarks.replay.hardware import Deployment
from benchmarks.replay.offload import Tier
from benchmarks.replay.vllm_offload import offload_config


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineShape:
    """How vLLM is configured in a replay; the defaults are the paper's set-up."""

    block_size: int = 16
    #: Tokens a step may compute (the chunk of chunked prefill).
    max_batched_tokens: int = 2048
    max_running: int = 256
    max_model_tokens: int = 131072
    #: KV-cache size in tokens; None computes it from the GPU's memory as vLLM does.
    kv_tokens: int | None = None
    #: Tiers below the GPU, fastest first; none by default.
    offload: tuple[Tier, ...] = ()
    #: The tiers forget the KV of programs that have ended, as only a platform that knows programs can.
    offload_drops_ended: bool = False


def context_tokens(deployment: Deployment, shape: EngineShape) -> int:
    """The longest context that the engine can be started with: what the model can do and the KV cache can hold."""
    kv_tokens = shape.kv_tokens or deployment.kv_capacity_tokens
    # One block is vLLM's own, and the last may be partly filled.
    return min(shape.max_model_tokens, deployment.model.max_model_tokens, kv_tokens - 2 * shape.block_size)


def build_vllm_config(
    deployment: Deployment, shape: EngineShape, *, additional_config: dict[str, Any]
) -> tuple[VllmConfig, KVCacheConfig]:
    """vLLM's configuration for a deployment, from the model's geometry alone."""
    with tempfile.TemporaryDirectory(prefix="replay-model-") as directory, _quiet_vllm():
        (Path(directory) / "config.json").write_text(json.dumps(deployment.model.hf_config()))
        model_config = ModelConfig(
            model=directory,
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=context_tokens(deployment, shape),
            enforce_eager=True,
        )
        vllm_config = VllmConfig(
            model_config=model_config,
            cache_config=CacheConfig(
                block_size=shape.block_size, enable_prefix_caching=True, prefix_cache_retention_interval=None
            ),
            scheduler_config=SchedulerConfig(
                max_num_batched_tokens=shape.max_batched_tokens,
                max_num_seqs=shape.max_running,
                max_model_len=model_config.max_model_len,
                is_encoder_decoder=False,
                enable_chunked_prefill=True,
                async_scheduling=False,
                # A connector needs one block table for all layers.
                disable_hybrid_kv_cache_manager=bool(shape.offload),
            ),
            parallel_config=ParallelConfig(),
            device_config=DeviceConfig(device="cpu"),
            additional_config=additional_config,
            kv_transfer_config=_offload(deployment, shape),
        )
        kv_config = _kv_config(vllm_config, deployment, shape)
    return vllm_config, kv_config


def _offload(deployment: Deployment, shape: EngineShape) -> KVTransferConfig | None:
    if not shape.offload:
        return None
    block_bytes = float(shape.block_size * deployment.model.kv_bytes_per_token)
    return offload_config(shape.offload, block_bytes, drops_ended=shape.offload_drops_ended)


def _kv_config(vllm_config: VllmConfig, deployment: Deployment, shape: EngineShape) -> KVCacheConfig:
    # The CPU platform may have its own ideas; the replay models a GPU engine.
    vllm_config.cache_config.block_size = shape.block_size
    vllm_config.cache_config.kv_cache_layout = "LBNHC"
    kv_bytes = deployment.kv_capacity_bytes
    if shape.kv_tokens is not None:
        kv_bytes = float(shape.kv_tokens * deployment.model.kv_bytes_per_token)
    kv_config = get_kv_cache_configs(vllm_config, [_kv_specs(deployment, shape.block_size)], [int(kv_bytes)])[0]
    vllm_config.cache_config.num_gpu_blocks = kv_config.num_blocks
    return kv_config


def _kv_specs(deployment: Deployment, block_size: int) -> dict[str, KVCacheSpec]:
    """Each layer's KV shape; of an interleaved model every last layer of a pattern attends to the whole context."""
    model = deployment.model
    dtype = torch.bfloat16 if model.bytes_per_kv_element == 2 else torch.float8_e4m3fn
    pattern = model.layers // model.full_layers
    specs: dict[str, KVCacheSpec] = {}
    for layer in range(model.layers):
        shape = {"block_size": block_size, "num_kv_heads": model.kv_heads, "head_size": model.head_size, "dtype": dtype}
        is_full = model.window_tokens is None or (layer + 1) % pattern == 0
        specs[f"layers.{layer}"] = (
            FullAttentionSpec(**shape) if is_full else SlidingWindowSpec(**shape, sliding_window=model.window_tokens)
        )
    return specs


@contextlib.contextmanager
def _quiet_vllm() -> Iterator[None]:
    """Leave out vLLM's remarks about the machine it runs on: that is not the machine that is modelled."""
    logger = logging.getLogger("vllm")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)

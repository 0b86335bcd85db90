"""GPUs and models as the replay knows them: peak rates, link rates, geometry, and how far each is measured.

Peak rates come from the vendors' data sheets. The kernel constants (`mfu`, `mbu`, `t0_s`, `ka`) are fits on Vidur's
public kernel profiles (microsoft/vidur @7d47513: every `mlp.csv` for A100 and H100, the collectives, and the A100
attention profile). No public profile covers H200 or B200: they take H100's constants, and every result on them is
labelled uncalibrated.

A model is its geometry only; no weights are needed to replay it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from agent_program.errors import InvalidRequest

GIB = 1024**3
_Spec = TypeVar("_Spec")


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelFit:
    """Constants of the linear-layer and attention kernels of one GPU generation."""

    #: Share of peak FLOP/s that large matrix products reach.
    mfu: float
    #: Share of peak memory bandwidth that weight reads reach.
    mbu: float
    #: Launch floor of one layer's kernels; hidden where a step replays a CUDA graph.
    t0_s: float
    #: Activation traffic of one layer, in multiples of reading its input once.
    ka: float
    #: Share of peak bandwidth that decode attention reaches while it reads the KV cache.
    attention_mbu: float = 0.77
    #: Share of peak FLOP/s that prefill attention reaches, counted as chunk x (cached + chunk), without causal saving.
    attention_mfu: float = 0.37
    #: Launch floors of one layer's decode and prefill attention.
    decode_attention_t0_s: float = 15e-6
    prefill_attention_t0_s: float = 23e-6
    #: Start-up time of one all-reduce. Vidur's H100 profile says 26-33 µs; vLLM on 70B implies 26-55 µs.
    all_reduce_alpha_s: float = 30e-6
    #: All-reduce rate in bytes/s by tensor-parallel degree.
    all_reduce_bytes_per_s: tuple[tuple[int, float], ...] = ((2, 328e9), (4, 259e9), (8, 195e9))


A100_FIT = KernelFit(
    mfu=0.701,
    mbu=0.820,
    t0_s=39.9e-6,
    ka=13.3,
    all_reduce_alpha_s=42e-6,
    all_reduce_bytes_per_s=((2, 170e9), (4, 106e9), (8, 87e9)),
)
H100_FIT = KernelFit(mfu=0.672, mbu=0.929, t0_s=38.2e-6, ka=13.7)


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One accelerator."""

    name: str
    bf16_flops: float
    #: None where the GPU has no FP8 units.
    fp8_flops: float | None
    #: What the driver reports as usable, which is less than the data sheet says.
    memory_bytes: float
    memory_bytes_per_s: float
    #: What a KV transfer between host and GPU reaches, per direction; small blocks stay well below the link's rate.
    host_link_bytes_per_s: float
    fit: KernelFit
    #: The kernel constants were measured on this GPU, not borrowed from another.
    is_measured: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """The routed experts of a mixture-of-experts model."""

    count: int
    active: int
    shared: int
    intermediate: int
    #: Leading layers with a dense feed-forward instead.
    dense_layers: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """A model's geometry: what decides its step times and the size of its KV cache."""

    name: str
    #: Architecture name and model type of the Hugging Face configuration that vLLM is given.
    architecture: str
    model_type: str
    layers: int
    hidden: int
    intermediate: int
    query_heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    max_model_tokens: int
    #: Input and output embeddings are one matrix.
    tied_embeddings: bool = False
    bytes_per_weight: int = 2
    bytes_per_kv_element: int = 2
    #: Weights outside the decoder that stay resident, such as a vision tower.
    other_weights: float = 0.0
    experts: Experts | None = None
    #: Sliding-window layers hold at most this many tokens each; None where every layer attends to all.
    window_tokens: int | None = None
    #: How many of the layers attend to the whole context.
    global_layers: int | None = None

    @property
    def attention_weights_per_layer(self) -> float:
        return self.hidden * self.head_size * (2 * self.query_heads + 2 * self.kv_heads)

    def feed_forward_weights(self, layer: int, experts_touched: float | None = None) -> float:
        """Feed-forward parameters of one layer; for routed layers those of `experts_touched` experts (default: all)."""
        if self.experts is None or layer < self.experts.dense_layers:
            return 3.0 * self.hidden * self.intermediate
        routed = self.experts.count if experts_touched is None else experts_touched
        return 3.0 * self.hidden * self.experts.intermediate * (routed + self.experts.shared)

    def decoder_weights(self, experts_touched: float | None = None) -> float:
        """Parameters of all decoder layers."""
        dense = self.experts.dense_layers if self.experts else self.layers
        total = self.layers * self.attention_weights_per_layer + dense * self.feed_forward_weights(0)
        if self.layers > dense:
            total += (self.layers - dense) * self.feed_forward_weights(dense, experts_touched)
        return total

    @property
    def head_weights(self) -> float:
        """Parameters of the output projection."""
        return float(self.hidden * self.vocabulary)

    @property
    def weight_bytes(self) -> float:
        """Bytes of the resident weights over all GPUs."""
        embeddings = self.head_weights * (1 if self.tied_embeddings else 2)
        return self.bytes_per_weight * (self.decoder_weights() + embeddings + self.other_weights)

    @property
    def kv_bytes_per_token_layer(self) -> int:
        return 2 * self.kv_heads * self.head_size * self.bytes_per_kv_element

    @property
    def kv_bytes_per_token(self) -> int:
        """KV bytes of one token where every layer keeps it."""
        return self.layers * self.kv_bytes_per_token_layer

    @property
    def full_layers(self) -> int:
        """Layers that attend to the whole context."""
        return self.layers if self.global_layers is None else self.global_layers

    def hf_config(self) -> dict[str, Any]:
        """The `config.json` that vLLM builds its model configuration from."""
        config: dict[str, Any] = {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.query_heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_size,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": self.max_model_tokens,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "torch_dtype": "bfloat16",
            "tie_word_embeddings": self.tied_embeddings,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
        if self.experts is not None:
            config |= {
                "n_routed_experts": self.experts.count,
                "num_experts_per_tok": self.experts.active,
                "n_shared_experts": self.experts.shared,
                "moe_intermediate_size": self.experts.intermediate,
                "first_k_dense_replace": self.experts.dense_layers,
            }
        if self.window_tokens is not None:
            config |= {"sliding_window": self.window_tokens, "sliding_window_pattern": self.layers // self.full_layers}
        return config


GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu(
            name="a100",
            bf16_flops=312e12,
            fp8_flops=None,
            memory_bytes=79.15 * GIB,
            memory_bytes_per_s=2.039e12,
            host_link_bytes_per_s=20e9,
            fit=A100_FIT,
            is_measured=True,
        ),
        Gpu(
            name="a100-pcie",
            bf16_flops=312e12,
            fp8_flops=None,
            memory_bytes=79.15 * GIB,
            memory_bytes_per_s=1.935e12,
            host_link_bytes_per_s=20e9,
            fit=A100_FIT,
            is_measured=True,
        ),
        Gpu(
            name="h100",
            bf16_flops=989e12,
            fp8_flops=1979e12,
            memory_bytes=79.1 * GIB,
            memory_bytes_per_s=3.35e12,
            host_link_bytes_per_s=45e9,
            fit=H100_FIT,
            is_measured=True,
        ),
        Gpu(
            name="h200",
            bf16_flops=989e12,
            fp8_flops=1979e12,
            memory_bytes=139.8 * GIB,
            memory_bytes_per_s=4.8e12,
            host_link_bytes_per_s=45e9,
            fit=H100_FIT,
            is_measured=False,
        ),
        Gpu(
            name="b200",
            bf16_flops=2250e12,
            fp8_flops=4500e12,
            memory_bytes=178.35e9,
            # 8.0 on the data sheet; 7.67 from the clocks that devices report.
            memory_bytes_per_s=7.67e12,
            host_link_bytes_per_s=45e9,
            fit=H100_FIT,
            is_measured=False,
        ),
    )
}

MODELS: dict[str, Model] = {
    model.name: model
    for model in (
        Model(
            name="llama-3.1-8b",
            architecture="LlamaForCausalLM",
            model_type="llama",
            layers=32,
            hidden=4096,
            intermediate=14336,
            query_heads=32,
            kv_heads=8,
            head_size=128,
            vocabulary=128256,
            max_model_tokens=131072,
        ),
        Model(
            name="llama-3.1-70b",
            architecture="LlamaForCausalLM",
            model_type="llama",
            layers=80,
            hidden=8192,
            intermediate=28672,
            query_heads=64,
            kv_heads=8,
            head_size=128,
            vocabulary=128256,
            max_model_tokens=131072,
        ),
        Model(
            name="gemma-3-12b",
            architecture="Gemma3ForCausalLM",
            model_type="gemma3_text",
            layers=48,
            hidden=3840,
            intermediate=15360,
            query_heads=16,
            kv_heads=8,
            head_size=256,
            vocabulary=262208,
            max_model_tokens=131072,
            tied_embeddings=True,
            other_weights=0.42e9,
            window_tokens=1024,
            global_layers=8,
        ),
        Model(
            name="glm-4.5-fp8",
            architecture="Glm4MoeForCausalLM",
            model_type="glm4_moe",
            layers=92,
            hidden=5120,
            intermediate=12288,
            query_heads=96,
            kv_heads=8,
            head_size=128,
            vocabulary=151552,
            max_model_tokens=131072,
            bytes_per_weight=1,
            experts=Experts(count=160, active=8, shared=1, intermediate=1536, dense_layers=3),
        ),
    )
}


def gpu(name: str) -> Gpu:
    """The GPU of this name.

    Raises:
        InvalidRequest: no such GPU; the message lists those known.
    """
    return _known(GPUS, name, "GPU")


def model(name: str) -> Model:
    """The model of this name.

    Raises:
        InvalidRequest: no such model; the message lists those known.
    """
    return _known(MODELS, name, "model")


def _known(table: Mapping[str, _Spec], name: str, what: str) -> _Spec:
    try:
        return table[name.lower()]
    except KeyError:
        raise InvalidRequest(f"unknown {what} {name!r}; known: {', '.join(sorted(table))}", param=what) from None


@dataclass(frozen=True, kw_only=True, slots=True)
class Deployment:
    """A model on a group of GPUs: one engine replica."""

    model: Model
    gpu: Gpu
    tensor_parallel: int = 1
    #: Share of the GPU's memory that vLLM may use.
    memory_utilization: float = 0.9
    #: Memory a GPU needs beside weights and KV: activations, CUDA graphs, the CUDA context.
    overhead_bytes: float = 1.2 * GIB

    @property
    def kv_capacity_bytes(self) -> float:
        """Bytes left for the KV cache over all GPUs of the replica.

        Raises:
            InvalidRequest: the weights do not fit.
        """
        usable = (self.memory_utilization * self.gpu.memory_bytes - self.overhead_bytes) * self.tensor_parallel
        left = usable - self.model.weight_bytes
        if left <= 0:
            raise InvalidRequest(
                f"{self.model.name} does not fit on {self.tensor_parallel} x {self.gpu.name}: "
                f"weights {self.model.weight_bytes / 1e9:.1f} GB, usable {usable / 1e9:.1f} GB",
                param="tensor_parallel",
            )
        return left

    @property
    def kv_capacity_tokens(self) -> int:
        """Tokens the KV cache holds where every layer keeps every token."""
        return int(self.kv_capacity_bytes // self.model.kv_bytes_per_token)

    @property
    def uncalibrated_because(self) -> tuple[str, ...]:
        """Why step times here are extrapolations; empty where each constant was measured on this combination."""
        reasons = []
        if not self.gpu.is_measured:
            reasons.append(f"{self.gpu.name} has no public kernel profile: H100's efficiencies are assumed")
        if self.model.experts is not None:
            reasons.append("mixture-of-experts steps are not validated")
        if self.model.bytes_per_weight == 1:
            reasons.append("FP8 kernels are not validated")
        if self.model.window_tokens is not None:
            reasons.append("sliding-window attention is not validated")
        return tuple(reasons)

    @property
    def label(self) -> str:
        """`llama-3.1-8b on h100`, with the parallel degree and `(uncalibrated)` where they apply."""
        degree = f"{self.tensor_parallel}x " if self.tensor_parallel > 1 else ""
        return f"{self.model.name} on {degree}{self.gpu.name}" + (
            " (uncalibrated)" if self.uncalibrated_because else ""
        )

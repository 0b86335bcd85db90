"""How long one forward pass takes. Pure.

The roofline model, with n tokens in a step of which b belong to decoding sequences, tensor-parallel degree t, L layers
with P parameters in all, hidden size h, peak FLOP/s F, memory bandwidth B and q = 1.5:

    T_step    = T0 + c1·b + (C^q + M^q)^(1/q) + T_decode_attention + T_prefill + 2·L·T_ar
    C         = 2·P·n/(t·F·mfu) + 2·P_head·s/(t·F·mfu)          s = sequences that sample a token
    M         = bytes(weights read)/(t·B·mbu)
    T_decode  = KV bytes of the decoding sequences/(t·B·0.77)
    T_prefill = L·[t0 + ka·2·n·h/B + 23 µs + Σ over chunks 4·n_q·d·Q·(K+Q)/(t·F·0.37)]   only in steps that prefill
    T_ar      = α + n·h·2/β                                     only for t > 1

T0 = 2.54 ms and c1 = 22.1 µs a sequence stand for vLLM's own overheads. They are the only constants fitted to
end-to-end measurements of vLLM (Llama-3.1-8B, 3 GPUs, batch 1 to 256); all others come from kernel profiles
(`hardware.py`). Launch floors are hidden where a step replays a CUDA graph, so a pure decode pays none.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from agent_program.errors import InvalidRequest
from benchmarks.replay.hardware import Deployment

Q_NORM = 1.5
STEP_OVERHEAD_S = 2.54e-3
SEQUENCE_OVERHEAD_S = 22.1e-6
#: vLLM captures CUDA graphs up to this many tokens; larger steps pay launch floors.
CUDA_GRAPH_TOKENS_MAX = 512


@dataclass(kw_only=True, slots=True)
class StepLoad:
    """What one scheduler step asks of the GPU."""

    #: Sequences that decode one token each.
    decode_seqs: int = 0
    #: Tokens of KV that they read, all together.
    decode_kv_tokens: float = 0.0
    #: The same with each sequence capped at the model's window; ignored by models without one.
    decode_window_tokens: float = 0.0
    #: Prefill chunks: (tokens computed, tokens already in the cache).
    prefill: Sequence[tuple[int, int]] = field(default_factory=tuple)

    @property
    def prefill_tokens(self) -> int:
        return sum(chunk for chunk, _ in self.prefill)


class StepTimeModel(Protocol):
    """Anything that can say how long a step takes."""

    def step_s(self, load: StepLoad) -> float:
        """Seconds of one step; more than 0 for any load."""
        ...

    @property
    def label(self) -> str:
        """What is modelled, with `uncalibrated` where it is an extrapolation."""
        ...


class RooflineStepTime:
    """The formula above for one deployment."""

    def __init__(
        self,
        deployment: Deployment,
        *,
        step_overhead_s: float = STEP_OVERHEAD_S,
        sequence_overhead_s: float = SEQUENCE_OVERHEAD_S,
    ) -> None:
        model, gpu, fit, degree = (
            deployment.model,
            deployment.gpu,
            deployment.gpu.fit,
            deployment.tensor_parallel,
        )
        self.deployment = deployment
        self._step_overhead_s, self._sequence_overhead_s = step_overhead_s, sequence_overhead_s
        flops = gpu.bf16_flops
        if model.bytes_per_weight == 1:
            if gpu.fp8_flops is None:
                raise InvalidRequest(f"{gpu.name} has no FP8 units, and {model.name} needs them", param="gpu")
            flops = gpu.fp8_flops
        active = model.decoder_weights(float(model.experts.active) if model.experts else None)
        self._compute_s_per_token = 2.0 * active / (degree * flops * fit.mfu)
        self._head_s_per_seq = 2.0 * model.head_weights / (degree * flops * fit.mfu)
        self._weight_rate = degree * gpu.memory_bytes_per_s * fit.mbu
        self._dense_read_bytes = model.bytes_per_weight * (model.decoder_weights(0.0) + model.head_weights)
        self._expert_read_bytes = model.bytes_per_weight * (model.decoder_weights(1.0) - model.decoder_weights(0.0))
        kv_rate = degree * gpu.memory_bytes_per_s * fit.attention_mbu
        full = model.full_layers
        self._kv_s_per_token = full * model.kv_bytes_per_token_layer / kv_rate
        self._window_s_per_token = (model.layers - full) * model.kv_bytes_per_token_layer / kv_rate
        attention = 4.0 * model.query_heads * model.head_size / (degree * gpu.bf16_flops * fit.attention_mfu)
        self._full_attention_s = full * attention
        self._window_attention_s = (model.layers - full) * attention
        self._activation_s_per_token = model.layers * fit.ka * 2.0 * model.hidden / gpu.memory_bytes_per_s
        self._prefill_floor_s = model.layers * (fit.t0_s + fit.prefill_attention_t0_s)
        self._decode_floor_s = model.layers * fit.decode_attention_t0_s
        self._all_reduce_s, self._all_reduce_s_per_token = _all_reduce(deployment)

    @property
    def label(self) -> str:
        return f"roofline, {self.deployment.label}"

    def step_s(self, load: StepLoad) -> float:
        prefill_tokens = load.prefill_tokens
        tokens = load.decode_seqs + prefill_tokens
        sampled = load.decode_seqs + len(load.prefill)
        compute = self._compute_s_per_token * tokens + self._head_s_per_seq * sampled
        memory = self._weight_read_bytes(tokens) / self._weight_rate
        seconds = self._step_overhead_s + self._sequence_overhead_s * sampled
        seconds += (compute**Q_NORM + memory**Q_NORM) ** (1.0 / Q_NORM)
        seconds += self._kv_s_per_token * load.decode_kv_tokens + self._window_s_per_token * load.decode_window_tokens
        seconds += self._all_reduce_s + self._all_reduce_s_per_token * tokens
        if prefill_tokens:
            seconds += self._activation_s_per_token * prefill_tokens + self._prefill_attention_s(load.prefill)
            if tokens > CUDA_GRAPH_TOKENS_MAX:
                seconds += self._prefill_floor_s + (self._decode_floor_s if load.decode_seqs else 0.0)
        return seconds

    def _weight_read_bytes(self, tokens: int) -> float:
        experts = self.deployment.model.experts
        if experts is None:
            return self._dense_read_bytes
        # With uniform routing, `tokens` draws of `active` out of `count` touch this many different experts.
        touched = experts.count * (1.0 - (1.0 - experts.active / experts.count) ** tokens)
        return self._dense_read_bytes + self._expert_read_bytes * touched

    def _prefill_attention_s(self, chunks: Sequence[tuple[int, int]]) -> float:
        window = self.deployment.model.window_tokens
        seconds = 0.0
        for chunk, cached in chunks:
            seconds += self._full_attention_s * chunk * (cached + chunk)
            if window is not None:
                seconds += self._window_attention_s * chunk * min(cached + chunk, window + chunk)
        return seconds


def _all_reduce(deployment: Deployment) -> tuple[float, float]:
    """(seconds a step, seconds a token) of the two all-reduces of each layer."""
    degree, fit, model = deployment.tensor_parallel, deployment.gpu.fit, deployment.model
    if degree == 1:
        return 0.0, 0.0
    rates = dict(fit.all_reduce_bytes_per_s)
    if degree not in rates:
        raise InvalidRequest(f"tensor parallel degree must be 1, {', '.join(map(str, rates))}", param="tensor_parallel")
    return 2 * model.layers * fit.all_reduce_alpha_s, 2 * model.layers * 2.0 * model.hidden / rates[degree]


class TableStepTime:
    """Step times read from a measured table, linear between its points and beyond its ends.

    For engines whose owner measured them: decode seconds by batch size at one context length, prefill seconds by
    tokens at an empty cache, and two rates for what the table leaves out.
    """

    def __init__(
        self,
        *,
        decode: Sequence[tuple[float, float]],
        prefill: Sequence[tuple[float, float]],
        decode_context_tokens: float,
        kv_s_per_token: float,
        attention_s_per_token_pair: float = 0.0,
        label: str = "table",
    ) -> None:
        if len(decode) < 2 or len(prefill) < 2:
            raise InvalidRequest("a step-time table needs at least two decode and two prefill points", param="table")
        self._decode, self._prefill = sorted(decode), sorted(prefill)
        self._context = decode_context_tokens
        self._kv_s_per_token, self._pair_s = kv_s_per_token, attention_s_per_token_pair
        self._label = label

    @property
    def label(self) -> str:
        return self._label

    def step_s(self, load: StepLoad) -> float:
        seconds = 0.0
        if load.decode_seqs:
            seconds += _interpolate(self._decode, load.decode_seqs)
            seconds += self._kv_s_per_token * (load.decode_kv_tokens - self._context * load.decode_seqs)
        if load.prefill:
            pure = _interpolate(self._prefill, load.prefill_tokens)
            # One launch serves both parts of a mixed step: its fixed cost, the decode time of one sequence, counts once.
            seconds += pure if not load.decode_seqs else max(0.0, pure - self._decode[0][1])
            seconds += self._pair_s * sum(chunk * cached for chunk, cached in load.prefill)
        return max(seconds, 1e-6)


def _interpolate(points: Sequence[tuple[float, float]], at: float) -> float:
    index = min(max(bisect_left(points, (at, 0.0)), 1), len(points) - 1)
    (x0, y0), (x1, y1) = points[index - 1], points[index]
    return y0 if x1 == x0 else y0 + (y1 - y0) * (at - x0) / (x1 - x0)

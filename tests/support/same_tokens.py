"""One real engine on the CPU, one scheduler after another: the same agent programs, greedily, on a pool that they do not fit.

Starting an engine takes much longer than these turns, and a scheduler owns no weights: so the engine is started once, in this
process, and between two rounds, when it is idle, gets a new scheduler with an empty cache. The model is a small Llama with
random weights, wide enough apart that its choices do not hang on rounding.

    PYTHONPATH=tests python -m support.same_tokens DIRECTORY      # one JSON line: round → answers and what the scheduler did
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

BLOCK, BLOCKS = 32, 28
ROUNDS: dict[str, dict[str, Any] | None] = {
    "stock": None,
    "vllm": {"preset": "vllm"},
    "autellix": {"preset": "autellix"},
    "infercept": {"preset": "infercept"},
    "continuum": {"preset": "continuum", "provisional_ttl_s": 30.0},
    "adaptive": {"preset": "adaptive"},
    # Everything is kept until somebody needs the memory: as many reclaims as there can be.
    "forever": {
        "retention": "static_ttl",
        "ttl_s": 3600,
        "ttl_max_s": 3600,
        "retained_fraction_max": 1.0,
        "program_retained_fraction_max": 1.0,
        "tenant_retained_fraction_max": 1.0,
    },
}
VOCABULARY = 512
PROGRAMS, TURNS, OUTPUT_TOKENS = 6, 3, 24


def write_model(directory: Path) -> None:
    """A Llama of two layers with seeded random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        # vLLM's attention on CPUs knows heads of 64, and not of every smaller size.
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=1024,
        initializer_range=0.3,
        torch_dtype="float32",
    )
    LlamaForCausalLM(config).save_pretrained(directory)


class Engine:
    """vLLM's engine in this process."""

    def __init__(self, model: Path) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        self.engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=str(model),
                skip_tokenizer_init=True,
                dtype="float32",
                enforce_eager=True,
                max_model_len=512,
                block_size=BLOCK,
                num_gpu_blocks_override=BLOCKS,
                max_num_seqs=4,
                # Prompts of up to 300 tokens come in chunks.
                max_num_batched_tokens=64,
                seed=0,
            )
        )
        self.core: Any = self.engine.engine_core.engine_core

    def schedule_with(self, settings: dict[str, Any] | None) -> None:
        """Replace the scheduler of the idle engine; stock vLLM's for None."""
        from vllm.v1.core.sched.scheduler import Scheduler

        from engine_replicas.vllm_scheduler import make_scheduler

        old = self.core.scheduler
        assert not old.requests
        config = self.core.vllm_config
        config.additional_config = {"continuum": settings} if settings is not None else {}
        self.core.scheduler = (Scheduler if settings is None else make_scheduler)(
            vllm_config=config,
            kv_cache_config=old.kv_cache_config,
            structured_output_manager=old.structured_output_manager,
            include_finished_set=False,
            log_stats=True,
            block_size=old.block_size,
            hash_block_size=old.hash_block_size,
        )

    def play(self) -> dict[str, list[int]]:
        """Every program's turns, the next one of a program as soon as one has ended; turn → answer."""
        from vllm.sampling_params import SamplingParams

        rng = random.Random(1)
        pieces = {
            (program, turn): [rng.randrange(3, VOCABULARY) for _ in range(rng.randint(40, 90))]
            for program in range(PROGRAMS)
            for turn in range(TURNS)
        }
        contexts: dict[int, list[int]] = {program: [] for program in range(PROGRAMS)}
        answers: dict[str, list[int]] = {}

        def send(program: int, turn: int) -> None:
            contexts[program] += pieces[program, turn]
            params = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, detokenize=False)
            prompt = {"prompt_token_ids": list(contexts[program])}
            self.engine.add_request(f"{program}-{turn}", prompt, params, session_id=f"p{program}")

        for program in range(PROGRAMS):
            send(program, 0)
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                if not output.finished:
                    continue
                program, turn = map(int, output.request_id.split("-")[:2])
                answer = list(output.outputs[0].token_ids)
                answers[f"{program}-{turn}"] = answer
                contexts[program] += answer
                if turn + 1 < TURNS:
                    send(program, turn + 1)
        return answers


def main(directory: Path) -> None:
    """Play every round and print what came out."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    write_model(directory)
    engine = Engine(directory)
    rounds: dict[str, Any] = {}
    for name, settings in ROUNDS.items():
        engine.schedule_with(settings)
        answers = engine.play()
        stats = engine.core.scheduler.continuum_stats() if settings is not None else {}
        rounds[name] = {"answers": answers, "stats": stats}
    sys.stdout.write(json.dumps(rounds) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

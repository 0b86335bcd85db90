"""The models that vLLM's tests name, as far as a scheduler needs them: their configuration, and what counts their image tokens.

Written in the layout of a model hub's cache, so that the tests find them without a network. There are no weights, and the
tokenizers know a handful of words.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_COMMIT = "0" * 40

_OPT: dict[str, Any] = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "activation_function": "relu",
    "do_layer_norm_before": True,
    "max_position_embeddings": 2048,
    "vocab_size": 50272,
    "bos_token_id": 2,
    "eos_token_id": 2,
    "pad_token_id": 1,
    "torch_dtype": "float16",
}
_OPT_125M = {
    **_OPT,
    "hidden_size": 768,
    "ffn_dim": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "word_embed_proj_dim": 768,
}
_OPT_350M = {
    **_OPT,
    "do_layer_norm_before": False,
    "hidden_size": 1024,
    "ffn_dim": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "word_embed_proj_dim": 512,
}
_QWEN_7B = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "vocab_size": 151936,
    "torch_dtype": "bfloat16",
}
_LLAVA = {
    "architectures": ["LlavaForConditionalGeneration"],
    "model_type": "llava",
    "image_token_index": 32000,
    "projector_hidden_act": "gelu",
    "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default",
    "torch_dtype": "float16",
    "text_config": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "max_position_embeddings": 4096,
        "vocab_size": 32064,
        "torch_dtype": "float16",
    },
    "vision_config": {
        "model_type": "clip_vision_model",
        "hidden_size": 1024,
        "image_size": 336,
        "intermediate_size": 4096,
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "patch_size": 14,
        "projection_dim": 768,
        "vocab_size": 32000,
    },
}
_CLIP_IMAGES = {
    "image_processor_type": "CLIPImageProcessor",
    "processor_class": "LlavaProcessor",
    "crop_size": {"height": 336, "width": 336},
    "size": {"shortest_edge": 336},
    "do_center_crop": True,
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "resample": 3,
    "rescale_factor": 1 / 255,
}
_LLAVA_PROCESSOR = {
    "processor_class": "LlavaProcessor",
    "image_token": "<image>",
    "patch_size": 14,
    "vision_feature_select_strategy": "default",
    "num_additional_image_tokens": 1,
}

_QWEN_VL = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128000,
    "vocab_size": 151936,
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "rope_theta": 1000000.0,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "torch_dtype": "bfloat16",
    "vision_config": {
        "model_type": "qwen2_5_vl",
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 2048,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 112,
    },
}
_QWEN_VL_IMAGES = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2_5_VLProcessor",
    "min_pixels": 3136,
    "max_pixels": 12845056,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
_QWEN_VL_VIDEOS = {**_QWEN_VL_IMAGES, "video_processor_type": "Qwen2VLVideoProcessor"}
del _QWEN_VL_VIDEOS["image_processor_type"]
_QWEN_VL_TOKENS = {
    "<|vision_start|>": 151652,
    "<|vision_end|>": 151653,
    "<|image_pad|>": 151655,
    "<|video_pad|>": 151656,
}


def _tokenizer(image_tokens: dict[str, int]) -> dict[str, Any]:
    """A tokenizer of single words."""
    special = {"<unk>": 0, "<s>": 1, "</s>": 2, **image_tokens}
    words = {"USER:": 3, "What": 4, "is": 5, "this?": 6}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": number,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for token, number in special.items()
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": {**special, **words}, "unk_token": "<unk>"},
    }


_TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "pad_token": "<unk>",
    "model_max_length": 4096,
}

MODELS: dict[str, dict[str, dict[str, Any]]] = {
    "facebook/opt-125m": {"config.json": _OPT_125M},
    "facebook/opt-350m": {"config.json": _OPT_350M},
    "Qwen/Qwen1.5-7B": {"config.json": _QWEN_7B},
    "llava-hf/llava-1.5-7b-hf": {
        "config.json": _LLAVA,
        "preprocessor_config.json": _CLIP_IMAGES,
        "processor_config.json": _LLAVA_PROCESSOR,
        "tokenizer.json": _tokenizer({"<image>": 32000}),
        "tokenizer_config.json": _TOKENIZER_CONFIG,
    },
    "Qwen/Qwen2.5-VL-3B-Instruct": {
        "config.json": _QWEN_VL,
        "preprocessor_config.json": _QWEN_VL_IMAGES,
        "video_preprocessor_config.json": _QWEN_VL_VIDEOS,
        "tokenizer.json": _tokenizer(_QWEN_VL_TOKENS),
        "tokenizer_config.json": _TOKENIZER_CONFIG,
    },
}


def write_models(hub_home: Path) -> None:
    """Write every model below `hub_home`, which becomes the tests' `HF_HOME`."""
    for name, files in MODELS.items():
        model = hub_home / "hub" / f"models--{name.replace('/', '--')}"
        snapshot = model / "snapshots" / _COMMIT
        snapshot.mkdir(parents=True, exist_ok=True)
        (model / "refs").mkdir(exist_ok=True)
        (model / "refs" / "main").write_text(_COMMIT, encoding="utf-8")
        for file, content in files.items():
            (snapshot / file).write_text(json.dumps(content), encoding="utf-8")

"""Settings that cannot run are refused before anything starts, by the name of the setting."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from engine_replicas.engine_config import EngineSettings


def test_the_default_is_the_embedded_model_on_a_cpu() -> None:
    settings = EngineSettings()
    assert settings.is_embedded
    assert settings.model_name == "smollm2-135m-instruct"
    assert settings.max_model_len == 4096
    assert settings.has_leases


def test_another_model_is_served_under_its_own_name_unless_given_one() -> None:
    assert EngineSettings(model="org/model").model_name == "org/model"
    assert EngineSettings(model="org/model", served_model_name="short").model_name == "short"


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"max_model_length": 4096}, "max_model_length"),
        ({"max_model_len": 16384}, "max_model_len"),  # the embedded model ends at 8192
        ({"block_size": 16}, "block_size"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size"),
        ({"kv_cache_gib": -1}, "kv_cache_gib"),
        ({"device": "tpu"}, "device"),
        ({"engine_args": {"scheduler_cls": "mine.Scheduler"}}, "scheduler_cls"),
        ({"engine_args": {"enable_prefix_caching": False}}, "enable_prefix_caching"),
        ({"turn_timeout_s": 0}, "turn_timeout_s"),
    ],
)
def test_a_setting_that_cannot_run_is_named(wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        EngineSettings(**wrong)


def test_a_gpu_engine_may_be_tensor_parallel_and_use_small_blocks() -> None:
    settings = EngineSettings(model="org/model", device="gpu", tensor_parallel_size=4, block_size=16)
    assert settings.tensor_parallel_size == 4


def test_every_setting_says_what_it_is() -> None:
    assert [name for name, field in EngineSettings.model_fields.items() if not field.description] == []

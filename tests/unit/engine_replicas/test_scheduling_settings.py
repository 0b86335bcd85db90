"""Settings of the scheduler: presets, overrides, and what is refused."""

from typing import Any

import pytest
from pydantic import ValidationError

from engine_replicas.config import OrderingName, RetentionName, SchedulingPreset, SchedulingSettings


@pytest.mark.parametrize(
    ("preset", "retention", "ordering"),
    [
        (SchedulingPreset.VLLM, RetentionName.END_OF_TURN, OrderingName.FCFS),
        (SchedulingPreset.CONTINUUM, RetentionName.CONTINUUM, OrderingName.PROGRAM_FCFS),
    ],
)
def test_a_preset_names_a_retention_policy_and_an_ordering(
    preset: SchedulingPreset, retention: RetentionName, ordering: OrderingName
) -> None:
    settings = SchedulingSettings(preset=preset)
    assert (settings.retention_name, settings.ordering_name) == (retention, ordering)


def test_each_half_of_a_preset_can_be_overridden() -> None:
    settings = SchedulingSettings(preset="vllm", retention="static_ttl")
    assert (settings.retention_name, settings.ordering_name) == (RetentionName.STATIC_TTL, OrderingName.FCFS)


def test_the_plain_form_that_reaches_the_engine_reads_back_as_the_same_settings() -> None:
    settings = SchedulingSettings(retention="static_ttl", ttl_s=7.5, tenant_retained_fraction_max=0.25)
    assert SchedulingSettings.model_validate(settings.model_dump(mode="json")) == settings


@pytest.mark.parametrize(
    "wrong",
    [
        {"presets": "vllm"},
        {"preset": "fastest"},
        {"ttl_s": -1},
        {"ttl_s": float("nan")},
        {"ttl_max_s": 0},
        {"retained_fraction_max": 1.5},
        {"k_cold_start": -1},
        {"provisional_ttl_s": 0},
        {"eta_programs_min": 1},
    ],
)
def test_a_wrong_setting_is_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        SchedulingSettings.model_validate(wrong)


def test_every_setting_has_a_sentence() -> None:
    assert all((field.description or "").endswith(".") for field in SchedulingSettings.model_fields.values())

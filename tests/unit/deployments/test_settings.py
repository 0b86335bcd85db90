"""One settings tree: complete by default, strict about keys and values, described field by field."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from deployments.settings import PlatformSettings


def trees(model: type[BaseModel], path: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """Every model of the settings tree with its path."""
    yield path, model
    for name, field in model.model_fields.items():
        for kind in (field.annotation, *typing.get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from trees(kind, f"{path}.{name}".strip("."))


def test_nothing_has_to_be_set() -> None:
    settings = PlatformSettings()
    assert PlatformSettings.model_validate(settings.model_dump(mode="json")) == settings


@pytest.mark.parametrize(("path", "model"), list(trees(PlatformSettings)), ids=lambda value: value or "top")
def test_every_level_is_strict_and_says_what_each_field_means(path: str, model: type[BaseModel]) -> None:
    assert model.model_config.get("extra") == "forbid"
    assert model.model_config.get("frozen")
    source = Path(__import__("inspect").getfile(model)).read_text()
    for name, field in model.model_fields.items():
        text = field.description or documented(source, name)
        assert text.rstrip().endswith((".", ")")), f"{path}.{name} has no sentence"


def documented(source: str, name: str) -> str:
    """The docstring under a field, where a model keeps its sentences there."""
    _, _, after = source.partition(f"\n    {name}: ")
    _, _, doc = after.partition('"""')
    return doc.partition('"""')[0]


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ({"engines": {}}, "engines"),
        ({"engine": {"modle": "x"}}, "engine.modle"),
        ({"engine": {"max_model_len": -1}}, "engine.max_model_len"),
        ({"scheduling": {"preset": "magic"}}, "scheduling.preset"),
        ({"store": {"redis_url": "http://x"}}, "store.redis_url"),
        ({"store": {"embedded_port": 70_000}}, "store.embedded_port"),
        ({"http": {"body_bytes_max": 0}}, "http.body_bytes_max"),
        ({"programs": {"limit_defaults": {"max_turns": 0}}}, "programs.limit_defaults.max_turns"),
        ({"replicas": {"engine": 0}}, "replicas.engine"),
    ],
)
def test_a_wrong_key_or_value_is_named(args: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError) as refused:
        PlatformSettings.model_validate(args)
    assert [".".join(map(str, error["loc"])) for error in refused.value.errors()] == [named]


def test_default_limits_lie_below_their_ceilings() -> None:
    programs = {"limit_defaults": {"max_turns": 20}, "limit_ceilings": {"max_turns": 10}}
    with pytest.raises(ValidationError, match=r"limit_defaults\.max_turns"):
        PlatformSettings.model_validate({"programs": programs})


def test_the_store_is_embedded_unless_a_url_is_given() -> None:
    assert PlatformSettings().store.url == "redis://127.0.0.1:6399/0"
    external = PlatformSettings.model_validate({"store": {"redis_url": "redis://store:6379/0"}}).store
    assert (external.url, external.is_embedded) == ("redis://store:6379/0", False)

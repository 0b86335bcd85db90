"""vLLM's own scheduler and KV-cache manager, in this process, without a model."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from support.engine_core import SchedulerHarness

_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A model directory without weights."""
    before = {name: os.environ.get(name) for name in _ENVIRONMENT}
    os.environ.update(_ENVIRONMENT)
    try:
        from support.engine_core import tiny_model

        yield tiny_model(tmp_path_factory.mktemp("model"))
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


@pytest.fixture(params=["sync", "async"])
def engine(model: Path, request: pytest.FixtureRequest) -> Callable[..., SchedulerHarness]:
    """Builds engines: `engine(retention="static_ttl", ttl_s=60, pool={"blocks": 40})`, or stock ones: `engine(is_stock=True)`.

    Every test that asks for it runs in both scheduling modes.
    """
    from engine_replicas.config import SchedulingSettings
    from support.engine_core import SchedulerHarness

    def build(*, is_stock: bool = False, pool: dict[str, Any] | None = None, **settings: Any) -> SchedulerHarness:
        chosen = None if is_stock else SchedulingSettings(**settings)
        return SchedulerHarness(model, chosen, is_async=request.param == "async", **(pool or {}))

    return build

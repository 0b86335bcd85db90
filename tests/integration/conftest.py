"""What integration tests share: one Ray with Serve for the whole run, and a store of their own."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.platform import Platform, running_platform
from support.redis_server import RedisServer, valkey_binary

_ROOT = Path(__file__).parents[2]
#: Workers inherit these from the raylet; `tests` is there so that they can import `support`.
_ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": f"{_ROOT}:{_ROOT / 'tests'}",
}


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A local Ray of four logical CPUs, started at most once; tests deploy Serve apps on it and delete them."""
    before = {name: os.environ.get(name) for name in _ENVIRONMENT}
    os.environ.update(_ENVIRONMENT)
    import ray
    from ray import serve

    directory = tempfile.mkdtemp(prefix="ct-ray-")  # short: Ray's socket paths must stay under 108 bytes
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, _temp_dir=directory)
    try:
        yield
    finally:
        serve.shutdown()
        ray.shutdown()
        shutil.rmtree(directory, ignore_errors=True)
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


@pytest.fixture
def store() -> Iterator[RedisServer]:
    """A Valkey server of the test's own."""
    with RedisServer(valkey_binary()) as server:
        yield server


@pytest.fixture(scope="session")
def platform() -> Iterator[Platform]:
    """The whole platform with two engine replicas, started at most once; its tests leave it running and whole."""
    with running_platform() as running:
        yield running

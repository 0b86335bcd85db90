"""One real engine for all the tests of a run: starting one takes half a minute."""

from __future__ import annotations

import asyncio
import os
import warnings
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from engine_replicas.config import RetentionName, SchedulingSettings
from engine_replicas.engine_config import EngineSettings
from engine_replicas.replica import EngineReplica
from support.redis_server import RedisServer, valkey_binary

#: A pool that a handful of programs fill, and loops that a test need not wait for.
SETTINGS = EngineSettings(
    num_gpu_blocks_override=160, max_model_len=2048, stats_period_s=0.1, latency_snapshot_period_s=0.2
)
#: Leases that no test outlasts, however busy the machine: what a policy decides is not the replica's to show.
SCHEDULING = SchedulingSettings(
    retention=RetentionName.STATIC_TTL, ttl_s=3600, ttl_max_s=3600, provisional_ttl_s=60, expected_turn_hold_s=60
)


@pytest.fixture(scope="session")
def latency_store() -> Iterator[RedisServer]:
    """The store that the engine reads history from."""
    with RedisServer(valkey_binary()) as server:
        yield server


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def engine_replica(latency_store: RedisServer) -> AsyncIterator[EngineReplica]:
    """A running replica of the embedded model. Tests use program ids of their own and leave no turn running."""
    # More threads would wait for each other at every operation wherever the machine has other work.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what vLLM and torch warn of while they start is theirs
        replica = await asyncio.to_thread(EngineReplica, SETTINGS, SCHEDULING, latency_store.url)
        await replica.check_health()
    yield replica
    await replica.aclose()

"""An engine core that dies is noticed at once; a replica that is killed leaves no process behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import warnings
from contextlib import aclosing

import psutil
import pytest

from agent_program.errors import EngineUnavailable
from engine_replicas.config import SchedulingSettings
from engine_replicas.engine_config import EngineSettings
from engine_replicas.replica import EngineReplica
from engine_replicas.turn_stream import TurnOpened
from support.turns import chat, hints, take
from support.waiting import wait_for
from tool_runtime.history import MemoryHistory

pytestmark = [pytest.mark.integration, pytest.mark.chaos, pytest.mark.slow]

SETTINGS = EngineSettings(num_gpu_blocks_override=96, max_model_len=1024, engine_rpc_timeout_s=5)
#: Starts a replica, says which processes its engine core is, and then only waits.
HOLD_A_REPLICA = """
import time
from engine_replicas.config import SchedulingSettings
from engine_replicas.engine_config import EngineSettings
from engine_replicas.replica import EngineReplica
from tool_runtime.history import MemoryHistory

if __name__ == "__main__":
    settings = EngineSettings(num_gpu_blocks_override=96, max_model_len=1024)
    replica = EngineReplica(settings, SchedulingSettings(), "redis://127.0.0.1:1", history=MemoryHistory())
    print("engine", *replica.engine_process_ids, flush=True)
    time.sleep(3600)
"""


def family(pid: int) -> list[psutil.Process]:
    return [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]


def all_gone(processes: list[psutil.Process]) -> bool:
    return not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes)


async def test_when_the_engine_core_dies_turns_fail_as_unavailable_and_so_does_health() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        replica = await asyncio.to_thread(
            EngineReplica, SETTINGS, SchedulingSettings(), "redis://127.0.0.1:1", history=MemoryHistory()
        )
    try:
        await replica.check_health()
        (core_pid,) = replica.engine_process_ids
        processes = family(core_pid)
        body = chat(stream=True, max_tokens=900, ignore_eos=True)
        async with aclosing(replica.chat(body, hints("p"))) as items:
            assert isinstance(await anext(items), TurnOpened)
            await anext(items)
            os.kill(core_pid, signal.SIGKILL)
            with pytest.raises(EngineUnavailable):
                async for _ in items:
                    pass
        with pytest.raises(EngineUnavailable):
            await replica.check_health()
        for stream in (False, True):
            with pytest.raises(EngineUnavailable):
                await take(replica, chat(stream=stream), hints("p"))
        with pytest.raises(EngineUnavailable):
            await replica.explain("p")
        await replica.release_program("p")  # advice: it has nobody to reach, and says so in a counter only
    finally:
        await replica.aclose()
    wait_for(lambda: all_gone(processes), what="the core's workers end with it")


def test_a_replica_that_is_killed_takes_its_engine_core_with_it(tmp_path) -> None:
    script = tmp_path / "hold_a_replica.py"
    script.write_text(HOLD_A_REPLICA)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment) as replica:
        assert replica.stdout is not None
        line = next((line for line in iter(replica.stdout.readline, "") if line.startswith("engine ")), "")
        processes = family(replica.pid)
        try:
            assert line, "the replica did not start"
            assert len(processes) >= 3, "replica, core, worker"
            replica.kill()
            replica.wait()
            wait_for(lambda: all_gone(processes), what="the orphaned engine core ends")
        finally:
            for process in processes:
                if process.is_running():
                    process.kill()

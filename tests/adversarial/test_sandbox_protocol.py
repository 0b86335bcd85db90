"""A hostile agent: whatever comes from inside a sandbox is data, or the end of that sandbox, and never holds up the host."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import pytest_asyncio

from agent_program.errors import SandboxUnavailable
from tool_runtime.bubblewrap import find_python
from tool_runtime.config import MIB, OutputLimits
from tool_runtime.launcher_client import LauncherClient
from tool_runtime.live_sandbox import LiveSandbox
from tool_runtime.sandbox import Ending, Execution, KillScope, SpawnPlan

pytestmark = [pytest.mark.adversarial, pytest.mark.asyncio(loop_scope="module")]

#: What every hostile agent starts with: the socket, frames, and the id and nonce of the first call.
PRELUDE = """
import pickle, os, socket, struct, sys, time
control = socket.socket(fileno=int(sys.argv[1]))
def frame(**fields):
    body = b"".join(
        bytes((len(name),)) + name.encode() + struct.pack(">I", len(value)) + value for name, value in fields.items()
    )
    return struct.pack(">I", len(body)) + body
def receive():
    data = control.recv(65536)
    fields, at = {}, 4
    while at < len(data):
        end = at + 1 + data[at]
        size = struct.unpack_from(">I", data, end)[0]
        fields[data[at + 1 : end].decode()] = data[end + 4 : end + 4 + size]
        at = end + 4 + size
    return fields
READY = frame(ev=b"ready", pid=b"2")
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def launcher() -> AsyncIterator[LauncherClient]:
    client = LauncherClient()
    yield client
    await client.close()


def plan_of(agent: str) -> SpawnPlan:
    python = str(find_python())
    return SpawnPlan(
        executable=python,
        argv=("python3", "-I", "-S", "-c", PRELUDE + agent, "{fd:control}"),
        memory_bytes_max=512 * MIB,
        cgroup_processes_max=64,
        kill_scope=KillScope.DESCENDANTS,
    )


@asynccontextmanager
async def sandbox_of(launcher: LauncherClient, agent: str) -> AsyncIterator[LiveSandbox]:
    sandbox = await LiveSandbox.start(launcher, plan_of(agent), timeout_s=30)
    try:
        yield sandbox
    finally:
        await sandbox.close()
        assert not sandbox.is_alive


async def execute(sandbox: LiveSandbox, timeout_s: float = 5.0) -> Execution:
    return await sandbox.execute(
        "shell", {"command": "true"}, timeout_s=timeout_s, grace_s=0.1, output=OutputLimits(hard_bytes_max=4 * MIB)
    )


NEVER_READY = {
    "says nothing": "time.sleep(1000)",
    "ends at once": "sys.exit(3)",
    "hangs up": "control.close(); time.sleep(1000)",
    "speaks nonsense": "control.sendall(b'\\xff' * 1000); time.sleep(1000)",
    "announces a frame of two gigabytes": "control.sendall(b'\\x7f\\xff\\xff\\xff'); time.sleep(1000)",
    "says everything but ready": "control.sendall(frame(ev=b'done', id=b'1') * 1000); time.sleep(1000)",
}


@pytest.mark.parametrize("agent", NEVER_READY.values(), ids=NEVER_READY)
async def test_an_agent_that_never_gets_ready_is_given_up(launcher: LauncherClient, agent: str) -> None:
    with pytest.raises(SandboxUnavailable):
        await LiveSandbox.start(launcher, plan_of(agent), timeout_s=1)


ENDS_THE_SANDBOX = {
    "nonsense": "b'\\xff' * 100",
    "a frame too large": "struct.pack('>I', 2**30)",
    "a value cut off": "struct.pack('>I', 6) + b'\\x01a' + struct.pack('>I', 999)",
    "a name that is no text": "struct.pack('>I', 6) + b'\\x01\\xff' + struct.pack('>I', 0)",
    "a pickle in place of a frame": "pickle.dumps(print) * 10",
    "deep json in place of a frame": "b'[' * 100000",
}


@pytest.mark.parametrize("answer", ENDS_THE_SANDBOX.values(), ids=ENDS_THE_SANDBOX)
async def test_what_is_no_frame_ends_the_sandbox_with_the_reason(launcher: LauncherClient, answer: str) -> None:
    agent = f"control.sendall(READY); receive(); control.sendall({answer}); time.sleep(1000)"
    async with sandbox_of(launcher, agent) as sandbox:
        execution = await execute(sandbox, timeout_s=60)
        assert execution.ending is Ending.INTERRUPTED
        assert execution.reason.startswith("the sandbox sent nonsense")


IGNORED = {
    "an answer to a call that was never made": "frame(ev=b'done', id=b'999', nonce=b'x', exit_code=b'0')",
    "an answer with another nonce": "frame(ev=b'done', id=call['id'], nonce=b'0' * 16, exit_code=b'0')",
    "an answer without a nonce": "frame(ev=b'done', id=call['id'], exit_code=b'0')",
    "an id that is no text": "frame(ev=b'done', id=b'\\xff\\xfe', nonce=b'x')",
    "an event nobody knows": "frame(ev=b'surprise', id=call['id'])",
    "a pickle in every field": "frame(ev=pickle.dumps(print), id=pickle.dumps({}), nonce=b'\\x80\\x04.')",
    "a frame without fields": "frame()",
    "output of a stream that is none": "frame(ev=b'out', id=call['id'], stream=b'stdlog', data=b'x')",
}


@pytest.mark.parametrize("forgery", IGNORED.values(), ids=IGNORED)
async def test_answers_that_are_not_the_calls_are_ignored(launcher: LauncherClient, forgery: str) -> None:
    agent = (
        f"control.sendall(READY); call = receive(); control.sendall({forgery})\n"
        "control.sendall(frame(ev=b'done', id=call['id'], nonce=call['nonce'], exit_code=b'7')); time.sleep(1000)"
    )
    async with sandbox_of(launcher, agent) as sandbox:
        execution = await execute(sandbox, timeout_s=60)
        assert (execution.ending, execution.exit_code) == (Ending.FINISHED, 7)
        assert execution.stdout.text == ""


@pytest.mark.parametrize("code", ["b'9' * 10000", "b'-1'", "b'1e3'", "b''", "b'\\xd9\\xa1'", "b'0x10'"])
async def test_an_exit_code_that_is_none_is_none(launcher: LauncherClient, code: str) -> None:
    agent = (
        "control.sendall(READY); call = receive()\n"
        f"control.sendall(frame(ev=b'done', id=call['id'], nonce=call['nonce'], exit_code={code})); time.sleep(1000)"
    )
    async with sandbox_of(launcher, agent) as sandbox:
        assert (await execute(sandbox, timeout_s=60)).exit_code is None


async def test_two_answers_are_one(launcher: LauncherClient) -> None:
    agent = (
        "control.sendall(READY); call = receive()\n"
        "done = frame(ev=b'done', id=call['id'], nonce=call['nonce'], exit_code=b'1')\n"
        "late = frame(ev=b'out', id=call['id'], stream=b'stdout', data=b'late')\n"
        "control.sendall(done + done + late); time.sleep(1000)"
    )
    async with sandbox_of(launcher, agent) as sandbox:
        execution = await execute(sandbox, timeout_s=60)
        assert (execution.exit_code, execution.stdout.text) == (1, "")
        assert sandbox.is_alive


async def test_a_flood_is_counted_and_stopped_and_other_work_goes_on(launcher: LauncherClient) -> None:
    agent = (
        "control.sendall(READY); call = receive()\n"
        "piece = frame(ev=b'out', id=call['id'], stream=b'stdout', data=b'x' * 60000)\n"
        "while True: control.sendall(piece)"
    )
    async with sandbox_of(launcher, agent) as sandbox:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0)

        ticking = asyncio.create_task(tick())
        execution = await execute(sandbox, timeout_s=60)
        ticking.cancel()
        assert execution.ending is Ending.LIMIT
        assert len(execution.stdout.text) < 100_000
        assert ticks > 10


async def test_an_agent_that_neither_reads_nor_answers_ends_at_its_deadline(launcher: LauncherClient) -> None:
    async with sandbox_of(launcher, "control.sendall(READY); time.sleep(1000)") as sandbox:
        execution = await sandbox.execute(
            "shell", {"command": "x" * 1_000_000}, timeout_s=1, grace_s=0.1, output=OutputLimits()
        )
        assert execution.ending is Ending.TIMED_OUT
        assert not sandbox.is_alive


async def test_an_agent_that_dies_takes_its_calls_with_it(launcher: LauncherClient) -> None:
    async with sandbox_of(launcher, "control.sendall(READY); receive(); os._exit(9)") as sandbox:
        execution = await execute(sandbox, timeout_s=60)
        assert execution.ending is Ending.INTERRUPTED
        assert execution.reason == "the sandbox ended (status 9)"

"""Attacks by exhaustion: processes, memory, disk, output, time. The sandbox stops them, and goes on working or says why not."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

import pytest
import pytest_asyncio

from agent_program.tool_events import ToolOutcome
from support.attacks import PRELUDE
from support.tools import Program, processes_with, tool_actor
from support.waiting import wait_for, wait_for_async
from tool_runtime import program_sandboxes
from tool_runtime.config import MIB, OutputLimits, SandboxBackend, SandboxLimits
from tool_runtime.tool_call import ToolResult

pytestmark = [pytest.mark.adversarial, pytest.mark.asyncio(loop_scope="module")]

MEMORY_MAX = 256 * MIB


@pytest.fixture(scope="module", autouse=True)
def _quick_looks_at_disks() -> Iterator[None]:
    """Disks are looked at as often as memory is, so that filling one is found when it is full and not seconds later."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program_sandboxes, "_DISK_WATCH_S", 0.1)
        patch.setattr(program_sandboxes, "_DISK_GRACE_S", 0.2)
        yield


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sandbox_actor(backend: SandboxBackend):
    """Tighter limits than usual, so that reaching them costs little."""
    limits = SandboxLimits(
        processes_max=64,
        memory_bytes_max=MEMORY_MAX,
        tmp_bytes_max=16 * MIB,
        file_bytes_max=32 * MIB,
        workspace_bytes_max=64 * MIB,
        workspace_files_max=3000,
        tmp_files_max=3000,
    )
    output = OutputLimits(hard_bytes_max=4 * MIB)
    async with tool_actor(sandbox=backend, limits=limits, output=output, interrupt_grace_s=0.2) as actor:
        yield actor


async def works(program: Program) -> bool:
    return (await program.shell("echo works", timeout_s=60)).output.splitlines()[0] == "works"


async def test_a_fork_bomb_is_capped_and_gone_after_its_call(program: Program) -> None:
    mark = f"bomb-{os.getpid()}"
    result = await program.shell(f"f() {{ sleep 600.{os.getpid()} & f | f & }}; {mark}=1; f; wait", timeout_s=2)
    assert result.outcome is not ToolOutcome.OK
    assert await works(program)
    wait_for(lambda: not processes_with(f"sleep\0600.{os.getpid()}"), what="the bomb's processes are gone")


async def test_the_number_of_processes_is_capped(program: Program) -> None:
    result = await program.python(
        """
import os
made = 0
try:
    for _ in range(300):
        if os.fork() == 0:
            os.pause() if hasattr(os, "pause") else __import__("signal").pause()
        made += 1
except BlockingIOError:
    pass
import time; time.sleep(0.5)
made
"""
    )
    if "ran more than 64 processes" in result.output:
        assert await works(program)
        return
    assert 32 <= int(result.output.splitlines()[0]) < 64
    # The program's own processes fill its own limit: nothing can start until they are gone.
    await program.shell("exit", timeout_s=5)
    await program.python("for _ in range(made): pass\nimport os, signal\nos.killpg(0, signal.SIGKILL)", timeout_s=5)
    assert await works(program)


async def test_the_number_of_threads_is_capped(program: Program) -> None:
    result = await program.python(
        """
import threading
done = threading.Event()
made = 0
try:
    for _ in range(300):
        threading.Thread(target=done.wait, daemon=True).start()
        made += 1
except RuntimeError:
    pass
import time; time.sleep(0.5)
done.set()
made
"""
    )
    assert "ran more than 64 processes" in result.output or 32 <= int(result.output.splitlines()[-1]) < 64
    assert await works(program)


async def test_two_programs_do_not_share_one_process_limit(program: Program, neighbour: Program) -> None:
    for one in (program, neighbour):
        started = await one.shell("for i in $(seq 40); do sleep 100 & done; jobs | wc -l")
        assert started.output == "40"


MEMORY_ATTACKS = {
    "one large allocation": "held = bytearray(1024 * 2**20)\nfor i in range(0, len(held), 4096): held[i] = 1",
    "many medium processes": """
import os, time
for _ in range(12):
    if os.fork() == 0:
        held = bytearray(60 * 2**20)
        for i in range(0, len(held), 4096): held[i] = 1
        time.sleep(100)
time.sleep(100)
""",
    "memory files that are not mapped": """
import os, time
held = []
for _ in range(40):
    held.append(os.memfd_create("held"))
    os.write(held[-1], bytes(30 * 2**20))
time.sleep(100)
""",
    "shared mappings": """
import mmap, time
held = []
for _ in range(40):
    held.append(mmap.mmap(-1, 30 * 2**20))
    for i in range(0, 30 * 2**20, 4096): held[-1][i] = 1
time.sleep(100)
""",
}


@pytest.mark.parametrize("attack", MEMORY_ATTACKS.values(), ids=MEMORY_ATTACKS)
async def test_memory_is_bounded_over_all_processes_and_kinds(program: Program, attack: str) -> None:
    result = await program.python(attack, timeout_s=60)
    assert result.outcome is ToolOutcome.ERROR
    assert "used more than 256 MiB of memory" in result.output or "MemoryError" in result.output
    assert await works(program)


async def test_a_background_job_is_held_to_the_memory_limit_too(program: Program) -> None:
    hog = (
        "held = bytearray(900 * 2**20)\nfor i in range(0, len(held), 4096): held[i] = 1\nimport time; time.sleep(1000)"
    )
    await program.run("write_file", {"path": "hog.py", "content": hog})
    await program.shell("python3 hog.py & ")

    async def is_told() -> bool:
        told = (await program.shell("sleep 0.1")).output
        return "This shell session is new" in told or "used more than 256 MiB" in told

    await wait_for_async(is_told, what="the program learns that its sandbox was killed")
    assert await works(program)


@pytest.mark.parametrize("place", ["/tmp", "/dev/shm"])
async def test_filesystems_in_memory_are_bounded(program: Program, place: str) -> None:
    fill = f"head -c 30M /dev/zero > {place}/a; head -c 30M /dev/zero > {place}/b; du -sm {place}; rm -f {place}/*"
    result = await program.shell(fill)
    # The lower tier has no such places at all.
    assert "No space left on device" in result.output or "Permission denied" in result.output
    assert int(result.output.split()[0]) <= 17


@pytest.mark.parametrize("place", ["/tmp", "/dev/shm"])
async def test_filesystems_in_memory_cannot_be_filled_with_names(program: Program, place: str) -> None:
    """An empty file there takes a kilobyte of the kernel's memory, which no limit on content or processes counts."""
    result = await program.python(
        f"import time\nfor i in range(10**9):\n    open(f'{place}/f{{i}}', 'w').close()\n    if i > 50_000: time.sleep(0.1)",
        timeout_s=100,
    )
    assert result.outcome is ToolOutcome.ERROR
    assert "it made more than 3000 files in /tmp or /dev/shm" in result.output or "Permission denied" in result.output
    assert await works(program)


async def test_one_file_is_bounded(program: Program) -> None:
    result = await program.shell("head -c 100M /dev/zero > big; stat -c %s big; rm big")
    assert result.output.splitlines()[0] == str(32 * MIB)


FILL = "for i in $(seq 20); do head -c 20M /dev/zero > fill$i; done; sleep 100"


async def test_a_disk_cannot_be_filled_with_many_files(program: Program) -> None:
    result = await program.shell(FILL, timeout_s=100)
    assert result.outcome is ToolOutcome.ERROR
    assert "the workspace holds more than 64 MiB; delete files" in result.output
    assert (await program.shell("rm fill*; echo works")).output.splitlines()[0] == "works"


async def test_who_never_deletes_runs_no_more(program: Program) -> None:
    for _ in range(3):
        assert "the workspace holds more than 64 MiB" in (await program.shell(FILL, timeout_s=100)).output
    (refused,) = await program.events("shell", {"command": "true"})
    assert isinstance(refused, ToolResult)
    assert refused.output == "No more calls run: the workspace holds more than 64 MiB; delete files."
    await program.actor.release(program.id, delete_workspace=True)
    assert await works(program)


async def test_a_disk_cannot_be_filled_with_names(program: Program) -> None:
    result = await program.python(
        "import time\nfor i in range(10**9):\n    open(f'f{i}', 'w').close()\n    if i > 50_000: time.sleep(0.1)",
        timeout_s=100,
    )
    assert result.outcome is ToolOutcome.ERROR
    assert "the workspace holds more than 3000 files" in result.output


OUTPUTS = {
    "yes for ever": "yes",
    "one line of a gigabyte": "head -c 1G /dev/zero | tr '\\0' x",
    "binary": "cat /dev/urandom",
    "nul bytes": "cat /dev/zero",
    "on the error stream": "yes >&2",
    "colours": "while :; do printf '\\033[31m%0500d\\033[0m' 1; done",
}


@pytest.mark.parametrize("command", OUTPUTS.values(), ids=OUTPUTS)
async def test_output_without_end_is_stopped_and_bounded(program: Program, command: str) -> None:
    result = await program.shell(command, timeout_s=100)
    assert result.outcome is ToolOutcome.ERROR
    assert "it printed too much" in result.output
    assert len(result.output) < 400_000
    assert "\x00" not in result.output
    assert "\x1b" not in result.output
    assert await works(program)


async def test_a_spinning_program_does_not_starve_its_neighbours(program: Program, neighbour: Program) -> None:
    spinning = await program.shell_running("for i in 1 2 3 4; do (while :; do :; done) & done; wait", timeout_s=60)
    for i in range(5):
        assert (await neighbour.shell(f"echo {i}", timeout_s=30)).output.splitlines()[0] == str(i)
    await program.actor.cancel(program.id)
    assert (await spinning).outcome is ToolOutcome.CANCELLED


async def test_many_programs_that_hang_end_on_time_with_what_they_printed(program: Program) -> None:
    programs = [Program(program.actor) for _ in range(6)]
    results = await asyncio.gather(
        *(one.shell("echo partial; trap '' INT TERM; sleep infinity & sleep infinity", timeout_s=1) for one in programs)
    )
    for result in results:
        assert result.outcome is ToolOutcome.TIMEOUT
        assert result.output.startswith("partial")


async def test_too_many_open_files_are_refused_to_the_program_alone(program: Program, neighbour: Program) -> None:
    result = await program.python(
        PRELUDE
        + "\nheld = []\ntry:\n    while True: held.append(os.open('/dev/null', 0))\nexcept OSError as e: print(e.strerror, len(held))"
    )
    assert result.output.startswith("Too many open files 10")
    assert await works(neighbour)

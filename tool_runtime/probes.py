"""Canaries: before an actor takes calls it tries, in a sandbox made like all others, what must fail there.

A backend that lets one through is refused, and so is one in which an ordinary command does not work. The host plants what
the probe looks for: a readable file, a listener on 127.0.0.1, an abstract socket. Each probe prints one line, `name=held` or
`name=OPEN …`; a line that is missing counts as open. No probe changes anything where it gets through.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from agent_program.errors import SandboxUnavailable
from agent_program.ids import DEFAULT_TENANT, ProgramId
from tool_runtime.config import OutputLimits, SandboxLimits
from tool_runtime.live_sandbox import LiveSandbox
from tool_runtime.sandbox import Ending, Execution, KillScope, Sandboxing, SandboxSpec
from tool_runtime.spawning import Launcher
from tool_runtime.workspaces import Workspaces

_TIMEOUT_S = 30.0

_SCRIPT = r'''
import ctypes, os, platform, socket, stat
libc = ctypes.CDLL(None, use_errno=True)
found = {}

def holds(name):
    def run(attack):
        try:
            answer = attack()
        except (OSError, ConnectionError):
            answer = None
        print(f"{name}=held" if not answer else f"{name}=OPEN {answer}")
    return run

def refused(*arguments):
    """A system call that must fail with an error that says it is not allowed or not there.

    Arguments are chosen so that it fails in another way, or does nothing, where it is allowed.
    """
    number = {"x86_64": 0, "aarch64": 1}[platform.machine()]
    value = libc.syscall(arguments[0][number], *arguments[1:])
    return None if value < 0 and ctypes.get_errno() in (1, 13, 38) else f"answers {value}, errno {ctypes.get_errno()}"

def connects(family, address):
    with socket.socket(family, socket.SOCK_STREAM) as client:
        client.settimeout(2)
        client.connect(address)
    return "connects"

def opens(path, flags):
    os.close(os.open(path, flags))
    return path

@holds("host file")
def _():
    return opens(SECRET, os.O_RDONLY)

@holds("host listener")
def _():
    return connects(socket.AF_INET, ("127.0.0.1", PORT))

@holds("abstract socket")
def _():
    return connects(socket.AF_UNIX, "\0" + ABSTRACT)

@holds("system files")
def _():
    return opens("/usr", os.O_WRONLY | os.O_TMPFILE)

@holds("root directory")
def _():
    return opens("/", os.O_WRONLY | os.O_TMPFILE)

@holds("kernel settings")
def _():
    return opens("/proc/sys/kernel/core_pattern", os.O_WRONLY)

@holds("host processes")
def _():
    try:
        os.kill(HOST_PID, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        return None if not ISOLATES_PIDS else "visible"
    return "can be signalled"

@holds("environment of the platform")
def _():
    if os.environ.get("RAY_ADDRESS") or os.environ.get("CONTINUUM_CANARY"):
        return "own environment"
    with open("/proc/1/environ", "rb") as environment:
        return "environment of process 1" if environment.read(1) else None

@holds("inherited descriptors")
def _():
    # Everything that is open is a pipe or a character device. Tried by number: there may be no /proc.
    strange = []
    for fd in range(1024):
        try:
            mode = os.fstat(fd).st_mode
        except OSError:
            continue
        if not stat.S_ISFIFO(mode) and not stat.S_ISCHR(mode):
            strange.append(fd)
    return strange or None

@holds("limits of other processes")
def _():
    # Reading them is as good a sign as changing them, and changes nothing. That there is no such process will do.
    answer = refused((302, 261), HOST_PID, 7, None, ctypes.create_string_buffer(16))
    return None if ctypes.get_errno() == 3 else answer

@holds("root user")
def _():
    return "runs as uid 0" if os.getuid() == 0 else None

@holds("new namespaces")
def _():
    return refused((272, 97), 0)

@holds("keyrings")
def _():
    return refused((250, 219), 9999)

@holds("io_uring")
def _():
    return refused((425, 425), 1, None)

@holds("ptrace")
def _():
    return refused((101, 117), 9999, 0, 0, 0)

@holds("mounts")
def _():
    return refused((165, 40), -1, -1, -1, 0, None)

@holds("vsock")
def _():
    with socket.socket(40, socket.SOCK_STREAM):
        return "opens"

with open("canary", "w") as own:
    own.write("works")
print("own workspace=" + ("held" if open("canary").read() == "works" else "OPEN cannot be written"))
'''

_NAMES = (
    *("host file", "host listener", "abstract socket", "system files", "root directory", "kernel settings"),
    *("host processes", "environment of the platform", "inherited descriptors", "root user", "new namespaces"),
    "limits of other processes",
    *("keyrings", "io_uring", "ptrace", "mounts", "vsock", "own workspace"),
)


async def failures(
    backend: Sandboxing,
    launcher: Launcher,
    workspaces: Workspaces,
    limits: SandboxLimits,
    *,
    start_timeout_s: float,
) -> list[str]:
    """What `backend` does not hold here, or why it does not run at all; empty if it is fit for use."""
    program = ProgramId(f"canary-{secrets.token_hex(8)}")
    spec = SandboxSpec(
        workspace=workspaces.ensure(DEFAULT_TENANT, program), uid=workspaces.uid(DEFAULT_TENANT, program), limits=limits
    )
    try:
        sandbox = await LiveSandbox.start(launcher, backend.plan(spec), timeout_s=start_timeout_s)
        try:
            with _bait() as settings:
                settings["ISOLATES_PIDS"] = backend.plan(spec).kill_scope is KillScope.NAMESPACE
                answers = await ask(sandbox, _SCRIPT, settings, OutputLimits())
        finally:
            await sandbox.close()
    except SandboxUnavailable as exc:
        return [exc.message]
    finally:
        await asyncio.to_thread(workspaces.delete, DEFAULT_TENANT, program)
    return answers.faults(_NAMES)


@dataclass(frozen=True, kw_only=True, slots=True)
class Answers:
    """What a sandbox printed when it was asked."""

    probe: Execution
    shell: Execution

    def faults(self, names: Sequence[str]) -> list[str]:
        """Which of the probes called `names` did not hold, and what does not work."""
        printed = self.probe.stdout.text
        answers = dict(line.split("=", 1) for line in printed.splitlines() if "=" in line)
        found = [f"{name}: {answers.get(name, 'no answer')}" for name in names if answers.get(name) != "held"]
        if self.probe.ending is not Ending.FINISHED or self.probe.exit_code != 0:
            found.append(f"the probe did not finish: {self.probe.reason or self.probe.stderr.text[-500:]}")
        if self.shell.stdout.text != "works\n":
            found.append(f"the shell does not work: {self.shell.reason or self.shell.stderr.text[-500:]}")
        return found


async def ask(sandbox: LiveSandbox, script: str, settings: Mapping[str, object], output: OutputLimits) -> Answers:
    """Run a script of probes, with `settings` as its variables, and an ordinary command."""
    code = "".join(f"{name} = {value!r}\n" for name, value in settings.items()) + script
    probe = await sandbox.execute("python", {"code": code}, timeout_s=_TIMEOUT_S, grace_s=0, output=output)
    shell = await sandbox.execute("shell", {"command": "echo works"}, timeout_s=_TIMEOUT_S, grace_s=0, output=output)
    return Answers(probe=probe, shell=shell)


@contextmanager
def _bait() -> Iterator[dict[str, object]]:
    """Things on the host that a sandbox must not reach."""
    abstract = f"continuum-canary-{secrets.token_hex(8)}"
    with (
        tempfile.NamedTemporaryFile(prefix="continuum-canary-") as secret,
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as local,
    ):
        Path(secret.name).chmod(0o644)
        local.bind("\0" + abstract)
        local.listen()
        yield {
            "SECRET": secret.name,
            "PORT": listener.getsockname()[1],
            "ABSTRACT": abstract,
            "HOST_PID": os.getpid(),
        }


def describe(found: list[str]) -> str:
    """Failures on one line."""
    return json.dumps(found) if len(found) != 1 else found[0]

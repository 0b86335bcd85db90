"""The actor's side of the launcher (`launcher.py`): start it, ask it for sandboxes, hear of their deaths."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import logging
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from agent_program.errors import SandboxUnavailable
from tool_runtime.launcher import PACKET_BYTES_MAX
from tool_runtime.sandbox import SpawnPlan
from tool_runtime.spawning import Exit, RemoteFiles, Spawned

_LOG = logging.getLogger(__name__)
_STOP_TIMEOUT_S = 10.0
#: Isolated from the environment and from site-packages: the launcher needs the standard library and two modules of ours.
_LAUNCHER = (
    f"import sys; sys.path.insert(0, {str(Path(__file__).resolve().parent.parent)!r}); "
    "from tool_runtime import launcher; launcher.main(int(sys.argv[1]), sys.argv[2])"
)


class LauncherClient:
    """One launcher process, started again should it die. Belongs to one event loop."""

    #: Sandboxes see the workspaces themselves.
    files: RemoteFiles | None = None

    def __init__(self) -> None:
        #: Where the launcher, once it is started, may make a cgroup for each sandbox.
        self.cgroup_parent: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._defined: dict[str, bytes] = {}
        self._starting: dict[str, asyncio.Future[Spawned]] = {}
        self._running: dict[str, asyncio.Future[Exit]] = {}
        self._ids = itertools.count(1)
        self._start_lock = asyncio.Lock()

    @property
    def is_alive(self) -> bool:
        """The launcher runs (it is started by the first `spawn`)."""
        return self._process is not None and self._process.poll() is None and self._control is not None

    async def spawn(self, plan: SpawnPlan) -> Spawned:
        """Start `plan`.

        Raises:
            SandboxUnavailable: the launcher cannot start it; the message has the reason.
        """
        async with self._start_lock:
            if not self.is_alive:
                await self._start()
        for name, content in plan.blobs.items():
            if self._defined.get(name) != content:
                await self._send({"op": "define", "name": name, "data": base64.b64encode(content).decode()})
                self._defined[name] = content
        child_id = str(next(self._ids))
        started: asyncio.Future[Spawned] = asyncio.get_running_loop().create_future()
        self._starting[child_id] = started
        await self._send(
            {
                "op": "spawn",
                "id": child_id,
                "memory_bytes_max": plan.memory_bytes_max,
                "processes_max": plan.processes_max,
                "cgroup_processes_max": plan.cgroup_processes_max,
                "cpus_max": plan.cpus_max,
                "tmp_files_max": plan.tmp_files_max,
                "executable": plan.executable,
                "argv": plan.argv,
                "args": plan.extra_args,
                "blobs": list(plan.blobs),
                "own_blobs": {name: base64.b64encode(data).decode() for name, data in plan.own_blobs.items()},
                "env": dict(plan.environment),
                "cwd": plan.cwd,
                "uid": plan.uid,
                "scope": plan.kill_scope.value,
            }
        )
        # Should the caller be cancelled here, the future is too, and `_on_started` ends what nobody waits for.
        return await started

    async def watch(self, child: Spawned, *, is_busy: bool) -> None:
        """Have the sandbox's memory looked at often while something runs in it, and otherwise now and then."""
        if child.id in self._running and self.is_alive:
            await self._send({"op": "watch", "id": child.id, "is_busy": is_busy})

    async def kill(self, child: Spawned) -> None:
        """SIGKILL to everything in a sandbox; `child.exited` is set when it is gone."""
        if child.id in self._running and self.is_alive:
            await self._send({"op": "kill", "id": child.id})

    async def close(self) -> None:
        """End the launcher and every sandbox; returns when nothing is left."""
        process = self._process
        self._disconnect()
        if process is not None:
            try:
                await asyncio.to_thread(process.wait, _STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                _LOG.error("the sandbox launcher does not end; killing it")
                process.kill()
                await asyncio.to_thread(process.wait)
            self._process = None

    async def _start(self) -> None:
        self._disconnect()
        if self._process is not None:
            await asyncio.to_thread(self._process.wait)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._process = _start_launcher(theirs.fileno(), self.cgroup_parent)
        except OSError as exc:
            ours.close()
            raise SandboxUnavailable(f"the sandbox launcher cannot be started: {exc}") from exc
        finally:
            theirs.close()
        ours.setblocking(False)
        self._control = ours
        asyncio.get_running_loop().add_reader(ours.fileno(), self._on_readable)

    def _disconnect(self) -> None:
        if self._control is not None:
            asyncio.get_running_loop().remove_reader(self._control.fileno())
            self._control.close()
            self._control = None
        self._defined.clear()
        for started in self._starting.values():
            if not started.done():
                started.set_exception(SandboxUnavailable("the sandbox launcher ended"))
        for exited in self._running.values():
            if not exited.done():
                exited.set_result(Exit(status=None, stderr="the sandbox launcher ended"))
        self._starting.clear()
        self._running.clear()

    async def _send(self, message: dict[str, Any]) -> None:
        if self._control is None:
            raise SandboxUnavailable("the sandbox launcher is not running")
        data = json.dumps(message).encode()
        if len(data) > PACKET_BYTES_MAX:
            raise SandboxUnavailable(f"a launcher message of {len(data)} bytes")
        try:
            await asyncio.get_running_loop().sock_sendall(self._control, data)
        except OSError as exc:
            self._disconnect()
            raise SandboxUnavailable(f"the sandbox launcher ended: {exc}") from exc

    def _on_readable(self) -> None:
        assert self._control is not None
        try:
            data, fds, _, _ = socket.recv_fds(self._control, PACKET_BYTES_MAX, 1)
        except BlockingIOError:
            return
        except OSError:
            data, fds = b"", []
        if not data:
            _LOG.error("the sandbox launcher ended unasked")
            self._disconnect()
            return
        message = json.loads(data)
        child_id = message["id"]
        if message["event"] == "started":
            self._on_started(child_id, message["pid"], socket.socket(fileno=fds[0]))
        elif message["event"] == "failed":
            started = self._starting.pop(child_id, None)
            if started is not None and not started.done():
                started.set_exception(SandboxUnavailable(f"the sandbox cannot be started: {message['error']}"))
        elif message["event"] == "exited":
            exited = self._running.pop(child_id, None)
            if exited is not None and not exited.done():
                exited.set_result(Exit(status=message["status"], stderr=message["stderr"], reason=message["reason"]))

    def _on_started(self, child_id: str, pid: int, stream: socket.socket) -> None:
        exited: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
        self._running[child_id] = exited
        stream.setblocking(False)
        started = self._starting.pop(child_id)
        child = Spawned(id=child_id, pid=pid, socket=stream, exited=exited)
        if started.cancelled():
            stream.close()  # ends the agent, and with it the sandbox
        else:
            started.set_result(child)


def _start_launcher(control_fd: int, cgroup_parent: Path | None) -> subprocess.Popen[bytes]:
    # An environment of its own, empty: nothing of the platform's can leak through it. A session of its own: a terminal's
    # Ctrl-C reaches the actor, which then ends the launcher in order.
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(control_fd), str(cgroup_parent or "")],
        stdin=subprocess.DEVNULL,
        pass_fds=[control_fd],
        env={},
        start_new_session=True,
    )

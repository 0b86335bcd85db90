"""The launcher: a small process of one thread that starts sandboxes for a tool actor and ends with it.

Why it exists. A sandbox dies with the *thread* that started it (PR_SET_PDEATHSIG is per thread), so it must not be started
from a thread pool; a Ray worker has many threads, and nothing may run between fork and exec there; and when the actor is
killed without a word, someone must see to it that its sandboxes end. This process does the three things: it has one thread,
it forks, and when its socket to the actor closes it exits, which kills every sandbox that has `--die-with-parent`; what is
left, it kills by hand.

It imports the standard library, `process_tree` and `cgroups` only, and trusts its one peer, the actor. One packet is one message, JSON
both ways:

    define {name, data}                                   keep a blob for later plans
    spawn  {id, limits…, executable, argv, args, blobs, own_blobs, env, cwd, uid, scope}  → started {id, pid} + the agent's socket | failed {id, error}
    watch  {id, is_busy}                                  → (nothing: look at its memory often, or now and then)
    kill   {id}                                           → (nothing; `exited` follows)
                                                          ← exited {id, status, stderr, reason}

A plan's `{fd:NAME}` words become descriptor numbers here: `control` is the agent's socket, `args` a memory file with the
NUL-separated arguments, any other a memory file with the blob of that name.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tool_runtime.cgroups import NoCgroup, SandboxCgroup
from tool_runtime.process_tree import (
    become_subreaper,
    children_of,
    descendants,
    files_in_memory,
    holds_more_than,
    kill,
    kill_descendants,
    threads,
)

PACKET_BYTES_MAX = 180_000
_STDERR_BYTES_MAX = 4096
#: How often the memory of a sandbox is looked at: while something runs in it, and otherwise (background jobs go on).
_BUSY_WATCH_S, _IDLE_WATCH_S = 0.1, 2.0
_FD_WORD = re.compile(r"\{fd:([A-Za-z0-9_.-]+)\}")


class Child:
    """A sandbox's outermost process."""

    def __init__(self, process: subprocess.Popen[bytes], message: dict[str, Any], cgroup: SandboxCgroup | None) -> None:
        self.process = process
        self.scope: str = message["scope"]
        self.cgroup = cgroup
        self._memory_bytes_max: int = message["memory_bytes_max"]
        self._processes_max: int | None = message["processes_max"]
        self._tmp_files_max: int | None = message["tmp_files_max"]
        self.is_busy = True
        self.watched_s = time.monotonic()
        #: It was told to end by the end of its init; the next look kills it if it did not.
        self.is_killed = False
        #: Why it was killed, where that was our doing.
        self.reason = ""
        self.stderr = b""
        assert process.stderr is not None
        self.stderr_fd = process.stderr.fileno()
        os.set_blocking(self.stderr_fd, False)

    def excess(self) -> str:
        """What it has too much of, in words; empty if nothing."""
        pids = descendants(self.process.pid)
        if self._processes_max is not None and threads(pids) > self._processes_max:
            return f"it ran more than {self._processes_max} processes"
        if holds_more_than(self._memory_bytes_max, pids):
            return f"it used more than {self._memory_bytes_max // 2**20} MiB of memory"
        if self._tmp_files_max is not None and files_in_memory(children_of(self.process.pid)) > self._tmp_files_max:
            return f"it made more than {self._tmp_files_max} files in /tmp or /dev/shm"
        return ""

    def read_stderr(self) -> bool:
        """Keep the first few KiB of what it says; False at the end of the file."""
        try:
            data = os.read(self.stderr_fd, 65536)
        except BlockingIOError:
            return True
        self.stderr = (self.stderr + data)[:_STDERR_BYTES_MAX]
        return bool(data)


class Launcher:
    """Children by the id that the actor gave them."""

    def __init__(self, control: socket.socket, cgroup_parent: str) -> None:
        """`cgroup_parent` is "" where sandboxes get no cgroups."""
        self._control = control
        self._cgroup_parent = cgroup_parent
        self._children: dict[str, Child] = {}
        self._blobs: dict[str, bytes] = {}
        self._poll = select.poll()
        self._stderr_of: dict[int, Child] = {}
        # SIGCHLD writes a byte here, so that one poll waits for packets, error output and deaths alike.
        self._wake_read, wake_write = os.pipe()
        for fd in (self._wake_read, wake_write):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def serve(self) -> None:
        """Work until the actor's end of the socket is closed."""
        self._poll.register(self._control.fileno(), select.POLLIN)
        self._poll.register(self._wake_read, select.POLLIN)
        while True:
            for fd, _ in self._poll.poll(self._watch()):
                if fd == self._control.fileno():
                    packet = self._control.recv(PACKET_BYTES_MAX)
                    if not packet:
                        return
                    self._on_packet(json.loads(packet))
                elif fd == self._wake_read:
                    os.read(self._wake_read, 4096)
                    self._reap()
                    self._reap_orphans()
                elif fd in self._stderr_of and not self._stderr_of[fd].read_stderr():
                    self._poll.unregister(fd)

    def _on_packet(self, message: dict[str, Any]) -> None:
        operation = message["op"]
        if operation == "define":
            self._blobs[message["name"]] = base64.b64decode(message["data"])
        elif operation == "spawn":
            self._spawn(message)
        elif message["id"] in self._children:
            child = self._children[message["id"]]
            if operation == "kill":
                self._kill(child)
            elif operation == "watch":
                child.is_busy = message["is_busy"]

    def _spawn(self, message: dict[str, Any]) -> None:
        ours, theirs = socket.socketpair()
        opened = [theirs.fileno()]
        cgroup, enter = None, -1
        try:
            if self._cgroup_parent:
                cgroup, enter = self._new_cgroup(message)
            fds = {"control": theirs.fileno()}
            contents = {name: self._blobs[name] for name in message["blobs"]}
            contents |= {name: base64.b64decode(data) for name, data in message["own_blobs"].items()}
            for name, content in contents.items():
                fds[name] = _memory_file(name, content)
                opened.append(fds[name])
            if message["args"]:
                arguments = b"".join(os.fsencode(_with_fds(word, fds)) + b"\0" for word in message["args"])
                fds["args"] = _memory_file("args", arguments)
                opened.append(fds["args"])
            uid = message["uid"]
            process = subprocess.Popen(
                [_with_fds(word, fds) for word in message["argv"]],
                executable=message["executable"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                cwd=message["cwd"],
                env=message["env"],
                pass_fds=opened,
                start_new_session=True,
                # The one thread there is may run Python between fork and exec; what starts there is in the cgroup.
                preexec_fn=None if cgroup is None else lambda: os.write(enter, b"0"),
                **({} if uid is None else {"user": uid, "group": uid, "extra_groups": []}),
            )
        except (OSError, subprocess.SubprocessError, KeyError, NoCgroup) as exc:
            ours.close()
            if cgroup is not None:
                cgroup.remove()
            self._send({"event": "failed", "id": message["id"], "error": f"{type(exc).__name__}: {exc}"})
            return
        finally:
            theirs.close()
            for fd in (*opened[1:], *((enter,) if enter >= 0 else ())):
                os.close(fd)
        child = self._children[message["id"]] = Child(process, message, cgroup)
        self._stderr_of[child.stderr_fd] = child
        self._poll.register(child.stderr_fd, select.POLLIN)
        self._send({"event": "started", "id": message["id"], "pid": process.pid}, ours.fileno())
        ours.close()

    def _new_cgroup(self, message: dict[str, Any]) -> tuple[SandboxCgroup, int]:
        cgroup = SandboxCgroup(Path(self._cgroup_parent), f"sandbox-{os.getpid()}-{message['id']}")
        cgroup.make(
            memory_bytes_max=message["memory_bytes_max"],
            processes_max=message["cgroup_processes_max"],
            cpus_max=message["cpus_max"],
        )
        return cgroup, cgroup.open_procs()

    def _reap(self) -> None:
        for child_id, child in list(self._children.items()):
            if child.process.poll() is None:
                continue
            child.read_stderr()
            del self._children[child_id]
            if self._stderr_of.pop(child.stderr_fd, None) is not None:
                with contextlib.suppress(KeyError):  # its end of file was seen before
                    self._poll.unregister(child.stderr_fd)
            child.process.stderr.close()  # type: ignore[union-attr]
            if child.scope != "namespace":
                self._kill_orphans()
            if child.cgroup is not None:
                child.reason = child.reason or child.cgroup.excess()
                child.cgroup.remove()
            self._send(
                {
                    "event": "exited",
                    "id": child_id,
                    "status": child.process.returncode,
                    "stderr": child.stderr.decode("utf-8", "replace"),
                    "reason": child.reason,
                }
            )

    def _watch(self) -> int | None:
        """Kill what holds more memory than it may; returns for how many milliseconds nothing needs to be looked at."""
        now_s = time.monotonic()
        next_s = None
        for child in self._children.values():
            due_s = child.watched_s + (_IDLE_WATCH_S if not child.is_busy or child.is_killed else _BUSY_WATCH_S)
            if due_s <= now_s:
                child.watched_s = now_s
                due_s = now_s + _BUSY_WATCH_S
                if child.is_killed:
                    self._kill(child)
                elif not child.reason:
                    child.reason = child.excess()
                    if child.reason:
                        self._kill(child)
            next_s = due_s if next_s is None else min(next_s, due_s)
        return None if next_s is None else max(1, int((next_s - now_s) * 1000))

    def _kill(self, child: Child) -> None:
        if child.cgroup is not None:
            child.cgroup.kill()
        if child.scope != "namespace":
            # Stopped, the agent neither starts more nor tells of each death; it stays the one that orphans come to.
            child.process.send_signal(signal.SIGSTOP)
            kill_descendants(child.process.pid)
            child.process.kill()
            return
        # The init of the namespace is the child of the outermost process. Killed by itself, it ends only when everything
        # inside has ended, and the outermost process after it: so that `exited` means that nothing is left.
        inits = children_of(child.process.pid)
        for init in inits:
            kill(init)
        if not inits or child.is_killed:
            child.process.kill()
        child.is_killed = True
        child.watched_s = time.monotonic()

    def _kill_orphans(self) -> None:
        """What a sandbox leaves behind when its outermost process dies becomes our child, for we are a subreaper."""
        known = {child.process.pid for child in self._children.values()}
        for pid in children_of(os.getpid()):
            if pid not in known:
                kill_descendants(pid)
                kill(pid)

    def _reap_orphans(self) -> None:
        known = {child.process.pid for child in self._children.values()}
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None or ended.si_pid in known:
                return
            os.waitpid(ended.si_pid, 0)

    def close(self) -> None:
        """Kill what still runs and wait for it."""
        for child in self._children.values():
            self._kill(child)
        # None is left to whatever the machine has for an init. Who does not end with its init is killed itself.
        deadline_s = time.monotonic() + _IDLE_WATCH_S
        with contextlib.suppress(ChildProcessError):
            while time.monotonic() < deadline_s:
                if os.waitpid(-1, os.WNOHANG)[0] == 0:
                    time.sleep(0.005)
            for child in self._children.values():
                kill(child.process.pid)
            self._kill_orphans()
            while True:
                os.waitpid(-1, 0)

    def _send(self, message: dict[str, Any], fd: int | None = None) -> None:
        data = json.dumps(message).encode()
        try:
            if fd is None:
                self._control.send(data)
            else:
                socket.send_fds(self._control, [data], [fd])
        except (BrokenPipeError, ConnectionResetError):
            pass  # the actor is gone: the next receive says so


def _memory_file(name: str, content: bytes) -> int:
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    view = memoryview(content)
    while view:
        view = view[os.write(fd, view) :]
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _with_fds(word: str, fds: dict[str, int]) -> str:
    return _FD_WORD.sub(lambda match: str(fds[match.group(1)]), word)


def main(control_fd: int, cgroup_parent: str) -> None:
    """Serve one actor, then leave nothing behind. `cgroup_parent` is "" where sandboxes get no cgroups."""
    control = socket.socket(fileno=control_fd)
    os.set_inheritable(control_fd, False)
    # A terminal's Ctrl-C is for the actor, which then closes the socket.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    become_subreaper()
    launcher = Launcher(control, cgroup_parent)
    try:
        launcher.serve()
    except (ConnectionResetError, BrokenPipeError):
        pass
    finally:
        launcher.close()

"""The exec agent: the first process inside a sandbox, which runs what the host asks for and streams back what it prints.

    host ──► {op: call, id, tool, …arguments}          ──► {ev: out, id, stream, data} …  {ev: done, id, exit_code, …}
             {op: interrupt, id}   SIGINT to its group
             {op: kill}            SIGKILL to everything in the sandbox but the agent
             {op: sleep}                               ──► {ev: asleep} or {ev: awake}
             a newline, if asleep                      ──► {ev: ready}
                                                       ──► {ev: lost, tool}: a kept process died between calls

It is one thread around one `poll`; nothing that a tool does can block it. Commands hold none of its descriptors but their own
pipes, and their end is learnt from the process or from a status pipe, never from what they print and never from an end of
file, which a background job that holds the pipe could put off for ever.

The host trusts nothing that comes from here: a program can take over its own agent, and then has fooled itself.
Deadlines are the host's: should the agent be stopped or killed by its own program, the host ends the whole sandbox.

Asleep, the agent is not Python but `/bin/sh` waiting for a newline, which takes a tenth of the memory; it has exec'ed itself
away, and keeps its children, its socket and the kept shell's pipes. It does so only when nothing but the kept shell runs.

Imports are few because every sandbox pays for them: `typing` alone costs it 2 MiB, `socket` one.
"""

from __future__ import annotations

import os
import select
import signal
import sys

from tool_runtime.inside import frames
from tool_runtime.inside.frames import Fields
from tool_runtime.inside.processes import Call, ForkedCall, Reactor, Runner
from tool_runtime.inside.sessions import PythonSession, Session, ShellSession

_SESSIONS: dict[str, type[Session]] = {"shell": ShellSession, "python": PythonSession}
_RECEIVE_BYTES = 65536
_SHELL = "/bin/sh"
#: Waits for a newline on descriptor 0, where the socket then is, and becomes the agent again.
_ASLEEP = 'read -r newline; exec "$@"'


class Agent:
    """Calls by id, one kept shell, one kept Python, and the socket to the host."""

    def __init__(self, control: int, replies: int, reactor: Reactor, scope: str, awake_again: list[str]) -> None:
        """Requests come by `control`, answers go to `replies`, which is the same where that is a socket. `scope` is what one signal
        may reach, as `KillScope` has it; `awake_again` the command line that starts an agent."""
        self._control = control
        self._replies = replies
        self._awake_again = awake_again
        self._reactor = reactor
        self._scope = scope
        self._decoder = frames.Decoder()
        self._runners: dict[str, Runner] = {}
        self._sessions: dict[str, Runner] = {}

    def serve(self) -> None:
        """Answer the host until it goes away."""
        self._reactor.watch(self._control, self._on_control)
        self._send({"ev": "ready"})
        while True:
            self._reactor.wait()

    def resume_shell(self, state: str) -> None:
        """Take up the kept shell again that `_sleep` left."""
        shell = self._sessions["shell"] = ShellSession(self._reactor, self._on_lost)
        shell.resume(state)

    def _on_control(self) -> None:
        data = os.read(self._control, _RECEIVE_BYTES)
        if not data:
            raise SystemExit(0)
        for fields in self._decoder.feed(data):
            self._on_request(fields)

    def _on_request(self, fields: Fields) -> None:
        operation = fields.get("op", b"")
        call_id = fields.get("id", b"").decode("ascii", "replace")
        if operation == b"call":
            self._start(call_id, fields)
        elif operation == b"interrupt":
            runner = self._runners.get(call_id)
            if runner is not None:
                runner.interrupt()
        elif operation == b"kill":
            self._kill_everything()
        elif operation == b"sleep":
            self._sleep()

    def _start(self, call_id: str, fields: Fields) -> None:
        tool = fields.get("tool", b"").decode("ascii", "replace")
        call = Call(call_id, fields.get("nonce", b"").decode("ascii", "replace"), self._on_output, self._on_done)
        try:
            runner = self._runner_for(tool)
            self._runners[call_id] = runner
            runner.run(call, fields)
        except OSError as exc:  # no more processes, memory or descriptors: the call fails, the agent goes on
            self._runners.pop(call_id, None)
            self._send({"ev": "failed", "id": call_id, "error": f"cannot start: {exc}"})

    def _runner_for(self, tool: str) -> Runner:
        if tool not in _SESSIONS:
            return ForkedCall(self._reactor)
        session = self._sessions.get(tool)
        if session is None:
            session = self._sessions[tool] = _SESSIONS[tool](self._reactor, self._on_lost)
        return session

    def _sleep(self) -> None:
        """Become `sh` until the host sends a newline, if nothing would be missed meanwhile."""
        shell = self._sessions.get("shell")
        own = {1, os.getpid(), shell.pid if shell is not None else 0}
        if self._runners or self._scope != "namespace" or not own.issuperset(_all_pids()):
            self._send({"ev": "awake"})
            return
        state = shell.state() if isinstance(shell, ShellSession) and shell.pid else ""
        command = [*self._awake_again, state]
        self._send({"ev": "asleep"})
        os.dup2(self._control, 0)
        os.execv(_SHELL, ["sh", "-c", _ASLEEP, "sh", *command])

    def _on_output(self, call: Call, stream: str, data: bytes) -> None:
        self._send({"ev": "out", "id": call.id, "stream": stream, "data": data})

    def _on_done(self, call: Call, exit_code: int | None, session_lost: bool, cwd: str) -> None:
        self._runners.pop(call.id, None)
        self._send(
            {
                "ev": "done",
                "id": call.id,
                "nonce": call.nonce,
                "exit_code": "" if exit_code is None else exit_code,
                "session_lost": int(session_lost),
                "cwd": cwd,
            }
        )

    def _on_lost(self, tool: str) -> None:
        self._send({"ev": "lost", "tool": tool})

    def _kill_everything(self) -> None:
        if self._scope != "descendants":
            # All that this process may signal, apart from itself and the namespace's init: daemons, stopped and
            # signal-ignoring processes and fork bombs go in one step.
            try:  # noqa: SIM105 - contextlib would cost every sandbox memory
                os.kill(-1, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def end(self) -> None:
        """The host hung up: leave nothing behind. A namespace ends with this process; without one it is ours to do."""
        if self._scope == "domain":
            self._kill_everything()
        elif self._scope == "descendants":
            from tool_runtime.process_tree import kill_descendants

            kill_descendants(os.getpid())

    def _send(self, fields: dict[str, object]) -> None:
        data = memoryview(frames.encode(fields))  # type: ignore[arg-type]
        try:
            while data:
                data = data[os.write(self._replies, data) :]
        except OSError:
            raise SystemExit(0) from None  # the host is gone, and with it the reason to live


def _all_pids() -> set[int]:
    return {int(name) for name in os.listdir("/proc") if name.isdigit()}


def limit_resources(limits: str) -> None:
    """Apply `name=value,…` with names of `resource.RLIMIT_*`; every process inside inherits them."""
    import resource

    for assignment in filter(None, limits.split(",")):
        name, value = assignment.split("=")
        number = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(number)[1]
        wanted = int(value) if hard == resource.RLIM_INFINITY else min(int(value), hard)
        resource.setrlimit(number, (wanted, wanted))


def prepare(limits: str, *, is_subreaper: bool) -> None:
    """What is done once, and inherited by all that comes after."""
    limit_resources(limits)
    if is_subreaper:
        import ctypes

        # Daemons stay below this process, where the launcher finds them.
        pr_set_child_subreaper = 36
        ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1, 0, 0, 0)
    temporary = os.environ.get("TMPDIR", "/tmp")
    if not os.path.isdir(temporary):
        os.mkdir(temporary, 0o700)
    try:
        with open("/proc/self/oom_score_adj", "w") as score:
            score.write("1000")  # should memory run out, a tool goes before the platform
    except OSError:
        pass


def hand_out_listener(control: int, port: int) -> None:
    """Listen on the sandbox's own loopback, and give the socket to the host, whose proxy accepts on it."""
    import socket  # costs memory, so only where there is a network to be had

    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(128)
        with socket.socket(fileno=os.dup(control)) as host:
            socket.send_fds(host, [frames.encode({"ev": "listening"})], [listener.fileno()])


def main(
    start: str,
    control: int,
    limits: str,
    scope: str,
    proxy_port: str,
    shell_state: str | None = None,
    replies: int | None = None,
) -> None:
    """Run until the host hangs up; the sandbox ends with this process.

    `control` is the socket to the host, or, where `replies` is given, the pipe from it beside the pipe to it.
    `start` is the Python text that led here. `proxy_port` is where to listen for the host's proxy, 0 for nowhere.
    `shell_state` is what `_sleep` passed on, "" if there was no shell; None at the first start.
    """
    if shell_state is None:
        prepare(limits, is_subreaper=scope != "namespace")
        if proxy_port != "0":
            hand_out_listener(control, int(proxy_port))
    if control == 0:  # awake again: the socket goes out of the way of the programs' standard input
        control = os.dup(0)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
    os.set_inheritable(control, False)
    # A terminal's or a confused program's signals are not for the agent.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    python = [sys.executable, "-I", "-S", "-B", "-c", start, "0", limits, scope, proxy_port]
    agent = Agent(control, control if replies is None else replies, Reactor(select.poll()), scope, python)
    if shell_state:
        agent.resume_shell(shell_state)
    try:
        agent.serve()
    finally:
        agent.end()

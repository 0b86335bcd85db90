"""The exec agent: the first process inside a sandbox, which runs what the host asks for and streams back what it prints.

    host ──► {op: call, id, tool, …arguments}          ──► {ev: out, id, stream, data} …  {ev: done, id, exit_code, …}
             {op: interrupt, id}   SIGINT to its group
             {op: kill}            SIGKILL to everything in the sandbox but the agent

It is one thread around one `poll`; nothing that a tool does can block it. Commands hold none of its descriptors but their own
pipes, and their end is learnt from the process or from a status pipe, never from what they print and never from an end of
file, which a background job that holds the pipe could put off for ever.

The host trusts nothing that comes from here: a program can take over its own agent, and then has fooled itself.
Deadlines are the host's: should the agent be stopped or killed by its own program, the host ends the whole sandbox.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
from collections.abc import Callable

from tool_runtime.inside import frames
from tool_runtime.inside.frames import Fields
from tool_runtime.inside.processes import Call, ForkedCall, PythonSession, Reactor, Runner, ShellSession

_RECEIVE_BYTES = 65536


class Agent:
    """Calls by id, one kept shell, one kept Python, and the socket to the host."""

    def __init__(self, control: socket.socket, reactor: Reactor, kills_namespace: bool) -> None:
        self._control = control
        self._reactor = reactor
        self._kills_namespace = kills_namespace
        self._decoder = frames.Decoder()
        self._runners: dict[str, Runner] = {}
        self._sessions: dict[str, Runner] = {}

    def serve(self) -> None:
        """Answer the host until it goes away."""
        self._reactor.watch(self._control.fileno(), self._on_control)
        self._send({"ev": "ready", "pid": os.getpid()})
        while True:
            self._reactor.wait()

    def _on_control(self) -> None:
        data = self._control.recv(_RECEIVE_BYTES)
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
        makers: dict[str, Callable[[Reactor], Runner]] = {"shell": ShellSession, "python": PythonSession}
        if tool not in makers:
            return ForkedCall(self._reactor)
        session = self._sessions.get(tool)
        if session is None:
            session = self._sessions[tool] = makers[tool](self._reactor)
        return session

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

    def _kill_everything(self) -> None:
        if self._kills_namespace:
            # All that this process may signal, apart from itself and the namespace's init: daemons, stopped and
            # signal-ignoring processes and fork bombs go in one step.
            try:  # noqa: SIM105 - contextlib would cost every sandbox memory
                os.kill(-1, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def _send(self, fields: dict[str, object]) -> None:
        try:
            self._control.sendall(frames.encode(fields))  # type: ignore[arg-type]
        except OSError:
            raise SystemExit(0) from None  # the host is gone, and with it the reason to live


def limit_resources(limits: str) -> None:
    """Apply `name=value,…` with names of `resource.RLIMIT_*`; every process inside inherits them."""
    import resource

    for assignment in filter(None, limits.split(",")):
        name, value = assignment.split("=")
        number = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(number)[1]
        wanted = int(value) if hard == resource.RLIM_INFINITY else min(int(value), hard)
        resource.setrlimit(number, (wanted, wanted))


def main(control_fd: int, limits: str, kills_namespace: bool) -> None:
    """Run until the host hangs up; the sandbox ends with this process."""
    control = socket.socket(fileno=control_fd)
    os.set_inheritable(control_fd, False)
    # A terminal's or a confused program's signals are not for the agent.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    limit_resources(limits)
    if not kills_namespace:
        import ctypes

        # Daemons stay below this process, where the launcher finds them.
        pr_set_child_subreaper = 36
        ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1, 0, 0, 0)
    try:
        with open("/proc/self/oom_score_adj", "w") as score:
            score.write("1000")  # should memory run out, a tool goes before the platform
    except OSError:
        pass
    Agent(control, Reactor(select.poll()), kills_namespace).serve()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3] == "namespace")

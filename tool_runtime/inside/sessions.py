"""The kept bash and the kept Python: processes that outlive calls, with a pipe for what to run and one for its status."""

from __future__ import annotations

import os
import select
import signal
import sys

from tool_runtime.inside.frames import Fields
from tool_runtime.inside.processes import Call, Reactor, Runner, read_now

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

#: Descriptors that a session finds open. Bash can't name one above 255 and programs rarely use those just below.
OUTPUT_FD, ERROR_FD, REQUEST_FD, STATUS_FD = 197, 196, 198, 199


class Session(Runner):
    """A process that outlives calls: it takes requests by one pipe and answers with a status on another."""

    is_session = True
    #: The tool that it serves.
    tool = ""

    def __init__(self, reactor: Reactor, on_lost: Callable[[str], None]) -> None:
        """`on_lost` is told the tool when the process ends while no call is under way."""
        super().__init__(reactor)
        self._on_lost = on_lost
        self._request_fd = -1
        self._status_fd = -1
        self._unsent = b""
        self._status = b""
        self._cwd_seen = ""

    def run(self, call: Call, fields: Fields) -> None:
        if not self.pid:
            self._start()
        self._call = call
        for stream, kept in self._backlog.items():
            if kept:
                call.output(stream, bytes(kept))
        self._backlog.clear()
        self._write(self._request(call, fields))

    def _program(self) -> str:
        raise NotImplementedError

    def _argv(self) -> list[str]:
        raise NotImplementedError

    def _request(self, call: Call, fields: Fields) -> bytes:
        raise NotImplementedError

    def _parse_status(self, status: bytes) -> int | None:
        """The exit code in a status whose nonce is right; None if it is not one of ours."""
        nonce, _, rest = status.partition(b" ")
        code, _, cwd = rest.partition(b" ")
        if self._call is None or nonce != self._call.nonce.encode() or not code.isdigit():
            return None
        self._cwd_seen = cwd.decode("utf-8", "surrogateescape")
        return int(code)

    def _cwd(self) -> str:
        return self._cwd_seen

    def state(self) -> str:
        """All that another process, which this one becomes, needs to go on with the session: see `resume`."""
        fds = (self._request_fd, self._status_fd, *self._streams.values())
        for fd in fds:
            os.set_inheritable(fd, True)
        return " ".join(map(str, (self.pid, *fds, os.fsencode(self._cwd_seen).hex() or "-")))

    def resume(self, state: str) -> None:
        """Go on with the session that `state` describes; if its process is gone, say so and start another when asked to."""
        pid, request, status, output, error, cwd = state.split()
        self._cwd_seen = os.fsdecode(bytes.fromhex(cwd)) if cwd != "-" else ""
        fds = [int(fd) for fd in (request, status, output, error)]
        try:
            os.close(os.pidfd_open(int(pid)))
        except ProcessLookupError:
            for fd in fds:
                os.close(fd)
            self._on_lost(self.tool)
            return
        for fd in fds:
            os.set_inheritable(fd, False)
        self._own(*fds[:2])
        self._adopt(int(pid), *fds[2:])

    def _own(self, request: int, status: int) -> None:
        self._request_fd, self._status_fd, self._unsent, self._status = request, status, b"", b""
        for fd in (request, status):
            os.set_blocking(fd, False)
        self._reactor.watch(status, self._on_status)

    def _start(self) -> None:
        request_read, request_write = os.pipe()
        status_read, status_write = os.pipe()
        output_read, output_write = os.pipe()
        error_read, error_write = os.pipe()
        theirs = (request_read, status_write, output_write, error_write)
        try:
            pid = os.posix_spawn(
                self._program(),
                self._argv(),
                os.environ,
                file_actions=self._file_actions(request_read, status_write, output_write, error_write),
                setsid=True,
                setsigdef=[signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGPIPE],
            )
        except OSError:
            for fd in (request_write, status_read, output_read, error_read):
                os.close(fd)
            raise
        finally:
            for fd in theirs:
                os.close(fd)
        self._own(request_write, status_read)
        self._adopt(pid, output_read, error_read)

    def _file_actions(self, request: int, status: int, output: int, error: int) -> list:  # type: ignore[type-arg]
        return [
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_DUP2, output, 1),
            (os.POSIX_SPAWN_DUP2, error, 2),
            (os.POSIX_SPAWN_DUP2, request, REQUEST_FD),
            (os.POSIX_SPAWN_DUP2, status, STATUS_FD),
        ]

    def _write(self, data: bytes) -> None:
        self._unsent += data
        self._on_writable()

    def _on_writable(self) -> None:
        try:
            sent = os.write(self._request_fd, self._unsent)
        except BlockingIOError:
            sent = 0
        except BrokenPipeError:  # it is dying: `_on_exit` will say so
            self._reactor.forget(self._request_fd)
            self._unsent = b""
            return
        self._unsent = self._unsent[sent:]
        self._reactor.forget(self._request_fd)
        if self._unsent:
            self._reactor.watch(self._request_fd, self._on_writable, select.POLLOUT)

    def _on_status(self) -> None:
        data = read_now(self._status_fd)
        if not data:
            if data is not None:
                self._reactor.forget(self._status_fd)
            return
        self._status = (self._status + data)[-65536:]
        while b"\0" in self._status:
            status, _, self._status = self._status.partition(b"\0")
            exit_code = self._parse_status(status)
            if exit_code is not None and self._call is not None:
                self._drain()
                call, self._call = self._call, None
                call.done(exit_code, cwd=self._cwd_seen)

    def _on_exit(self) -> None:
        self._on_status()  # it may have ended right after answering
        is_between_calls = self._call is None
        super()._on_exit()
        if is_between_calls:
            self._on_lost(self.tool)

    def _release(self) -> None:
        for fd in (self._request_fd, self._status_fd):
            self._reactor.forget(fd)
            os.close(fd)
        self._request_fd = self._status_fd = -1
        super()._release()


class ShellSession(Session):
    """Bash that reads its script from a pipe: one `eval` per call, then a status line.

    What a call may do to its shell without harm to the next one, and what in the framing is for it:

    - A syntax error or a failed expansion throws bash back to the next line of the script, with the `eval`'s redirections undone.
      After an error at the end of the text its parser takes no keyword for one until a line has ended: hence the empty line.
    - The redirections give each command an empty standard input and fresh output, so that `exec >file` ends with its call, and
      hide the framing's own descriptors. The shell's own output goes nowhere, so that traps and traces of the framing's
      commands are not seen.
    - There is no keyword, which could be an alias; quoting keeps aliases from the rest. `builtin` keeps functions away, and
      `unset -f` a function of that name. Where `eval` or `printf` is disabled, the shell is ended.
    """

    tool = "shell"

    def _program(self) -> str:
        return "/bin/bash"

    def _argv(self) -> list[str]:
        return ["bash", "--norc", "--noprofile", "-s"]

    def _file_actions(self, request: int, status: int, output: int, error: int) -> list:  # type: ignore[type-arg]
        return [
            (os.POSIX_SPAWN_DUP2, request, 0),
            (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
            (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
            (os.POSIX_SPAWN_DUP2, output, OUTPUT_FD),
            (os.POSIX_SPAWN_DUP2, error, ERROR_FD),
            (os.POSIX_SPAWN_DUP2, status, STATUS_FD),
        ]

    def _start(self) -> None:
        super()._start()
        if self._cwd_seen:  # a new shell goes on where the last one was, if that place is still there
            self._write(b"cd -- " + _quoted(os.fsencode(self._cwd_seen)) + b"\n")

    def _request(self, call: Call, fields: Fields) -> bytes:
        command = fields.get("command", b"").replace(b"\0", b"")
        hidden = b"%d>&- %d>&- %d>&-" % (OUTPUT_FD, ERROR_FD, STATUS_FD)
        status = b'printf "%%s %%s %%s\\0" %s "$__" "${PWD-}" >&%d' % (call.nonce.encode("ascii"), STATUS_FD)
        return b"".join(
            (
                b"\\builtin eval ",
                _quoted(command),
                b" </dev/null 1>&%d 2>&%d %s\n\n" % (OUTPUT_FD, ERROR_FD, hidden),
                b"__=$?\n\\unset -f builtin || \\:\n",
                b'\\builtin eval : && \\builtin %s || /bin/sh -c "kill -KILL $$"\n' % status,
            )
        )


class PythonSession(Session):
    """The interpreter of `python_session.py`, which has a request framed by its length."""

    tool = "python"

    def _program(self) -> str:
        return sys.executable

    def _argv(self) -> list[str]:
        script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "python_session.py")
        return [sys.executable, script, str(REQUEST_FD), str(STATUS_FD)]

    def _request(self, call: Call, fields: Fields) -> bytes:
        code = fields.get("code", b"")
        return b"%s %d\n%s" % (call.nonce.encode("ascii"), len(code), code)


def _quoted(text: bytes) -> bytes:
    return b"'" + text.replace(b"'", b"'\\''") + b"'"

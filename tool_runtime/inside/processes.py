"""How the exec agent runs things: processes with an output and an error pipe, and one forked child per file operation.

A call is over when its process ends or its session (`sessions.py`) reports a status. Whatever it wrote is in the pipes by then,
so they are read empty; what a background job writes later belongs to the next call.
"""

from __future__ import annotations

import os
import select
import signal

from tool_runtime.inside.frames import Fields

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_READ_BYTES = 65536
#: What background jobs print between calls is kept up to this size; older output goes first.
_BACKLOG_BYTES_MAX = 65536


class Reactor:
    """`poll` with a callback for each descriptor."""

    def __init__(self, poll: select.poll) -> None:
        self._poll = poll
        self._callbacks: dict[int, Callable[[], None]] = {}

    def watch(self, fd: int, callback: Callable[[], None], events: int = select.POLLIN) -> None:
        self._callbacks[fd] = callback
        self._poll.register(fd, events)

    def forget(self, fd: int) -> None:
        if self._callbacks.pop(fd, None) is not None:
            self._poll.unregister(fd)

    def wait(self) -> None:
        for fd, _ in self._poll.poll():
            callback = self._callbacks.get(fd)
            if callback is not None:  # an earlier callback of this round may have closed it
                callback()


class Call:
    """One call that is under way."""

    def __init__(
        self,
        call_id: str,
        nonce: str,
        on_output: Callable[[Call, str, bytes], None],
        on_done: Callable[[Call, int | None, bool, str], None],
    ) -> None:
        self.id = call_id
        self.nonce = nonce
        self._on_output = on_output
        self._on_done = on_done

    def output(self, stream: str, data: bytes) -> None:
        self._on_output(self, stream, data)

    def done(self, exit_code: int | None, *, session_lost: bool = False, cwd: str = "") -> None:
        self._on_done(self, exit_code, session_lost, cwd)


class Runner:
    """A process and its pipes."""

    #: The process goes on after a call.
    is_session = False

    def __init__(self, reactor: Reactor) -> None:
        self._reactor = reactor
        #: 0 while there is no process.
        self.pid = 0
        self._pidfd = -1
        self._streams: dict[str, int] = {}
        self._backlog: dict[str, bytearray] = {}
        self._call: Call | None = None

    def run(self, call: Call, fields: Fields) -> None:
        """Begin a call.

        Raises:
            OSError: the process cannot be started.
        """
        raise NotImplementedError

    def interrupt(self) -> None:
        """SIGINT to the process and what it started in its own group."""
        self._signal_group(signal.SIGINT)

    def _signal_group(self, number: int) -> None:
        if self.pid:
            try:  # noqa: SIM105 - contextlib would cost every sandbox memory
                os.killpg(self.pid, number)
            except (ProcessLookupError, PermissionError):
                pass

    def _adopt(self, pid: int, output: int, error: int) -> None:
        """Watch a process that was just started, and own its pipes."""
        self.pid, self._pidfd = pid, os.pidfd_open(pid)
        self._streams = {"stdout": output, "stderr": error}
        self._reactor.watch(self._pidfd, self._on_exit)
        for stream, fd in self._streams.items():
            os.set_blocking(fd, False)
            self._reactor.watch(fd, lambda stream=stream: self._on_readable(stream))  # type: ignore[misc]

    def _on_readable(self, stream: str) -> None:
        data = read_now(self._streams[stream])
        if data:
            self._emit(stream, data)
        elif data is not None:  # every writer closed it
            self._reactor.forget(self._streams[stream])

    def _emit(self, stream: str, data: bytes) -> None:
        if self._call is not None:
            self._call.output(stream, data)
        else:
            kept = self._backlog.setdefault(stream, bytearray())
            kept += data
            del kept[:-_BACKLOG_BYTES_MAX]

    def _drain(self) -> None:
        """Take what is in the pipes now. Bounded: a background job that never stops writing does not hold the call."""
        for stream, fd in self._streams.items():
            for _ in range(64):
                data = read_now(fd)
                if not data:
                    break
                self._emit(stream, data)

    def _on_exit(self) -> None:
        _, status = os.waitpid(self.pid, 0)
        self._drain()
        self._release()
        call, self._call = self._call, None
        if call is not None:
            call.done(exit_code_of(status), session_lost=self.is_session, cwd=self._cwd())

    def _release(self) -> None:
        for fd in (self._pidfd, *self._streams.values()):
            self._reactor.forget(fd)
            os.close(fd)
        self.pid, self._pidfd, self._streams = 0, -1, {}

    def _cwd(self) -> str:
        return ""


class ForkedCall(Runner):
    """A file operation, or a registered function, in a child of its own: a slow disk or a wild pattern holds up nobody."""

    def run(self, call: Call, fields: Fields) -> None:
        from tool_runtime.inside import files  # costs memory, so only where it is used

        output_read, output_write = os.pipe()
        error_read, error_write = os.pipe()
        try:
            pid = os.fork()
        except OSError:
            for fd in (output_read, output_write, error_read, error_write):
                os.close(fd)
            raise
        if pid == 0:
            status = 1
            try:
                os.setsid()
                for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE):
                    signal.signal(number, signal.SIG_DFL)
                if fields.get("tool") == b"function":
                    from tool_runtime.inside import functions

                    functions.run(fields, output_write, error_write)
                status = files.run(fields, output_write)
            finally:
                os._exit(status)
        self._call = call
        os.close(output_write)
        os.close(error_write)
        self._adopt(pid, output_read, error_read)


def exit_code_of(status: int) -> int:
    """What a shell would call the exit status of a process: 128 + n for one killed by signal n."""
    return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def read_now(fd: int) -> bytes | None:
    """What is there; empty at the end of the file; None if nothing is there now."""
    try:
        return os.read(fd, _READ_BYTES)
    except BlockingIOError:
        return None
    except OSError:
        return b""

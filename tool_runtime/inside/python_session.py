"""The kept Python of a program: reads source text, runs it in one namespace, reports a status. Runs inside the sandbox."""

from __future__ import annotations

import ast
import contextlib
import linecache
import os
import sys
import traceback
import types
from typing import Any

#: Source texts kept so that tracebacks can show their lines.
_SOURCES_MAX = 100


class Interpreter:
    """A namespace that outlives calls."""

    def __init__(self) -> None:
        self._main = types.ModuleType("__main__")
        self._names: list[str] = []
        self._calls = 0
        sys.modules["__main__"] = self._main

    def run(self, source: str) -> int:
        """Run `source`, print the value of a last expression, and return an exit code as `python` would."""
        self._calls += 1
        name = f"<call {self._calls}>"
        self._remember(name, source)
        try:
            tree = ast.parse(source, name)
            last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
            namespace: dict[str, Any] = self._main.__dict__
            exec(compile(tree, name, "exec"), namespace)
            if isinstance(last, ast.Expr):
                sys.displayhook(eval(compile(ast.Expression(last.value), name, "eval"), namespace))
        except SystemExit as exc:
            return _code_of(exc)
        except BaseException:  # noqa: BLE001 - whatever the program raises is the program's result
            self._print_error()
            return 1
        return 0

    def _remember(self, name: str, source: str) -> None:
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        self._names.append(name)
        if len(self._names) > _SOURCES_MAX:
            linecache.cache.pop(self._names.pop(0), None)

    def _print_error(self) -> None:
        kind, error, trace = sys.exc_info()
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next  # the interpreter's own frames say nothing to the program
        traceback.print_exception(kind, error, trace)


def _code_of(exc: SystemExit) -> int:
    if exc.code is None:
        return 0
    if isinstance(exc.code, int):
        return exc.code & 0xFF
    print(exc.code, file=sys.stderr)  # noqa: T201
    return 1


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


def _write_status(status_fd: int, nonce: str, code: int) -> None:
    try:
        cwd = os.getcwd()
    except OSError:
        cwd = ""
    os.write(status_fd, f"{nonce} {code} {cwd}\0".encode("utf-8", "surrogateescape"))


def main(request_fd: int, status_fd: int) -> None:
    """Serve requests, each a line `nonce length` and then that many bytes of source, until the pipe closes."""
    for fd in (request_fd, status_fd):
        os.set_inheritable(fd, False)
    sys.path[0] = ""  # as at an interactive prompt: modules in the working directory can be imported
    sys.argv = [""]
    interpreter = Interpreter()
    output, error = sys.stdout, sys.stderr
    output.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a call that is killed shows what it printed
    with os.fdopen(request_fd, "rb") as requests:
        while True:
            try:
                head = requests.readline().split()
                if len(head) != 2:
                    return
                source = requests.read(int(head[1])).decode("utf-8", "replace")
                code = interpreter.run(source)
            except KeyboardInterrupt:  # it arrived when the program's own code was already over
                code = 130
            _flush()
            sys.stdout, sys.stderr = output, error  # a program's redirection ends with its call
            _write_status(status_fd, head[0].decode("ascii"), code)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))

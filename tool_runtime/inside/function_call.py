"""One call of a registered function, in a Python process of its own. Runs inside the sandbox.

The request names the function, its module's source text and its arguments. What the function returns goes to one pipe, what it
prints to another: its answer cannot be mistaken for its chatter.
"""

from __future__ import annotations

import inspect
import json
import linecache
import os
import sys
import traceback
import types
from typing import Any


def stub_of_the_decorator() -> None:
    """`from tool_runtime.functions import tool` in the function's module finds a decorator that changes nothing."""

    def tool(function: Any = None, /, **_: Any) -> Any:
        return function if function is not None else lambda decorated: decorated

    class RunsIn:
        SANDBOX, ACTOR = "sandbox", "actor"

    package, module = types.ModuleType("tool_runtime"), types.ModuleType("tool_runtime.functions")
    module.__dict__.update(tool=tool, RunsIn=RunsIn, ToolContext=object)
    package.__dict__.update(functions=module, __path__=[])
    sys.modules.update({"tool_runtime": package, "tool_runtime.functions": module})


def call(request: dict[str, Any]) -> str:
    """What the function returned, as text for a model."""
    source, filename = request["source"], f"<{request['module']}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    module = types.ModuleType(request["module"])
    sys.modules[request["module"]] = module
    exec(compile(source, filename, "exec"), module.__dict__)
    value = getattr(module, request["function"])(**request["arguments"])
    if inspect.iscoroutine(value):
        import asyncio

        value = asyncio.run(value)
    if isinstance(value, str):
        return value
    return "" if value is None else json.dumps(value, ensure_ascii=False)


def main(request_fd: int, result_fd: int) -> None:
    """Serve the one request."""
    os.set_inheritable(result_fd, False)
    sys.path.pop(0)  # the agent's own modules are not the function's
    sys.argv = [""]
    with os.fdopen(request_fd, "rb") as requests:
        request = json.load(requests)
    stub_of_the_decorator()
    code, text = 0, ""
    try:
        text = call(request)
    except BaseException as exc:  # noqa: BLE001 - whatever it raises is its result
        code = 1
        trace = exc.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        traceback.print_exception(type(exc), exc, trace)
    data = memoryview(text.encode("utf-8", "replace"))
    while data:
        data = data[os.write(result_fd, data) :]
    for stream in (sys.stdout, sys.stderr):
        try:  # noqa: SIM105 - nothing is left to be told to
            stream.flush()
        except (OSError, ValueError, AttributeError):
            pass
    os._exit(code)  # without waiting for threads that it left


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))

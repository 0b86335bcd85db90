"""Becomes the process that runs a registered function (`function_call.py`). Runs in the agent's forked child."""

from __future__ import annotations

import os
import sys

from tool_runtime.inside.frames import Fields

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

#: Where the function's process finds them.
_RESULT_FD, _REQUEST_FD = 197, 198


def run(fields: Fields, output_fd: int, error_fd: int) -> NoReturn:
    """Exec a Python that finds the request, and the pipe for its answer, at descriptors of its own; what it prints is error output.

    Raises:
        OSError: it cannot be started.
    """
    request = os.memfd_create("request", 0)
    data = memoryview(fields.get("request", b"{}"))
    while data:
        data = data[os.write(request, data) :]
    os.lseek(request, 0, os.SEEK_SET)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (error_fd, 1), (error_fd, 2), (output_fd, _RESULT_FD), (request, _REQUEST_FD)):
        os.dup2(source, target)
    script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "function_call.py")
    # Neither the workspace nor the environment decides what the function imports.
    os.execv(sys.executable, [sys.executable, "-E", "-s", script, str(_REQUEST_FD), str(_RESULT_FD)])

"""A sandbox around one program that talks with the host over its standard input and output: an MCP server.

In the agent's place: it sets the same limits, hands out the same listener for the egress proxy, and becomes the program. What
the program writes to standard error goes where the sandbox's own complaints go.
"""

from __future__ import annotations

import os
import signal
import sys

from tool_runtime.inside.agent import hand_out_listener, prepare


def main(control: int, limits: str, scope: str, proxy_port: str, *command: str) -> None:
    """Become `command`, whose standard input and output are the socket `control`; if it cannot be started, say so and end."""
    prepare(limits, is_subreaper=scope != "namespace")
    if proxy_port != "0":
        hand_out_listener(control, int(proxy_port))
    for target in (0, 1):
        os.dup2(control, target)
    os.set_inheritable(control, False)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and what it becomes would inherit that
    try:
        os.execvp(command[0], command)
    except OSError as exc:
        sys.exit(f"{command[0]} cannot be started: {exc.strerror}")

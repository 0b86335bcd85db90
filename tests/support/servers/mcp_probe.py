"""A small MCP server made with the official SDK, for tests: by stdio, or with a port by streamable HTTP on loopback.

python mcp_server.py                 stdio
python mcp_server.py 8123            http://localhost:8123/mcp
"""

from __future__ import annotations

import asyncio
import base64
import os
import sys
from pathlib import Path
from typing import Any

from mcp.server.mcpserver import Context, Image, MCPServer
from mcp_types import ToolAnnotations

server = MCPServer("probe")
_calls = 0


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def echo(text: str, times: int = 1) -> str:
    """Say a text again."""
    return text * times


@server.tool()
def measure(text: str) -> dict[str, int]:
    """Count the characters of a text."""
    return {"characters": len(text)}


@server.tool()
def picture() -> Image:
    """A picture of one pixel."""
    pixel = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
    return Image(data=base64.b64decode(pixel), format="png")


@server.tool()
def fail(why: str) -> str:
    """Fail."""
    raise RuntimeError(why)


@server.tool()
async def count_to(number: int, pause_s: float, context: Context[Any, Any]) -> str:
    """Count, and say how far it is."""
    for reached in range(1, number + 1):
        await asyncio.sleep(pause_s)
        await context.report_progress(reached, number, f"at {reached}")
    return f"counted to {number}"


@server.tool()
def calls() -> int:
    """How many times this very process was asked."""
    global _calls
    _calls += 1
    return _calls


@server.tool()
def write(name: str, text: str) -> str:
    """Write a file where the server is."""
    Path(name).write_text(text)
    return os.getcwd()


@server.tool()
def environment() -> str:
    """The names of all variables, and what there is of the host."""
    return " ".join(sorted(os.environ)) + "\n" + " ".join(sorted(os.listdir("/")))


@server.tool()
def crash(code: int) -> str:
    """End the process."""
    sys.stderr.write("falling over\n")
    sys.stderr.flush()
    os._exit(code)


@server.tool()
def leave_behind(mark: str) -> str:
    """Fork away a process that would outlive the server."""
    if os.fork() == 0:
        os.setsid()
        os.execv("/bin/sleep", ["sleep", mark])
    return "left"


@server.tool()
async def become(context: Context[Any, Any]) -> str:
    """Have another tool from now on, and say so."""

    def added(text: str) -> str:
        """Was not there before."""
        return text

    server.add_tool(added)
    await context.session.send_tool_list_changed()
    return "changed"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        import uvicorn

        app = server.streamable_http_app()
        uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
    else:
        server.run("stdio")

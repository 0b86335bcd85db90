"""An MCP server from the standard library alone, which starts at once and misbehaves as it is told. `python mcp_raw.py [WAY]`."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

OBJECT = {"type": "object", "properties": {}}


def tool(name: str, description: str = "A tool.", **fields: Any) -> dict[str, Any]:
    return {"name": name, "description": description, "inputSchema": OBJECT, **fields}


def send(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    sys.stdout.flush()


def tools_of(way: str) -> list[dict[str, Any]]:
    if way == "many":
        return [tool(f"t{number}") for number in range(300)]
    if way == "shifty":  # another tool in every process
        return [tool("work", f"Was made by {time.time_ns()}.")]
    if way == "bad_root":  # which the protocol itself forbids
        return [tool("work"), tool("list", inputSchema={"type": "array"})]
    if way == "ill_formed":
        return [
            tool("fine"),
            tool("dotted.name"),
            tool("dotted_name"),
            tool("x" * 80),
            tool("bad_schema", inputSchema={"type": "object", "properties": {"a": {"type": 7}}}),
            tool("far", inputSchema={"type": "object", "properties": {"a": {"$ref": "http://localhost:1/schema"}}}),
            tool("slow", inputSchema={"type": "object", "properties": {"a": {"type": "string", "pattern": "(a+)+$"}}}),
        ]
    return [*(tool(name) for name in WORK), tool("hints", annotations={"idempotentHint": True})]


CALLS = [0]


def calls() -> str:
    CALLS[0] += 1
    return str(CALLS[0])


def write() -> str:
    with open("note", "w") as note:
        note.write("mine")
    return os.getcwd()


def leave_behind() -> str:
    if os.fork() == 0:
        os.setsid()
        os.execv("/bin/sleep", ["sleep", "4107.25"])
    return "left"


def crash() -> str:
    sys.stderr.write("falling over\n")
    sys.stderr.flush()
    os._exit(3)


def change() -> str:
    send({"method": "notifications/tools/list_changed"})
    return "changed"


#: What a server that behaves well can do.
WORK: dict[str, Callable[[], str]] = {
    "work": lambda: "worked",
    "calls": calls,
    "write": write,
    "environment": lambda: " ".join(sorted(os.environ)) + "\n" + " ".join(sorted(os.listdir("/"))),
    "leave_behind": leave_behind,
    "crash": crash,
    "change": change,
}


def call(way: str, request: dict[str, Any]) -> None:
    work = WORK.get(request["params"]["name"], WORK["work"])
    result = {"content": [{"type": "text", "text": work()}], "isError": False}
    if way == "flood":
        while True:
            send({"method": "notifications/message", "params": {"level": "info", "data": "x"}})
    if way == "long_line":
        while True:
            sys.stdout.write("x" * 65536)
    if way == "huge":
        result["content"] = [{"type": "text", "text": "y" * 8_000_000}]
    if way == "wrong_id":
        send({"id": 123456, "result": result})
        send({"id": "text", "result": result})
    if way == "noise":
        sys.stdout.write('this is no JSON\n{"jsonrpc": "2.0", "method": 7}\n' + "[" * 100_000 + "\n")
    if way == "refuses":
        send({"id": request["id"], "error": {"code": -32602, "message": "not like this"}})
        return
    if way == "no_answer":
        send({"id": request["id"], "result": {"content": "not a list"}})
        return
    if way == "asks":
        send({"id": "q", "method": "sampling/createMessage", "params": {"messages": [], "maxTokens": 1}})
        answer = json.loads(sys.stdin.readline())
        result["content"] = [{"type": "text", "text": json.dumps(answer)}]
    if way == "fills":
        for number in range(1_000_000):
            with open(f"part{number}", "wb") as part:
                part.write(b"z" * 1_000_000)
            time.sleep(0.05)
    if way == "hangs":
        time.sleep(1000)
    send({"id": request["id"], "result": result})


def main(way: str) -> None:
    if way == "dies":
        sys.exit("I would rather not")
    for line in sys.stdin:
        request = json.loads(line)
        method = request.get("method")
        if method == "initialize" and way != "silent":
            version = request["params"]["protocolVersion"]
            info = {"name": "raw", "version": "1"}
            capabilities = {"tools": {"listChanged": True}}
            send(
                {
                    "id": request["id"],
                    "result": {"protocolVersion": version, "capabilities": capabilities, "serverInfo": info},
                }
            )
        elif method == "tools/list":
            found = {"tools": tools_of(way)}
            send({"id": request["id"], "result": {**found, "nextCursor": "on"} if way == "endless" else found})
        elif method == "tools/call":
            call(way, request)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "well")

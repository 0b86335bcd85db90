"""What people try first, through REST as they would: a script in the program's workspace, and a program that is told to run it.

The script goes there by `PUT /v1/programs/{id}/workspace` under the program's id to be, so that the small model has three letters to
copy, and its messages begin with two calls that copied them, which it goes on with. What the sandbox does with each in detail is asserted in `tests/adversarial/test_what_people_try_first.py`; here it is that the
program ends, its result says what happened, and the platform goes on.
"""

from __future__ import annotations

import io
import json
import socket
import tarfile
import tempfile
from pathlib import Path

import pytest

from support.platform import Json, Platform
from support.tools import processes_with
from support.waiting import wait_for

pytestmark = pytest.mark.integration


def archive(script: str) -> bytes:
    """A tar with one file, `x`."""
    content, target = script.encode(), io.BytesIO()
    with tarfile.open(fileobj=target, mode="w") as tar:
        entry = tarfile.TarInfo("x")
        entry.size = len(content)
        tar.addfile(entry, io.BytesIO(content))
    return target.getvalue()


def _ran(command: str, call_id: str) -> list[Json]:
    """The user asked for a command, and the model called it."""
    function = {"name": "shell", "arguments": json.dumps({"command": command})}
    return [
        {"role": "user", "content": command},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": call_id, "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": call_id, "content": "done"},
    ]


def tried(platform: Platform, name: str, script: str, *, tool_timeout_s: float = 60.0) -> Json:
    """The result of the script's call."""
    program_id = f"try-{name}"
    uploaded = platform.client.put(f"/v1/programs/{program_id}/workspace", content=archive(script))
    assert uploaded.is_success, uploaded.text
    platform.submit(
        program_id=program_id,
        messages=[*_ran("sh x", "call_a"), *_ran("sh x", "call_b"), {"role": "user", "content": "sh x"}],
        tools=["shell"],
        tool_choice="required",
        sampling={"temperature": 0},
        limits={"max_turns": 1, "max_tokens_per_turn": 60, "tool_timeout_s": tool_timeout_s},
    )
    program = platform.wait_for_end(program_id)
    assert (program["state"], program["end_reason"]) == ("completed", "max_turns"), program
    (started,) = platform.steps(program_id, "tool.started")
    assert '"sh x"' in started["arguments"]
    (finished,) = platform.steps(program_id, "tool.finished")
    return finished


def test_what_never_stops_printing_is_stopped(platform: Platform) -> None:
    for name, script in {"yes": "yes", "line": "head -c 1000000000 /dev/zero | tr '\\0' x"}.items():
        result = tried(platform, name, script)
        assert result["outcome"] == "error"
        assert "it printed too much" in result["output"]
        assert len(result["output"]) < 80_000
        assert result["truncated_bytes"] > 10_000_000


def test_a_fork_bomb_ends_with_its_call(platform: Platform) -> None:
    assert tried(platform, "bomb", "b() { b | b & }; b; sleep 1000", tool_timeout_s=3)["outcome"] in (
        "timeout",
        "error",
    )
    assert tried(platform, "after", "echo works")["output"] == "works"


def test_what_goes_on_in_the_background_ends_with_its_program(platform: Platform) -> None:
    sleeper = tried(platform, "sleeper", "sleep infinity & echo begun")
    assert (sleeper["outcome"], sleeper["output"]) == ("ok", "begun")
    server = tried(platform, "server", "python3 -m http.server --bind 127.0.0.1 8123 >log 2>&1 & sleep 1; echo serving")
    assert server["output"] == "serving"
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", 8123), timeout=2)
    for command in ("sleep\0infinity", "http.server\0--bind"):
        wait_for(lambda command=command: not processes_with(command), what=f"{command!r} to end")


def test_a_link_that_is_swapped_while_it_is_read_leads_nowhere_else(platform: Platform) -> None:
    with tempfile.TemporaryDirectory(prefix="ct-secret-") as directory:
        secret = Path(directory, "secret")
        secret.write_text("TOP SECRET")
        Path(directory).chmod(0o755)
        race = f"(while :; do ln -sfn {secret} l; ln -sfn x l; done) & for i in $(seq 200); do cat l; done; kill %1; echo over"
        result = tried(platform, "race", race)
    assert "TOP SECRET" not in result["output"]
    assert "over" in result["output"]

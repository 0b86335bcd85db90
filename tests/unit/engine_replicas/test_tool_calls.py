"""Which tools run after a turn."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_program.ids import ProgramId, ToolKey
from agent_program.turn import TurnHints
from engine_replicas.tool_calls import CALLS_MAX, next_tools


def hints(next_tool: str | None = None) -> TurnHints:
    return TurnHints(program_id=ProgramId("p"), next_tool=ToolKey(next_tool) if next_tool else None)


def call(name: str, arguments: Any) -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}}


def test_a_call_gives_its_tools_key() -> None:
    message = {"content": None, "tool_calls": [call("read_file", '{"path": "a"}')]}
    assert next_tools(message, hints()) == ("read_file",)


def test_a_shell_call_gives_the_command_that_takes_the_time() -> None:
    message = {"tool_calls": [call("shell", json.dumps({"command": "cd /repo && python -m pytest -q | tail"}))]}
    assert next_tools(message, hints()) == ("pytest",)


def test_arguments_may_be_an_object() -> None:
    assert next_tools({"tool_calls": [call("shell", {"command": "git status"})]}, hints()) == ("git",)


def test_parallel_calls_give_one_key_each_in_their_order() -> None:
    message = {"tool_calls": [call("shell", '{"command": "make"}'), call("list_files", "{}")]}
    assert next_tools(message, hints()) == ("make", "list_files")


def test_what_the_client_declares_wins() -> None:
    message = {"tool_calls": [call("shell", '{"command": "make"}')]}
    assert next_tools(message, hints(next_tool="pytest")) == ("pytest",)


def test_a_fenced_shell_block_is_a_command() -> None:
    content = "I will run the tests.\n\n```bash\ncd /testbed && pytest tests/unit\n```\n"
    assert next_tools({"content": content}, None) == ("pytest",)


@pytest.mark.parametrize("language", ["bash", "sh", "shell", "mswea_bash_command"])
def test_every_name_for_a_shell_opens_a_block(language: str) -> None:
    assert next_tools({"content": f"```{language}\nnpm test\n```"}, None) == ("npm",)


def test_calls_win_over_fenced_text() -> None:
    message = {"content": "```bash\nmake\n```", "tool_calls": [call("python", '{"code": "1"}')]}
    assert next_tools(message, None) == ("python",)


@pytest.mark.parametrize(
    "content",
    [
        None,
        "",
        "The answer is 4.",
        "```python\nprint(1)\n```",  # code that is shown, not run
        "```bash\nmake",  # cut off before its end: nothing to run
        "use `bash` for that",
        ["not", "text"],
    ],
)
def test_an_answer_calls_nothing(content: Any) -> None:
    assert next_tools({"content": content, "tool_calls": None}, hints()) == ()


def test_malformed_calls_are_passed_over() -> None:
    message = {"tool_calls": [None, {}, {"function": None}, {"function": {"name": 3}}, call("", "{}"), call("grep", 7)]}
    assert next_tools(message, None) == ("grep",)


def test_a_flood_of_calls_is_cut_short() -> None:
    assert len(next_tools({"tool_calls": [call("a", "{}")] * 1000}, None)) == CALLS_MAX


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
)


@given(calls=json_values, content=json_values)
def test_no_message_raises(calls: Any, content: Any) -> None:
    keys = next_tools({"tool_calls": calls, "content": content}, None)
    assert all(isinstance(key, str) and key for key in keys)


@given(st.text(alphabet="`bash\n ", max_size=400))
def test_no_text_raises(content: str) -> None:
    assert isinstance(next_tools({"content": content}, None), tuple)

"""`hermes_exact`: what a model may write is what the chat template writes, letter by letter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import xgrammar
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.tool_parsers.tool_strict_level import ToolStrictLevel

import engine_replicas
from engine_replicas import embedded_model
from engine_replicas.vllm_tool_parser import HermesExactToolParser
from support.chat_template import ChatTemplate

pytestmark = pytest.mark.integration

TEMPLATE = ChatTemplate(Path(engine_replicas.__file__).parent / "templates" / "smollm2_tools.jinja")
SHELL = {
    "type": "function",
    "function": {
        "name": "shell",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}, "timeout_s": {"type": "integer"}},
            "required": ["command", "timeout_s"],
            "additionalProperties": False,
        },
    },
}
FREE = {"type": "function", "function": {"name": "free"}}
ARGUMENTS = '{"command": "ls -l", "timeout_s": 5}'


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(embedded_model.prepare())


def request(**others: Any) -> ChatCompletionRequest:
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": [SHELL, FREE], "tool_choice": "required"}
    return ChatCompletionRequest.model_validate(body | others)


@pytest.fixture(scope="module")
def accepts(tokenizer: Any) -> Any:
    """Whether the grammar of a required call lets a model write a text and stop there."""
    parser = HermesExactToolParser(tokenizer, request().tools)
    tag = parser.get_structural_tag(request(), strict_level=ToolStrictLevel.PARAMETER)
    compiler = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=len(tokenizer)))
    grammar = compiler.compile_structural_tag(json.dumps(tag.model_dump()))

    def accepted(text: str) -> bool:
        matcher = xgrammar.GrammarMatcher(grammar, terminate_without_stop_token=True)
        return matcher.accept_string(text) and matcher.is_completed()

    return accepted


def call(arguments: str, name: str = "shell") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def test_the_templates_spelling_is_accepted(accepts: Any) -> None:
    assert accepts(call(ARGUMENTS))
    assert accepts(call(ARGUMENTS) + "\n" + call(ARGUMENTS))
    assert accepts(call("{}", name="free"))


@pytest.mark.parametrize(
    "text",
    [
        call(ARGUMENTS).replace("<tool_call>\n", "<tool_call>").replace("\n</tool_call>", "</tool_call>"),
        call('{"command":"ls","timeout_s":5}'),
        call('{ "command": "ls", "timeout_s": 5}'),
        call('{"command": "ls",\n"timeout_s": 5}'),
        call(ARGUMENTS) + call(ARGUMENTS),
        call('{"command": "ls"}'),  # a field is missing
        call('{"command": 5, "timeout_s": 5}'),  # of the wrong type
        call(ARGUMENTS, name="sh"),
        call('"text"', name="free"),  # arguments are an object even where nothing is said of them
        "no call",
        "",
    ],
)
def test_any_other_spelling_is_not(accepts: Any, text: str) -> None:
    assert not accepts(text)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    command=st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=30),
    timeout_s=st.integers(0, 10**6),
)
def test_what_was_written_is_parsed_and_rendered_again_unchanged(
    accepts: Any, tokenizer: Any, command: str, timeout_s: int
) -> None:
    written = call(json.dumps({"command": command, "timeout_s": timeout_s}, ensure_ascii=False))
    assert accepts(written)
    (parsed,) = HermesExactToolParser(tokenizer, request().tools).extract_tool_calls(written, request()).tool_calls
    function = {"name": parsed.function.name, "arguments": json.loads(parsed.function.arguments)}
    message = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]}
    again = TEMPLATE.render([{"role": "user", "content": "hi"}, message], add_generation_prompt=False)
    assert again.endswith(f"<|im_start|>assistant\n{written}<|im_end|>\n")


def test_a_call_that_was_cut_off_is_text(tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    text = call(ARGUMENTS)[:40]
    parsed = HermesExactToolParser(tokenizer, request().tools).extract_tool_calls(text, request())
    assert (parsed.tools_called, parsed.tool_calls, parsed.content) == (False, [], text)
    assert caplog.records == []


def test_one_call_only_where_the_client_asks_for_one(tokenizer: Any) -> None:
    named = request(tool_choice={"type": "function", "function": {"name": "shell"}})
    tag = HermesExactToolParser(tokenizer, named.tools).get_structural_tag(
        named, strict_level=ToolStrictLevel.PARAMETER
    )
    assert [tool.begin for tool in tag.format.tags] == ['<tool_call>\n{"name": "shell", "arguments": ']
    assert tag.format.stop_after_first

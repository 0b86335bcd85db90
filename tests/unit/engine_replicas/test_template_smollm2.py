"""The embedded model's chat template: what it says, and that it only ever appends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

import engine_replicas
from support.chat_template import ChatTemplate

TEMPLATE = ChatTemplate(Path(engine_replicas.__file__).parent / "templates" / "smollm2_tools.jinja")
SHELL = {
    "type": "function",
    "function": {"name": "shell", "description": "Run it", "parameters": {"type": "object", "properties": {}}},
}
GENERATION = "<|im_start|>assistant\n"


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def calling(*calls: tuple[str, Any], content: str | None = None) -> dict[str, Any]:
    functions = [{"type": "function", "function": {"name": name, "arguments": args}} for name, args in calls]
    return {"role": "assistant", "content": content, "tool_calls": functions}


def test_a_plain_chat_is_chatml_with_the_models_own_system_prompt() -> None:
    assert TEMPLATE.render([user("Hi")]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_a_system_message_replaces_the_models_own() -> None:
    rendered = TEMPLATE.render([{"role": "system", "content": "Be brief."}, user("Hi")])
    assert rendered.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n")
    assert "SmolLM" not in rendered


def test_tools_are_described_in_the_system_prompt() -> None:
    for messages in ([user("Hi")], [{"role": "system", "content": "Be brief."}, user("Hi")]):
        system = TEMPLATE.render(messages, tools=[SHELL]).split("<|im_end|>")[0]
        assert f"<tools>\n{json.dumps(SHELL)}\n</tools>" in system
        assert "<tool_call>" in system


def test_a_tool_call_is_spelled_as_the_grammar_spells_it() -> None:
    rendered = TEMPLATE.render(
        [user("Hi"), calling(("shell", {"command": "ls é", "n": 1}))], add_generation_prompt=False
    )
    expected = '<tool_call>\n{"name": "shell", "arguments": {"command": "ls é", "n": 1}}\n</tool_call>'
    assert rendered.endswith(f"<|im_start|>assistant\n{expected}<|im_end|>\n")


def test_several_calls_stand_on_lines_of_their_own_after_the_content() -> None:
    message = calling(("a", {}), ("b", {}), content="Both:\n")
    assert TEMPLATE.render([user("Hi"), message], add_generation_prompt=False).endswith(
        'assistant\nBoth:\n<tool_call>\n{"name": "a", "arguments": {}}\n</tool_call>\n'
        '<tool_call>\n{"name": "b", "arguments": {}}\n</tool_call><|im_end|>\n'
    )


def test_arguments_that_are_still_text_are_taken_as_they_are() -> None:
    assert '"arguments": {"x":1}}' in TEMPLATE.render([user("Hi"), calling(("a", '{"x":1}'))])


def test_a_tool_result_goes_back_as_a_response() -> None:
    rendered = TEMPLATE.render([user("Hi"), calling(("a", {})), {"role": "tool", "tool_call_id": "1", "content": "42"}])
    assert "<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n<|im_start|>assistant\n" in rendered


def test_content_may_be_absent_or_in_parts() -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    assert "user\none two<|im_end|>" in TEMPLATE.render([user(parts)])
    assert "user\n<|im_end|>" in TEMPLATE.render([user(None)])
    assert "user\n<|im_end|>" in TEMPLATE.render([user([])])


contents = (
    st.none()
    | st.text(max_size=30)
    | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": st.text(max_size=9)}))
)
arguments = st.dictionaries(st.text(max_size=8), st.integers() | st.text(max_size=8) | st.booleans(), max_size=3)
others = st.builds(
    lambda role, content: {"role": role, "content": content}, st.sampled_from(["user", "tool"]), contents
)
conversations = st.lists(others, min_size=1, max_size=3)


@given(
    opening=conversations,
    has_tools=st.booleans(),
    turns=st.lists(
        st.tuples(
            st.text(max_size=30),
            st.lists(st.tuples(st.sampled_from(["shell", "a"]), arguments), max_size=2),
            conversations,
        ),
        max_size=4,
    ),
)
def test_the_next_prompt_starts_with_this_one_and_what_was_generated(opening, has_tools, turns) -> None:
    tools = [SHELL] if has_tools else None
    messages = list(opening)
    for content, calls, results in turns:
        prompt = TEMPLATE.render(messages, tools=tools)
        assert prompt.endswith(GENERATION)
        spelled = [
            f'<tool_call>\n{{"name": "{n}", "arguments": {json.dumps(a, ensure_ascii=False)}}}\n</tool_call>'
            for n, a in calls
        ]
        generated = content + "\n".join(spelled)
        messages = [*messages, calling(*calls, content=content), *results]
        assert TEMPLATE.render(messages, tools=tools).startswith(f"{prompt}{generated}<|im_end|>\n")

"""`hermes_exact`: vLLM's Hermes tool parser, with a grammar that leaves one spelling for each call.

vLLM's own grammar lets a model write a call with or without newlines and with any whitespace in its JSON. The response
carries the parsed call only, so the next turn's prompt spells it as the chat template does; where the two differ, the
generated tokens and all KV after them are lost to the prefix cache. Here the model can only write what templates of the
Hermes family write: `<tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call>`, JSON separators ", " and ": ", calls
joined by a newline. It also keeps a small model from filling its output with whitespace.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import xgrammar
from vllm.entrypoints.generate.base.protocol import ExtractedToolCallInformation
from vllm.tool_parsers import ToolParserManager
from vllm.tool_parsers.hermes_tool_parser import Hermes2ProToolParser
from vllm.tool_parsers.utils import is_complete_json
from xgrammar.structural_tag import GrammarFormat, JSONSchemaFormat, TagFormat, TagsWithSeparatorFormat

NAME = "hermes_exact"
_NEWLINE_FORM = f"{Hermes2ProToolParser.tool_call_start_token}\n"


class HermesExactToolParser(Hermes2ProToolParser):
    """Parses as its base does; narrows the grammar of forced and strict calls."""

    def extract_tool_calls(self, model_output: str, request: Any) -> ExtractedToolCallInformation:
        """vLLM's reading. A call that was cut off, by `max_tokens` say, is text, and no reason for a traceback in the log."""
        _, start, last_call = model_output.rpartition(self.tool_call_start_token)
        if start and not is_complete_json(last_call.partition(self.tool_call_end_token)[0].strip()):
            return ExtractedToolCallInformation(tools_called=False, tool_calls=[], content=model_output)
        return super().extract_tool_calls(model_output, request)

    def get_structural_tag(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's structural tag for the request, or None, with one spelling for each call."""
        structural_tag = super().get_structural_tag(*args, **kwargs)
        calls = getattr(getattr(structural_tag, "format", None), "tags", None)
        if calls is not None:
            structural_tag.format.tags = [_exact(call) for call in calls if call.begin.startswith(_NEWLINE_FORM)]
            if isinstance(structural_tag.format, TagsWithSeparatorFormat):
                structural_tag.format.separator = "\n"
        return structural_tag


def _exact(call: TagFormat) -> TagFormat:
    if not isinstance(call.content, JSONSchemaFormat):
        return call
    schema = call.content.json_schema
    # `true` stands for "any JSON"; the arguments of a call are an object.
    grammar = _grammar(json.dumps(schema if isinstance(schema, dict) else {"type": "object"}))
    return call.model_copy(update={"content": GrammarFormat(grammar=grammar)})


@lru_cache(maxsize=512)
def _grammar(schema: str) -> str:
    # Without any_whitespace, xgrammar's separators are those of json.dumps, which templates' `tojson` uses.
    return str(xgrammar.Grammar.from_json_schema(schema, any_whitespace=False))


def register() -> None:
    """Make the parser known to vLLM by its name; doing so again changes nothing."""
    ToolParserManager.register_module(NAME, module=HermesExactToolParser)

"""What an MCP server answers, as the text that a model is given."""

from __future__ import annotations

import json
from collections.abc import Sequence

import mcp_types as types


def text_of(result: types.CallToolResult) -> str:
    """The result's content, block after block; its structured content where there is no other.

    A server that answers in structured form also answers in text (the specification asks it to, for clients that know only
    text), so the two are not shown twice. What is no text is told of: kind and size.
    """
    texts = [_block(block) for block in result.content]
    if not texts and result.structured_content is not None:
        texts = [json.dumps(result.structured_content, ensure_ascii=False)]
    return "\n".join(texts)


def _block(block: types.ContentBlock) -> str:
    match block:
        case types.TextContent():
            return block.text
        case types.ImageContent():
            return _media("image", block.mime_type, block.data)
        case types.AudioContent():
            return _media("audio", block.mime_type, block.data)
        case types.ResourceLink():
            told = f" – {block.description}" if block.description else ""
            return f"[resource {block.name}: {block.uri}{told}]"
        case types.EmbeddedResource():
            return _resource(block.resource)


def _resource(resource: types.TextResourceContents | types.BlobResourceContents) -> str:
    if isinstance(resource, types.TextResourceContents):
        return f"[resource {resource.uri}]\n{resource.text}"
    return _media(f"resource {resource.uri}", resource.mime_type, resource.blob)


def _media(what: str, mime_type: str | None, base64_text: str) -> str:
    size = len(base64_text) * 3 // 4 - base64_text[-2:].count("=")
    return f"[{what}, {mime_type or 'of unknown type'}, {size} bytes]"


def joined(words: Sequence[str]) -> str:
    """Names in a sentence, few of many."""
    shown = ", ".join(words[:20])
    return shown + (f" and {len(words) - 20} more" if len(words) > 20 else "")

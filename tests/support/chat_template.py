"""Renders a chat template as transformers does, without importing it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment


class ChatTemplate:
    """One template file."""

    def __init__(self, path: Path):
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
        self._template = environment.from_string(path.read_text())

    def render(
        self, messages: list[dict[str, Any]], *, tools: list[Any] | None = None, add_generation_prompt: bool = True
    ) -> str:
        return self._template.render(messages=messages, tools=tools, add_generation_prompt=add_generation_prompt)

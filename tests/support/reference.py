"""The pages of the documents that are made from the code: settings, the REST API, metrics, pictures.

`python -m support.reference` (with `tests` on PYTHONPATH) writes them anew.
"""

from __future__ import annotations

import asyncio
import importlib.util
import sys
import tempfile
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from deployments.settings import PlatformSettings
from support.api import ApiBench
from support.checkout import ROOT
from support.metrics import exported_page, families

DOCS = ROOT / "docs"
_MADE = "<!-- Made by `PYTHONPATH=tests python -m support.reference`; edit the code that it describes. -->\n\n"


def pages() -> dict[str, Callable[[], str]]:
    """What makes each generated file, by its path below `docs`."""
    return {
        "settings.md": settings_page,
        "api.md": api_page,
        "metrics.md": metrics_page,
        "pictures/lease.svg": lambda: str(_pictures().lease_picture()),
    }


# --- settings ---------------------------------------------------------------------------------------------------------


def settings_page() -> str:
    """Every setting with its default and its sentence."""
    lines = [
        "# Settings",
        "",
        "One tree: the `args` of `serve_config.yaml`, or the file of `continuum serve --config`; in the chart, `settings`. A key that does not",
        "exist, or a value that is not allowed, stops the start and is named.",
        "",
    ]
    for name, field in PlatformSettings.model_fields.items():
        model = _model(field)
        assert model is not None, name
        lines += [f"## {name}", "", str(field.description), ""]
        lines += _table(name, model)
    return _MADE + "\n".join(lines).rstrip() + "\n"


def _table(prefix: str, model: type[BaseModel]) -> list[str]:
    lines = ["| setting | default | |", "|---|---|---|"]
    inner: list[tuple[str, FieldInfo, type[BaseModel]]] = []
    for name, field in model.model_fields.items():
        nested = _model(field)
        dotted = f"{prefix}.{name}"
        if nested is not None:
            inner.append((dotted, field, nested))
            continue
        lines.append(f"| `{dotted}` | {_default(field)} | {_cell(_sentence(field))} |")
    if len(lines) == 2:
        lines = []
    lines.append("")
    for dotted, field, nested in inner:
        lines += [
            f"### {dotted}",
            "",
            f"{_sentence(field)}{_how_given(field)}",
            "",
            *_table(_path_of(dotted, field), nested),
        ]
    return lines


def _sentence(field: FieldInfo) -> str:
    choices = _choices(field.annotation)
    text = str(field.description or "")
    return f"{text} One of {', '.join(f'`{choice}`' for choice in choices)}." if choices else text


def _how_given(field: FieldInfo) -> str:
    kind = str(field.annotation)
    if kind.startswith(("dict", "collections.abc.Mapping", "typing.Mapping")):
        return " A mapping from names to:"
    if kind.startswith("tuple"):
        return " A list of:"
    return ""


def _path_of(dotted: str, field: FieldInfo) -> str:
    how = _how_given(field)
    return f"{dotted}.NAME" if "mapping" in how else f"{dotted}[]" if how else dotted


def _model(field: FieldInfo) -> type[BaseModel] | None:
    """The settings model in a field, however deep: a model, one or None, a list or a mapping of them."""
    pending = [field.annotation]
    while pending:
        kind = pending.pop()
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
        pending.extend(get_args(kind))
    return None


def _choices(annotation: Any) -> list[str]:
    pending, found = [annotation], []
    while pending:
        kind = pending.pop()
        if isinstance(kind, type) and issubclass(kind, Enum):
            found += [str(member.value) for member in kind]
        pending.extend(get_args(kind))
    return found


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "*required*"
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined or value is None:
        return "none"
    if isinstance(value, Enum):
        return f"`{value.value}`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, (tuple, list, dict, frozenset, set)) and not value:
        return "empty"
    if isinstance(value, (frozenset, set)):
        value = tuple(sorted(value))
    if isinstance(value, (tuple, list)):
        return ", ".join(f"`{one}`" for one in value)
    if isinstance(value, float) and value.is_integer():
        return f"`{int(value)}`"
    return f"`{value}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


# --- API --------------------------------------------------------------------------------------------------------------


def api_page() -> str:
    """Every route, from the OpenAPI document that the platform serves."""
    document = ApiBench().app.openapi()
    lines = [
        "# REST API",
        "",
        "Every route, from the OpenAPI document that a running platform serves at `/openapi.json` (to try at `/docs`). What the bodies hold,",
        "and what the errors mean, is in [Programs](programs-api.md). `/v1/chat/completions` and `/v1/models` have OpenAI's shapes.",
        "",
        "| | | |",
        "|---|---|---|",
    ]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            lines.append(f"| `{method.upper()}` | `{path}` | {_cell(_first(operation.get('description', '')))} |")
    return _MADE + "\n".join(lines) + "\n"


def _first(text: str) -> str:
    return " ".join(text.split("\n\n")[0].split())


# --- metrics ----------------------------------------------------------------------------------------------------------


def metrics_page() -> str:
    """Every family of our own, with its help."""
    # Sandboxes are not started; the directory only has to be one.
    with tempfile.TemporaryDirectory() as directory:
        found = families(asyncio.run(exported_page(Path(directory))))
    lines = [
        "# Metrics of the platform",
        "",
        "What `/metrics` exports under `continuum_`; [how to use it](observability.md). Replicas' own samples also have the labels `part` and",
        "`replica`. Counters end in `_total`, histograms in `_bucket`, `_sum` and `_count`.",
        "",
        "| metric | type | labels | |",
        "|---|---|---|---|",
    ]
    for name, family in sorted(found.items()):
        labels = sorted({label for sample in family.samples for label in sample.labels} - {"part", "replica", "le"})
        shown = f"{name}_total" if family.type == "counter" else name
        lines.append(f"| `{shown}` | {family.type} | {', '.join(labels)} | {_cell(family.documentation)} |")
    return _MADE + "\n".join(lines) + "\n"


def _pictures() -> Any:
    spec = importlib.util.spec_from_file_location("pictures", ROOT / "scripts" / "pictures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["pictures"] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    for name, made in pages().items():
        (DOCS / name).write_text(made())

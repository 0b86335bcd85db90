"""What the importers share: reading files so that an error names its line, and the rows that programs are made of."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agent_program.errors import InvalidRequest

#: One program as `trace.program_from_dict` reads it, or one turn of it.
Row = dict[str, Any]


@contextmanager
def place(path: Path, where: str, format_name: str) -> Iterator[None]:
    """Turn what goes wrong while a part of a file is read into an error that names the part.

    Raises:
        InvalidRequest: a key is missing, or a value is not what it has to be.
    """
    try:
        yield
    except KeyError as error:
        raise _bad(path, where, format_name, f"no {error.args[0]!r}") from error
    except (TypeError, ValueError, AttributeError, IndexError) as error:
        raise _bad(path, where, format_name, str(error)) from error


def _bad(path: Path, where: str, format_name: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"{path.name}{where} is not of a {format_name} trace: {why}", param="trace")


def json_lines(path: Path, format_name: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """The objects of a JSON Lines file with the numbers of their lines; empty lines are passed over.

    Raises:
        InvalidRequest: a line is not a JSON object; the message names it.
    """
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            with place(path, f" line {number}", format_name):
                loaded = json.loads(line)
                if not isinstance(loaded, dict):
                    raise TypeError("not a JSON object")
            yield number, loaded


def json_document(path: Path, format_name: str) -> Mapping[str, Any]:
    """The one object that a JSON file holds.

    Raises:
        InvalidRequest: the file is not one JSON object.
    """
    with place(path, "", format_name):
        loaded = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(loaded, dict):
            raise TypeError("not a JSON object")
    return loaded


def turn_row(*, inputs: int, prefix: int, outputs: int, tool: str | None, tool_s: float | None) -> Row:
    """A turn; a prompt computes at least its last token, and a wait is never negative.

    Raises:
        ValueError: a count below 0.
    """
    if min(inputs, outputs) < 0:
        raise ValueError(f"{inputs} input and {outputs} output tokens")
    prefix = max(0, min(prefix, inputs - 1))
    return {
        "input_tokens": inputs,
        "prefix_tokens": prefix,
        "new_input_tokens": inputs - prefix,
        "output_tokens": outputs,
        "tool": tool,
        "tool_s": None if tool_s is None else max(0.0, tool_s),
    }


def continued(turns: list[Row], inputs: int) -> int:
    """The prefix of a prompt that continues the last turn; where it is shorter than that, the context was cut."""
    if not turns:
        return 0
    before = turns[-1]["input_tokens"] + turns[-1]["output_tokens"]
    return int(before) if inputs > before else 0

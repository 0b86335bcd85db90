"""The platform's own journal as a trace: what `continuum programs export` writes, one finished program a line.

A turn's prompt is the whole context, so what the turn before left in the KV cache is that turn's prompt and output. The wait
until the next turn is taken between the two turns; a turn that no other follows ends the program, whatever it asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.replay.import_rows import Row, continued, json_lines, place, turn_row

FORMAT = "continuum.program"
#: The major version of the format that is read.
_VERSION = 1


def read_journal(path: Path) -> Iterator[Row]:
    """Programs of a journal export; arrivals count from the first submission."""
    first_s: float | None = None
    for number, line in json_lines(path, "journal"):
        with place(path, f" line {number}", "journal"):
            name, _, version = str(line["format"]).partition("/")
            if name != FORMAT or int(version.partition(".")[0]) != _VERSION:
                raise ValueError(f"format {line['format']!r}, where {FORMAT}/{_VERSION} is read")
            created_s = float(line["created_at"])
            first_s = created_s if first_s is None else first_s
            row = {
                "program_id": str(line["id"]),
                "kind": str(line.get("model") or "task"),
                # A journal is in order of ends; a program that came before the first of them came at the start.
                "arrival_s": max(0.0, created_s - first_s),
                "turns": _turns(line["turns"]),
            }
        yield row


def _turns(journaled: list[Mapping[str, Any]]) -> list[Row]:
    turns: list[Row] = []
    for turn, following in zip(journaled, [*journaled[1:], None], strict=True):
        inputs = int(turn["prompt_tokens"])
        turns.append(
            turn_row(
                inputs=inputs,
                prefix=continued(turns, inputs),
                outputs=int(turn["output_tokens"]),
                tool=None if following is None else str(turn.get("tool_key") or "unknown"),
                tool_s=None if following is None else float(following["started_at"]) - float(turn["finished_at"]),
            )
        )
    return turns

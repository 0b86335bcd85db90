"""Logs of the platform's own modules: one line a record, for people or as JSON, with the ids of what was being done.

    2026-08-01T12:00:00.123Z WARNING deployments.program_loop program=prog_1 turn=3: the replica is gone
    {"at": "2026-08-01T12:00:00.123Z", "level": "WARNING", "logger": …, "message": …, "program_id": "prog_1", "turn": 3}

The ids come from the context that the record is written in (`log_fields`), and from `extra=` where a record names its own. Logs
carry ids, sizes and times, never what a program said.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, TextIO

from deployments.telemetry_settings import LogFormat

PACKAGES = ("agent_program", "continuum_router", "deployments", "engine_replicas", "tool_runtime")
#: What a context or an `extra` may name; everything else in a record is the logging module's own.
FIELDS = ("request_id", "program_id", "turn", "action")

_fields: ContextVar[Mapping[str, str | int]] = ContextVar("log_fields", default={})  # noqa: B039 - never changed


@contextmanager
def log_fields(**fields: str | int) -> Iterator[None]:
    """Records written inside, also by tasks that are started there, carry these."""
    token = _fields.set({**_fields.get(), **fields})
    try:
        yield
    finally:
        _fields.reset(token)


def fields_of(record: logging.LogRecord) -> dict[str, str | int]:
    """The ids of a record, in a fixed order; its own win over its context's."""
    context = _fields.get()
    found = {name: getattr(record, name, context.get(name)) for name in FIELDS}
    return {name: value for name, value in found.items() if value is not None}


class TextLines(logging.Formatter):
    """For people."""

    def format(self, record: logging.LogRecord) -> str:
        ids = "".join(f" {name.removesuffix('_id')}={value}" for name, value in fields_of(record).items())
        line = f"{_at(record)} {record.levelname} {record.name}{ids}: {record.getMessage()}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonLines(logging.Formatter):
    """For programs."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "at": _at(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **fields_of(record),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def install(form: LogFormat, stream: TextIO | None = None) -> None:
    """Send the records of our modules to `stream`, standard error by default. The second call replaces the first."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines() if form is LogFormat.JSON else TextLines())
    handler.set_name("continuum")
    for package in PACKAGES:
        package_logger = logging.getLogger(package)
        for old in [one for one in package_logger.handlers if one.get_name() == "continuum"]:
            package_logger.removeHandler(old)
        package_logger.addHandler(handler)
        package_logger.setLevel(logging.INFO)
        package_logger.propagate = False


def _at(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, tz=UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{moment.microsecond // 1000:03d}Z"

"""Traces by OTLP over HTTP: one trace a program, sent when the program has ended, off the event loop.

The spans come from the journal with their times, so no tracer runs along: they are built finished and handed to OpenTelemetry's
exporter. Ids are digests of the program's id and the span's place in it: a trace that is sent again, by a runner that took the program
over, is the same trace.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from agent_program.errors import InvalidRequest
from deployments.program_trace import Span, SpanKind
from deployments.telemetry_settings import TelemetrySettings

logger = logging.getLogger(__name__)

_UNDER_WAY_MAX = 64


class SpanExporter(Protocol):
    """What is used of OpenTelemetry's exporter; its result is 0 where it succeeded."""

    def export(self, spans: Sequence[Any]) -> Any: ...

    def shutdown(self) -> None: ...


class OtlpTraces:
    """`TraceSink` that exports."""

    is_on = True

    def __init__(self, exporter: SpanExporter, *, service_name: str) -> None:
        self._exporter = exporter
        self._service_name = service_name
        self._sending: set[asyncio.Task[None]] = set()
        self._dropped = 0

    @property
    def dropped(self) -> int:
        return self._dropped

    def program_ended(self, program: Span) -> None:
        if len(self._sending) >= _UNDER_WAY_MAX:
            self._dropped += 1
            return
        task = asyncio.create_task(self._send(program))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def close(self) -> None:
        await asyncio.gather(*self._sending)
        await asyncio.to_thread(self._exporter.shutdown)

    async def _send(self, program: Span) -> None:
        try:
            spans = otel_spans(program, service_name=self._service_name)
            is_sent = (await asyncio.to_thread(self._exporter.export, spans)).value == 0
        except Exception:
            # An exporter is somebody else's code; a trace is not worth a program's runner.
            logger.exception("a trace was not exported")
            is_sent = False
        self._dropped += not is_sent


def otel_spans(program: Span, *, service_name: str) -> list[Any]:
    """The program's spans as OpenTelemetry's, parents first."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.trace import SpanContext, Status, StatusCode, TraceFlags
    from opentelemetry.trace import SpanKind as OtelKind

    resource = Resource.create({"service.name": service_name})
    program_id = str(program.attributes["gen_ai.conversation.id"])
    trace_id = _digest(program_id, 16)

    def context(path: str) -> SpanContext:
        flags = TraceFlags(TraceFlags.SAMPLED)
        return SpanContext(trace_id, _digest(f"{program_id}/{path}", 8), is_remote=False, trace_flags=flags)

    def converted(span: Span, path: str, parent: str | None) -> ReadableSpan:
        failed = Status(StatusCode.ERROR, span.error) if span.error is not None else Status(StatusCode.UNSET)
        attributes = {**span.attributes, "error.type": span.error} if span.error is not None else span.attributes
        return ReadableSpan(
            name=span.name,
            context=context(path),
            parent=None if parent is None else context(parent),
            resource=resource,
            attributes=dict(attributes),
            kind=OtelKind.CLIENT if span.kind is SpanKind.TURN else OtelKind.INTERNAL,
            status=failed,
            start_time=_nanoseconds(span.start_s),
            end_time=_nanoseconds(span.end_s),
        )

    return [converted(span, path, parent) for span, path, parent in _walk(program, "0", None)]


def _walk(span: Span, path: str, parent: str | None) -> Iterator[tuple[Span, str, str | None]]:
    yield span, path, parent
    for position, child in enumerate(span.children):
        yield from _walk(child, f"{path}.{position}", path)


def _digest(text: str, length: int) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:length], "big") or 1


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


def make_exporter(settings: TelemetrySettings) -> SpanExporter:
    """OpenTelemetry's own exporter for the endpoint.

    Raises:
        InvalidRequest: its package is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise InvalidRequest(
            "telemetry.otlp_endpoint is set, and opentelemetry-exporter-otlp-proto-http is not installed",
            param="telemetry.otlp_endpoint",
        ) from error
    make: Callable[..., SpanExporter] = OTLPSpanExporter
    return make(endpoint=settings.traces_url, headers=dict(settings.otlp_headers), timeout=settings.otlp_timeout_s)

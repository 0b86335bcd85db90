"""Where traces go (nowhere unless an endpoint is named), and what logs look like."""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field, field_validator


class LogFormat(StrEnum):
    """How a log record is written."""

    #: A line for people.
    TEXT = "text"
    #: A JSON object a line.
    JSON = "json"


class TelemetrySettings(BaseModel):
    """Traces of programs by OTLP, and logs."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    otlp_endpoint: str | None = Field(
        default=None,
        description="Address of an OTLP/HTTP collector, such as http://collector:4318; None sends no traces.",
    )
    otlp_headers: dict[str, str] = Field(
        default={},
        max_length=16,
        description="Headers of each request to the collector; secret ones belong into OTEL_EXPORTER_OTLP_HEADERS in the environment.",
    )
    otlp_timeout_s: float = Field(default=10.0, gt=0, description="Seconds that one export may take.")
    log_format: LogFormat = Field(
        default=LogFormat.TEXT, description="How the platform's own log lines are written, on standard error."
    )
    service_name: str = Field(default="continuum", min_length=1, description="`service.name` of the traces.")

    @field_validator("otlp_endpoint")
    @classmethod
    def _is_http(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith(("http://", "https://")):
            raise ValueError("otlp_endpoint starts with http:// or https://")
        return value

    @property
    def traces_url(self) -> str:
        """Where traces are posted; collectors take them at /v1/traces."""
        base = (self.otlp_endpoint or "").rstrip("/")
        return base if base.endswith("/v1/traces") else f"{base}/v1/traces"

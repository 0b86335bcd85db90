"""The one settings tree of the platform. It enters by `build_app`: as `args` of `serve_config.yaml`, or from the command line.
A wrong key or value stops the start and is named.

engine        the vLLM engine: model, memory, parsers        engine_replicas/engine_config.py
scheduling    retention and ordering policies                engine_replicas/config.py
router        bindings of programs to replicas               continuum_router/config.py
tools         sandbox and tool limits                        tool_runtime/config.py
programs      limits and durability of platform-run programs deployments/program_settings.py
telemetry     traces by OTLP, logs                           deployments/telemetry_settings.py
store, http, replicas                                        here
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    field_validator,
    model_validator,
)

from continuum_router.config import RouterSettings
from deployments.access import ApiKeySettings
from deployments.program_settings import ProgramSettings
from deployments.settings_errors import explained
from deployments.telemetry_settings import TelemetrySettings
from engine_replicas.config import SchedulingSettings
from engine_replicas.engine_config import EngineSettings
from tool_runtime.config import ToolRuntimeSettings

EMBEDDED_HOST = "127.0.0.1"


class StoreSettings(BaseModel):
    """Where durable state lives: the journal, bindings and tool-latency history."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    redis_url: str | None = Field(
        default=None,
        description="URL of a Redis or Valkey server that every node reaches; None starts an embedded Valkey, for one machine.",
    )
    embedded_port: int = Field(
        default=6399, ge=1, le=65_535, description="Port of the embedded server, on the loopback interface only."
    )
    data_dir: Path | None = Field(
        default=None,
        description="Directory of the embedded server's data; None is ~/.local/state/continuum/store.",
    )
    embedded_memory_mib: int = Field(
        default=512, ge=16, description="Memory of the embedded server, in MiB; full, it refuses to store more."
    )

    @field_validator("redis_url")
    @classmethod
    def _is_redis_url(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith(("redis://", "rediss://", "unix://")):
            raise ValueError("redis_url starts with redis://, rediss:// or unix://")
        return value

    @property
    def is_embedded(self) -> bool:
        """The platform starts its own store."""
        return self.redis_url is None

    @property
    def url(self) -> str:
        """Where everyone connects to."""
        return self.redis_url or f"redis://{EMBEDDED_HOST}:{self.embedded_port}/0"

    @property
    def embedded_data_dir(self) -> Path:
        """The embedded server's directory, with the default filled in."""
        return (self.data_dir or Path("~/.local/state/continuum/store")).expanduser()


class HttpSettings(BaseModel):
    """What the REST API accepts."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    body_bytes_max: int = Field(
        default=4 * 1024 * 1024,
        ge=1024,
        description="Largest request body, in bytes; a larger one is answered with 413.",
    )
    body_read_timeout_s: float = Field(
        default=60.0,
        gt=0,
        description="Seconds in which a request's body must have arrived, or the next piece of a workspace's archive.",
    )
    archive_bytes_max: int = Field(
        default=4 * 1024**3, ge=1024, description="Largest archive that may be sent for a workspace, in bytes."
    )
    api_keys: tuple[ApiKeySettings, ...] = Field(
        default=(), max_length=10_000, description="Keys that let people in; with any, every request needs one."
    )
    open_without_keys: bool = Field(
        default=False,
        description="While there are no keys: answer everybody, and not only requests from this machine's loopback.",
    )
    list_limit_max: int = Field(default=100, ge=1, description="Programs in one page of a list.")
    event_streams_max: int = Field(
        default=1000, ge=1, description="Event streams open at one ingress replica; one more is answered with 429."
    )
    probe_timeout_s: float = Field(
        default=5.0, gt=0, description="Seconds that a part has to answer a readiness or metrics request."
    )

    @field_validator("api_keys")
    @classmethod
    def _each_key_once(cls, keys: tuple[ApiKeySettings, ...]) -> tuple[ApiKeySettings, ...]:
        for what in ("name", "sha256"):
            values = [getattr(key, what) for key in keys]
            if len(set(values)) < len(values):
                raise ValueError(f"two keys have the same {what}")
        return keys


class ReplicaSettings(BaseModel):
    """How many replicas each part has and what each asks of its machine."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ingress: int = Field(default=1, ge=1, description="Replicas of the REST API.")
    runner: int = Field(default=1, ge=1, description="Replicas of the program runner.")
    engine: int = Field(default=1, ge=1, description="Engine replicas, each with a whole copy of the model.")
    tools: int = Field(default=1, ge=1, description="Tool actors; a program's tools run on one of them.")

    engine_cpus: float = Field(
        default=0.5,
        gt=0,
        description="Ray CPUs that an engine replica asks for (for each GPU of a placement group); what a CPU engine really "
        "uses is `engine.cpu_threads`.",
    )
    engine_memory_gib: float | None = Field(
        default=None, gt=0, description="Memory that an engine replica asks Ray for, in GiB; None asks for none."
    )
    engine_gpu_type: str | None = Field(
        default=None, description="Ray accelerator type of the engine's GPUs, for example H200; None takes any."
    )
    service_cpus: float = Field(
        default=0.1, gt=0, description="Ray CPUs that each of the other replicas asks for: they mostly wait."
    )
    turns_per_engine_max: int = Field(
        default=4096,
        ge=1,
        description="Turns that an engine replica takes at once, well above its batch: the scheduler owns the queue.",
    )
    requests_per_ingress_max: int = Field(
        default=2048, ge=1, description="Requests that an ingress replica serves at once."
    )
    calls_per_tool_actor_max: int = Field(
        default=1024, ge=1, description="Calls that a tool actor takes at once; it runs as many as `tools` allows."
    )
    drain_s: float = Field(
        default=60.0, ge=0, description="Seconds that a stopping engine or tool replica has to finish what it runs."
    )
    health_period_s: float = Field(default=5.0, gt=0, description="Seconds between two health checks of a replica.")
    health_timeout_s: float = Field(
        default=30.0, gt=0, description="Seconds after which a health check without an answer counts as failed."
    )
    startup_attempts_max: int = Field(
        default=5, ge=1, description="Times that a replica is started before the deployment counts as failed."
    )


class PlatformSettings(BaseModel):
    """Everything that an operator can set. Unknown keys are an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    engine: EngineSettings = Field(default=EngineSettings(), description="The vLLM engine of each replica.")
    scheduling: SchedulingSettings = Field(
        default=SchedulingSettings(), description="What the scheduler does with paused programs."
    )
    router: RouterSettings = Field(default=RouterSettings(), description="How programs are bound to replicas.")
    tools: ToolRuntimeSettings = Field(default=ToolRuntimeSettings(), description="How tools run.")
    programs: ProgramSettings = Field(default=ProgramSettings(), description="How platform-run programs are run.")
    store: StoreSettings = Field(default=StoreSettings(), description="Where durable state lives.")
    http: HttpSettings = Field(default=HttpSettings(), description="What the REST API accepts.")
    replicas: ReplicaSettings = Field(default=ReplicaSettings(), description="Replicas and their resources.")
    telemetry: TelemetrySettings = Field(
        default=TelemetrySettings(), description="Where traces of programs go, and what logs look like."
    )

    @model_validator(mode="wrap")
    @classmethod
    def _say_what_to_write_instead(cls, tree: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return handler(tree)
        except ValidationError as error:
            raise explained(error, cls) from error

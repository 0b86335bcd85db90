"""Settings of platform-run programs: default and largest limits, and how patient their runner is."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, model_validator


class LimitDefaults(BaseModel):
    """What a program gets whose submitter names no limits."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_turns: int = Field(default=16, ge=1, description="LLM turns.")
    max_tokens_per_turn: int = Field(default=512, ge=1, description="Output tokens of one turn.")
    max_total_tokens: int | None = Field(
        default=None, ge=1, description="Prompt and output tokens over all turns; None for no bound but the others."
    )
    max_seconds: float = Field(
        default=3600.0, gt=0, description="Seconds from submission to end, queueing and waits for actions included."
    )
    action_expires_s: float = Field(
        default=3600.0, gt=0, description="Seconds that an action which a program requires of its client may take."
    )
    tool_timeout_s: float | None = Field(
        default=None, gt=0, description="Seconds of one tool call; None for the tool runtime's own default."
    )


class LimitCeilings(BaseModel):
    """The largest limits that a submitter may name; a larger one is refused, not cut."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_turns: int = Field(default=256, ge=1, description="LLM turns.")
    max_tokens_per_turn: int = Field(default=32_768, ge=1, description="Output tokens of one turn.")
    max_total_tokens: int = Field(default=100_000_000, ge=1, description="Prompt and output tokens over all turns.")
    max_seconds: float = Field(default=24 * 3600.0, gt=0, description="Seconds from submission to end.")
    action_expires_s: float = Field(
        default=7 * 24 * 3600.0, gt=0, description="Seconds that an action which a program requires may take."
    )
    tool_timeout_s: float = Field(default=3600.0, gt=0, description="Seconds of one tool call.")


class ProgramSettings(BaseModel):
    """How platform-run programs are accepted, run and remembered."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    limit_defaults: LimitDefaults = Field(
        default=LimitDefaults(), description="Limits of a program whose submitter names none."
    )
    limit_ceilings: LimitCeilings = Field(default=LimitCeilings(), description="Largest limits that may be named.")

    queued_max: int = Field(
        default=10_000, ge=1, description="Programs that may wait for a runner; one more is refused with 429."
    )
    running_per_runner_max: int = Field(default=256, ge=1, description="Programs that one runner replica runs at once.")
    messages_max: int = Field(default=1024, ge=1, description="Messages in one submission.")
    tools_max: int = Field(default=64, ge=1, description="Tools in one submission.")
    metadata_max: int = Field(default=16, ge=0, description="Metadata entries of one program, as in OpenAI's API.")

    tool_calls_per_turn_max: int = Field(
        default=16,
        ge=1,
        description="Tool calls of one turn that are kept; a model that asks for more has asked for so many.",
    )
    tool_output_chars_max: int = Field(
        default=1_000_000, ge=1, description="Characters of one output that a client posts for a tool of its own."
    )
    tool_calls_parallel_max: int = Field(default=4, ge=1, description="Tool calls of one program that run at once.")
    turn_attempts_max: int = Field(
        default=2, ge=1, description="Replicas on which a turn is run when each of them is lost: 2 is one replay."
    )
    claims_in_a_row_max: int = Field(
        default=10,
        ge=1,
        description="Runners that may take a program one after the other without finishing a step; then it fails.",
    )
    delete_workspaces: bool = Field(
        default=True,
        description="Delete a program's workspace when it ends; false keeps the files where its tools ran.",
    )

    lease_s: float = Field(
        default=10.0, gt=0, description="Seconds after which a silent runner's programs may be taken by another one."
    )
    lease_extensions: int = Field(default=3, ge=2, description="How often a lease is extended in `lease_s`.")
    poll_s: float = Field(
        default=2.0, gt=0, description="Seconds after which a runner looks for work although nobody called it."
    )
    retry_s: float = Field(
        default=0.5, gt=0, description="Seconds between two attempts to reach an engine or the store."
    )
    engine_wait_s: float = Field(
        default=300.0, ge=0, description="Seconds for which a turn waits while no engine replica takes it."
    )
    tool_wait_s: float = Field(
        default=60.0, ge=0, description="Seconds for which a tool call waits while no tool actor or sandbox takes it."
    )
    release_wait_s: float = Field(
        default=3.0,
        ge=0,
        description="Seconds that a program's end waits for the engine to say how the last lease on its KV ended.",
    )
    store_wait_s: float = Field(
        default=60.0, ge=0, description="Seconds for which a program waits for a store that does not answer."
    )

    keep_finished_s: float = Field(
        default=7 * 24 * 3600.0, ge=0, description="Seconds for which a finished program and its events can be read."
    )
    keep_finished_count: int = Field(default=10_000, ge=0, description="Finished programs kept; the oldest go first.")
    heartbeat_s: float = Field(
        default=15.0, gt=0, description="Seconds of silence after which an event stream sends a heartbeat."
    )

    @model_validator(mode="after")
    def _defaults_below_ceilings(self) -> ProgramSettings:
        for name, ceiling in self.limit_ceilings:
            default = getattr(self.limit_defaults, name)
            if default is not None and default > ceiling:
                raise ValueError(f"limit_defaults.{name} ({default:g}) is above limit_ceilings.{name} ({ceiling:g})")
        return self

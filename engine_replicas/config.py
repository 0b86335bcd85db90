"""Settings of the scheduler half: which policies run and how far they may go.

They reach the engine process as `vllm_config.additional_config["continuum"]`, a plain dict of this model.
"""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field, model_validator


class SchedulingPreset(StrEnum):
    """A retention policy, an ordering and an admission that belong together."""

    #: Stock vLLM: KV is freed when a turn ends, first come first served by turn.
    VLLM = "vllm"
    #: Autellix: no retention, the program that was served least goes first.
    AUTELLIX = "autellix"
    #: InferCept: KV is preserved while that wastes less than computing it again, programs in order of arrival.
    INFERCEPT = "infercept"
    #: The paper: leases by expected benefit, first come first served by program.
    CONTINUUM = "continuum"
    #: Ours: leases that can be outbid, a lane for first turns, declared work first, and no more programs than fit.
    ADAPTIVE = "adaptive"


class RetentionName(StrEnum):
    """How long a paused program keeps its KV."""

    END_OF_TURN = "end_of_turn"
    STATIC_TTL = "static_ttl"
    INFERCEPT = "infercept"
    CONTINUUM = "continuum"
    ADAPTIVE = "adaptive"


class OrderingName(StrEnum):
    """Which waiting turn runs next."""

    FCFS = "fcfs"
    PROGRAM_FCFS = "program_fcfs"
    PLAS = "plas"
    ADAPTIVE = "adaptive"


class AdmissionName(StrEnum):
    """Whether a new program may start while others hold the memory."""

    NONE = "none"
    WORKING_SET = "working_set"


_PRESETS = {
    SchedulingPreset.VLLM: (RetentionName.END_OF_TURN, OrderingName.FCFS, AdmissionName.NONE),
    SchedulingPreset.AUTELLIX: (RetentionName.END_OF_TURN, OrderingName.PLAS, AdmissionName.NONE),
    SchedulingPreset.INFERCEPT: (RetentionName.INFERCEPT, OrderingName.PROGRAM_FCFS, AdmissionName.NONE),
    SchedulingPreset.CONTINUUM: (RetentionName.CONTINUUM, OrderingName.PROGRAM_FCFS, AdmissionName.NONE),
    SchedulingPreset.ADAPTIVE: (RetentionName.ADAPTIVE, OrderingName.ADAPTIVE, AdmissionName.WORKING_SET),
}


class ShadowSettings(BaseModel):
    """A retention policy that looks on. Unknown keys are an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    preset: SchedulingPreset = Field(
        default=SchedulingPreset.ADAPTIVE, description="The preset whose retention looks on; `retention` overrides."
    )
    retention: RetentionName | None = Field(
        default=None, description="The retention policy that looks on, where it is not the preset's."
    )
    ttl_s: float = Field(
        default=2.0, ge=0, le=86_400, description="How long `static_ttl` would retain every turn's KV, in seconds."
    )


class SchedulingSettings(BaseModel):
    """What the scheduler does with paused programs. Unknown keys are an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    preset: SchedulingPreset = Field(
        default=SchedulingPreset.ADAPTIVE,
        description="The policies to run; `retention`, `ordering` and `admission` override.",
    )
    retention: RetentionName | None = Field(
        default=None, description="The retention policy, where it is not the preset's."
    )
    ordering: OrderingName | None = Field(default=None, description="The ordering, where it is not the preset's.")
    admission: AdmissionName | None = Field(default=None, description="The admission, where it is not the preset's.")

    ttl_s: float = Field(
        default=2.0, ge=0, le=86_400, description="How long `static_ttl` retains every turn's KV, in seconds."
    )
    ttl_max_s: float = Field(
        default=120.0,
        gt=0,
        le=86_400,
        description="No lease lasts longer than this from the end of its turn, in seconds.",
    )
    priced_ttl_max_s: float = Field(
        default=1800.0,
        gt=0,
        le=86_400,
        description="No lease of a retention that can be outbid (`adaptive`) lasts longer than this, in seconds.",
    )
    provisional_ttl_s: float = Field(
        default=1.5,
        gt=0,
        le=60,
        description="How long KV is held after a turn until the replica says which tool runs, in seconds.",
    )
    expected_turn_hold_s: float = Field(
        default=2.0,
        ge=0,
        le=60,
        description="How long a lease is kept after its tool finished, for the next turn to arrive, in seconds.",
    )
    queued_turn_hold_max_s: float = Field(
        default=60.0,
        ge=0,
        le=86_400,
        description="How long a waiting next turn may keep its lease past the deadline, in seconds.",
    )
    turn_wait_max_s: float = Field(
        default=1800.0,
        gt=0,
        description="A turn that has waited for longer runs next, whatever its program, where turns are ordered by program.",
    )
    lane_fraction: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="Ordering `adaptive`: first turns of programs go first while those that run hold less than this share of "
        "the KV blocks.",
    )
    lane_time_share: float = Field(
        default=0.05,
        ge=0,
        le=1,
        description="Ordering `adaptive`: the share of the engine's time that first turns may take before others.",
    )
    backfill_skips_max: int = Field(
        default=4,
        ge=0,
        le=64,
        description="Ordering `adaptive`: how many waiting turns that do not fit a smaller one may pass.",
    )
    backfill_wait_max_s: float = Field(
        default=30.0,
        ge=0,
        description="Ordering `adaptive`: a turn that did not fit for longer is not passed any more, in seconds.",
    )
    admission_fraction: float = Field(
        default=0.95,
        gt=0,
        le=1,
        description="Admission `working_set`: share of the KV blocks that the active programs' contexts may take.",
    )
    admission_wait_max_s: float = Field(
        default=600.0,
        gt=0,
        description="Admission `working_set`: a program that has waited for longer starts, in seconds.",
    )
    k_cold_start: int = Field(
        default=100,
        ge=0,
        le=100_000,
        description="Durations needed before a history is trusted: first the global one, then the tool's own.",
    )

    retained_fraction_max: float = Field(
        default=0.9, ge=0, le=1, description="Largest share of the KV blocks that leases may hold together."
    )
    tenant_retained_fraction_max: float = Field(
        default=0.9, ge=0, le=1, description="Largest share of the KV blocks that one tenant's leases may hold."
    )
    program_retained_fraction_max: float = Field(
        default=0.6, ge=0, le=1, description="Largest share of the KV blocks that one program's leases may hold."
    )

    duration_window: int = Field(
        default=1024, ge=8, le=65_536, description="Newest tool durations kept per tool and over all tools."
    )
    tools_max: int = Field(
        default=1024,
        ge=1,
        le=100_000,
        description="Tools with a history of their own; the least recently used one goes.",
    )
    queueing_delay_window: int = Field(
        default=256, ge=1, le=65_536, description="Newest queueing delays of evicted turns that T averages."
    )
    program_window: int = Field(
        default=256, ge=2, le=65_536, description="Newest finished programs that eta is estimated from."
    )
    eta_programs_min: int = Field(
        default=8, ge=2, le=65_536, description="Finished programs needed before eta leaves its prior of 1."
    )
    programs_max: int = Field(
        default=8192,
        ge=16,
        le=1_000_000,
        description="Programs remembered; beyond it the least recently active idle one goes.",
    )
    program_idle_max_s: float = Field(
        default=1800.0, gt=0, description="A program silent for longer counts as ended, in seconds."
    )
    step_log_path: str | None = Field(
        default=None,
        description="File that gets one JSON line per engine step, for fitting step-time models; off by default.",
    )

    shadow: ShadowSettings | None = Field(
        default=None,
        description="A second retention policy that sees all that happens and holds nothing; what it would have done is in the "
        "engine's statistics.",
    )

    @model_validator(mode="before")
    @classmethod
    def _nothing_given_is_the_default(cls, value: object) -> object:
        return {} if value is None else value

    def of_shadow(self) -> SchedulingSettings | None:
        """These settings with the shadow's retention in place of the one that acts; None without a shadow."""
        if self.shadow is None:
            return None
        named = {"preset": self.shadow.preset, "retention": self.shadow.retention, "ttl_s": self.shadow.ttl_s}
        return self.model_copy(update={**named, "shadow": None})

    @property
    def retention_name(self) -> RetentionName:
        """The retention policy that runs."""
        return self.retention or _PRESETS[self.preset][0]

    @property
    def ordering_name(self) -> OrderingName:
        """The ordering that runs."""
        return self.ordering or _PRESETS[self.preset][1]

    @property
    def admission_name(self) -> AdmissionName:
        """The admission that runs."""
        return self.admission or _PRESETS[self.preset][2]

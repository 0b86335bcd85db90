"""Settings of the router: how long bindings live, how patient it is with the store, and what load weighs."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, model_validator


class LoadWeights(BaseModel):
    """What counts as load when a new program is placed. Everything is expressed in turns: the load of one turn is 1."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    queued_tokens_per_turn: float = Field(default=2048.0, gt=0)
    """So many prompt tokens waiting to be computed weigh as much as one turn."""

    kv_full_turns: float = Field(default=16.0, ge=0)
    """A replica whose whole KV pool is in use weighs as much as this many turns; half the pool, half of it."""

    kv_retained_fraction: float = Field(default=0.5, ge=0, le=1)
    """How much a block retained for a paused program counts against a block in use: it can be reclaimed, at a price."""

    program_turns: float = Field(default=0.5, ge=0)
    """A program bound to a replica weighs this many turns even while its tools run: it will come back."""

    prefix_turns_max: float = Field(default=4.0, ge=0)
    """Most turns that a replica may be busier than the least loaded one because it has the beginning of a program's prompt."""

    family_turns_max: float = Field(default=8.0, ge=0)
    """Most turns that a replica may be busier than the least loaded one and still take a sub-program of a program that it has,
    or one that goes on with a program that it had."""

    family_kv_fraction_max: float = Field(default=0.9, ge=0, le=1)
    """Share of a replica's KV above which it takes no program for the sake of its relatives."""


class MigrationSettings(BaseModel):
    """When a bound program whose KV is no longer kept leaves its replica for a shorter queue."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    margin_s: float = Field(default=2.0, ge=0)
    """Seconds by which the way must be shorter elsewhere, its context computed again included."""

    min_stay_s: float = Field(default=30.0, ge=0)
    """Seconds for which a program that was moved is not moved again."""

    programs_watched_max: int = Field(default=65_536, ge=1)
    """Most programs of which a process remembers what the last reply said of their KV; others are never moved."""


class RetrySettings(BaseModel):
    """How turns that lost their replica are tried again, and when a replica is given no more."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    per_attempt: float = Field(default=0.1, ge=0)
    """Retries that each first attempt of a turn earns: 0.1 keeps retries at a tenth of the traffic."""

    reserve: int = Field(default=10, ge=0)
    """Retries that a process may make without having earned them."""

    saved_max: int = Field(default=100, ge=0)
    """Most earned retries that are saved up."""

    failures_to_open: int = Field(default=3, ge=1)
    """Lost turns in a row after which a replica is kept out of use for a time."""

    open_s: float = Field(default=5.0, gt=0)
    """For how long, in seconds, the first time; twice as long each time that the first turn afterwards is lost too."""

    open_max_s: float = Field(default=60.0, gt=0)
    """And no longer than this."""


class AdmissionSettings(BaseModel):
    """What the edge lets in. Of each ingress replica."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    turns_max: int = Field(default=1024, ge=1)
    """Turns under way beyond which a program's first turn waits. Later turns of programs that were let in never wait."""

    waiting_per_tenant_max: int = Field(default=256, ge=0)
    """First turns of one tenant that may wait; one more is answered with 429."""

    waiting_max: int = Field(default=4096, ge=0)
    """First turns of all tenants that may wait."""

    wait_s: float = Field(default=120.0, gt=0)
    """Seconds after which a first turn that still waits is answered with 429."""

    tenant_weights: dict[str, float] = Field(default={})
    """Tenant → its share of starts while several wait, relative to 1."""

    programs_remembered_max: int = Field(default=100_000, ge=1)
    """Most programs that are remembered as let in; the least recently used goes first."""

    tenants_remembered_max: int = Field(default=1000, ge=1)
    """About so many tenants that do not wait keep their place in the order."""

    retry_after_min_s: int = Field(default=1, ge=1)
    """Least seconds that a refused client is told to wait."""

    retry_after_max_s: int = Field(default=120, ge=1)
    """Most seconds that a refused client is told to wait."""

    retry_after_unknown_s: int = Field(default=5, ge=1)
    """What it is told while no turn has ended yet, so that no rate is known."""

    @model_validator(mode="after")
    def _weights_are_positive(self) -> AdmissionSettings:
        for tenant, weight in self.tenant_weights.items():
            if not 0 < weight < 1e6:
                raise ValueError(f"tenant_weights.{tenant} must be above 0")
        return self


class AutoscalingSettings(BaseModel):
    """How many engine replicas there are, by what their programs need."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    replicas_min: int = Field(default=1, ge=1)
    """Never fewer."""

    replicas_max: int = Field(default=1, ge=1)
    """Never more."""

    kv_fraction_target: float = Field(default=0.8, gt=0, le=1)
    """Share of all replicas' KV that the working set of their programs should fill."""

    waiting_turns_per_replica: float = Field(default=4.0, gt=0)
    """Turns that may wait at a replica without another one being wanted."""

    shrink_after_s: float = Field(default=300.0, ge=0)
    """Seconds for which fewer replicas must have been enough before one of them is drained."""

    drain_s: float = Field(default=600.0, gt=0)
    """Seconds that a replica has to be left by its programs before it is stopped anyway."""

    @model_validator(mode="after")
    def _min_is_not_above_max(self) -> AutoscalingSettings:
        if self.replicas_min > self.replicas_max:
            raise ValueError("replicas_min is above replicas_max")
        return self


class RouterSettings(BaseModel):
    """How programs are bound to replicas."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    binding_ttl_s: float = Field(default=6 * 3600.0, gt=0)
    """Seconds for which a program that sends nothing stays bound. Every turn starts them anew."""

    binding_fresh_s: float = Field(default=1.0, ge=0)
    """Seconds for which a process trusts its own copy of a binding before it asks the store again: the longest time for
    which two processes can disagree about a program."""

    programs_cached_max: int = Field(default=1_000_000, ge=2)
    """Most bindings that one process keeps its own copy of; the least recently used half goes first."""

    store_timeout_s: float = Field(default=0.5, gt=0)
    """Seconds to wait for the store before deciding without it."""

    store_retry_s: float = Field(default=1.0, gt=0)
    """After the store failed, seconds to decide without it before it is asked again."""

    store_connections_max: int = Field(default=16, ge=1)
    """Most connections that one router opens to the store."""

    unknown_replica_grace_s: float = Field(default=1.0, ge=0)
    """Another router may bind a program to a replica that this one has not heard of yet. Seconds to wait for that news
    before the replica counts as lost."""

    lost_replica_quarantine_s: float = Field(default=10.0, ge=0)
    """Seconds for which a replica seen dying is not used, even if a late broadcast still lists it."""

    routing_stats_period_s: float = Field(default=0.5, gt=0)
    """Seconds between two reports of a replica's load."""

    follow_only_methods: frozenset[str] = frozenset({"tool_event", "explain", "cancel"})
    """Replica methods that go to a program's replica but never bind a program that has none."""

    turn_methods: frozenset[str] = frozenset({"chat"})
    """Replica methods that run a turn: their arguments are the request's body and its hints, and they take `placement`."""

    releasing_methods: frozenset[str] = frozenset({"release_program", "release"})
    """Replica methods that end a program's binding once the replica has taken the call."""

    routing_tasks_max: int = Field(default=512, ge=1)
    """Most requests for which a replica is being sought at once. Requests beyond it queue, and one that waits for its
    own full replica would hold up the others, so it is generous."""

    weights: LoadWeights = LoadWeights()
    """What load weighs."""

    migration: MigrationSettings = MigrationSettings()
    """When a program leaves a replica that lives."""

    retries: RetrySettings = RetrySettings()
    """What happens to turns that lost their replica, and to replicas that lose turns."""

    admission: AdmissionSettings = AdmissionSettings()
    """What the edge lets in."""

    autoscaling: AutoscalingSettings | None = None
    """How many engine replicas there are; None for always as many as `replicas.engine` says."""

    turn_timeout_s: float | None = Field(default=3600.0, gt=0)
    """Seconds that a turn may take, queueing included, before it is given up on its replica and run on another one."""

    stream_silence_s: float | None = Field(default=300.0, gt=0)
    """Seconds of silence after a stream's first piece that count as the replica being out of reach."""

    seed: int = Field(default=0, ge=0, lt=2**32)
    """Seed of the hash that breaks ties between equally loaded replicas."""

"""Settings of the router: how long bindings live, how patient it is with the store, and what load weighs."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


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

    releasing_methods: frozenset[str] = frozenset({"release_program", "release"})
    """Replica methods that end a program's binding once the replica has taken the call."""

    routing_tasks_max: int = Field(default=512, ge=1)
    """Most requests for which a replica is being sought at once. Requests beyond it queue, and one that waits for its
    own full replica would hold up the others, so it is generous."""

    weights: LoadWeights = LoadWeights()
    """What load weighs."""

    seed: int = Field(default=0, ge=0, lt=2**32)
    """Seed of the hash that breaks ties between equally loaded replicas."""

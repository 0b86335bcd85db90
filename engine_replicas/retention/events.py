"""What the engine's adapter and the `RetentionController` say to each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from engine_replicas.retention.lease import Lease, LeaseEnd


class TurnEnding(StrEnum):
    """How a turn left the engine."""

    #: It stopped by itself or at its token limit.
    ENDED = "ended"
    #: It was aborted after producing output, and it had stop strings: the front end stops such a turn by an abort, which
    #: cannot be told from a client that went away.
    MAYBE_ENDED = "maybe_ended"
    #: Aborted, failed, or grown to the model's limit: no next turn continues it.
    CUT = "cut"


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldKv:
    """The blocks that a replay of a turn would hit."""

    #: Opaque names of the blocks.
    blocks: frozenset[int]
    #: Context tokens in them.
    tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedTurn:
    """A turn that left the engine."""

    turn_id: str
    ending: TurnEnding
    #: Tokens whose KV it computed or found.
    context_tokens: int
    #: Names its blocks; costs time in proportion to them, so it is called only if they are worth retaining.
    collect: Callable[[], HeldKv]
    #: Tokens that the other turns hold which run.
    other_tokens: int = 0


class NoLease(StrEnum):
    """Why a turn's KV was not retained."""

    PREFIX_CACHING_OFF = "prefix_caching_off"
    PAUSED = "paused"
    #: The policy grants no time.
    NOT_WORTH_IT = "not_worth_it"
    #: All leases together, the tenant's or the program's would hold more than they may.
    OVER_CAP = "over_cap"
    #: The context does not fill one block.
    NOTHING_TO_RETAIN = "nothing_to_retain"


@dataclass(frozen=True, kw_only=True, slots=True)
class Changes:
    """What the adapter has to do: take references for `begun`, then give back those of `ended`."""

    begun: Lease | None = None
    ended: tuple[LeaseEnd, ...] = ()


class ArmReason(StrEnum):
    """Why there was nothing to arm."""

    UNKNOWN_PROGRAM = "unknown_program"
    #: The turn's end has not been seen in the engine yet; the request waits for it.
    TURN_NOT_ENDED = "turn_not_ended"
    #: Nothing was retained, or it is gone already.
    NO_LEASE = "no_lease"
    LAST_TURN = "last_turn"


@dataclass(frozen=True, kw_only=True, slots=True)
class Armed:
    """Answer to an arm request."""

    #: Seconds granted from the end of the turn; 0 where nothing is retained.
    ttl_s: float = 0.0
    blocks: int = 0
    #: A `DecisionReason` or an `ArmReason`.
    reason: str
    ended: tuple[LeaseEnd, ...] = ()

"""What one turn sends back: how it opened, the bytes for the client, and how it closed.

    TurnOpened, str, str, ..., TurnClosed          the strings are server-sent events, or one JSON document

A stream that ends by an exception has no TurnClosed: the engine died under it, and the turn may run elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from agent_program.ids import ReplicaId, ToolKey


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnOpened:
    """The first item: everything that HTTP wants to know before the body."""

    #: HTTP status; 200, or the error's.
    status: int
    #: The strings that follow are server-sent events (`data: ...`); otherwise one JSON document follows.
    is_stream: bool
    #: The incarnation that answers.
    replica_id: ReplicaId


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnTimings:
    """Where the engine's part of a turn went, in seconds, one phase after the other."""

    #: From the engine's queue to its first step.
    queue_s: float
    #: From there to the first token.
    prefill_s: float
    #: From there to the last token.
    decode_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnClosed:
    """The last item: what the turn cost and what comes next."""

    #: Tokens of the context that the turn was given.
    prompt_tokens: int
    #: How many of them were found in the KV cache.
    cached_tokens: int
    #: Tokens generated, over all choices.
    output_tokens: int
    #: What the program runs next, one key a call; empty where the turn was an answer.
    tool_keys: tuple[ToolKey, ...]
    #: OpenAI's reason (`stop`, `length`, `tool_calls`), `error`, `timeout`; None where no generation ended.
    finish_reason: str | None
    #: The scheduler's answer to the arming of the lease (`ttl_s`, `blocks`, `reason`); None where none was asked for or
    #: the scheduler did not answer.
    lease: dict[str, Any] | None
    #: None where the engine did not say.
    timings: TurnTimings | None = None
    #: Tokens that prompt and output of a turn may have together; None where the engine did not say.
    context_tokens_max: int | None = None


NOT_GENERATED = TurnClosed(
    prompt_tokens=0, cached_tokens=0, output_tokens=0, tool_keys=(), finish_reason="error", lease=None
)
"""How a turn closes that never reached the engine."""

"""How much of a tool's output the model's context still has room for. Pure.

A tool may write megabytes into a context of a few thousand tokens; the next turn would then be refused, and a program would fail for
what its tool said. So an output is cut to what fits: the room is what the context has left, less what the next turn may generate, and a
token stands for at least one byte of text, so that as many bytes as there are tokens of room fit whatever they are. With a long
context this cuts nothing that the tool runtime's own limits have not cut.
"""

from __future__ import annotations

#: Chat templates wrap each message, and the next turn names its role.
_OVERHEAD_TOKENS = 96
#: Where a turn's output has no limit of its own, so much of the context is left to it.
_TURN_TOKENS_UNLIMITED = 512
#: Of an output that is cut, this part of what is kept comes from its start.
_HEAD_SHARE = 0.4


def room_bytes(
    *, context_tokens: int, context_tokens_max: int | None, turn_tokens_max: int | None, calls: int
) -> int | None:
    """Bytes that each of a turn's `calls` results may have; None where the context's limit is not known.

    Args:
        context_tokens: prompt and output of the turn that called.
        turn_tokens_max: what the next turn may generate, if that is limited.
    """
    if context_tokens_max is None:
        return None
    left = max(0, context_tokens_max - context_tokens)
    reserved = min(turn_tokens_max or _TURN_TOKENS_UNLIMITED, left // 2)
    return max(0, left - reserved - _OVERHEAD_TOKENS * calls) // max(1, calls)


def fitted(output: str, bytes_max: int | None) -> str:
    """The output, or its start and end with a note in between where it has more than `bytes_max` bytes in UTF-8."""
    raw = output.encode()
    if bytes_max is None or len(raw) <= bytes_max:
        return output
    head_bytes = int(bytes_max * _HEAD_SHARE)
    head = raw[:head_bytes].decode(errors="ignore")
    tail = raw[len(raw) - (bytes_max - head_bytes) :].decode(errors="ignore")
    left_out = len(raw) - len(head.encode()) - len(tail.encode())
    return f"{head}\n[... {left_out:,} bytes left out: the context has no room for them ...]\n{tail}"

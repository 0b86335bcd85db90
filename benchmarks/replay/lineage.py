"""Block hashes for contexts that have no tokens. Pure.

vLLM's prefix cache asks only that equal prefixes have equal hashes and different prefixes different ones. A trace says
how long each turn's unchanged prefix is, which is enough to name every block without hashing tokens that do not exist.
"""

from __future__ import annotations

import hashlib


class ContextLineage:
    """Which content each block of a program's context holds, as it grows and is edited over the turns.

    The context is a row of segments, each written in one turn. A turn that keeps P leading tokens drops the segments
    beyond P and starts a new one. A block's hash names the last segment that it touches and its index: segments only
    ever follow each other in one order, so two blocks with one name have one content, prefix included.
    """

    __slots__ = ("_block_size", "_hashes", "_name", "_segments", "_shared_blocks")

    def __init__(self, name: str, block_size: int, *, shared: str | None = None, shared_tokens: int = 0) -> None:
        self._name = name
        self._block_size = block_size
        self._segments: list[tuple[int, bytes]] = [(0, _digest(f"{name}/0"))]
        self._shared_blocks = shared_tokens // block_size
        namespace = _digest(f"{shared}/shared")
        self._hashes = [namespace + index.to_bytes(4, "big") for index in range(self._shared_blocks)]

    def start_turn(self, turn: int, prefix_tokens: int) -> None:
        """Keep `prefix_tokens` of the context; what follows is new."""
        keep = prefix_tokens // self._block_size
        if keep < len(self._hashes) and turn > 0:
            del self._hashes[max(keep, self._shared_blocks) :]
            self._segments = [segment for segment in self._segments if segment[0] < prefix_tokens]
            self._segments.append((prefix_tokens, _digest(f"{self._name}/{turn}")))

    def hashes(self, tokens: int) -> list[bytes]:
        """Hashes of the full blocks of the first `tokens` tokens."""
        self._grow(tokens // self._block_size)
        return self._hashes[: tokens // self._block_size]

    def hash_at(self, index: int) -> bytes:
        self._grow(index + 1)
        return self._hashes[index]

    def _grow(self, blocks: int) -> None:
        for index in range(len(self._hashes), blocks):
            last_token = (index + 1) * self._block_size - 1
            name = next(name for start, name in reversed(self._segments) if start <= last_token)
            self._hashes.append(name + index.to_bytes(4, "big"))


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()

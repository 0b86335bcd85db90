"""Whose KV a tier below the GPU holds, and what of it nobody will ask for again.

A tier evicts what was used least recently. The KV of a program that has ended was used a moment ago and is worth nothing,
while that of a paused program was used long ago and will be asked for: only who knows programs can tell them apart. A chunk
that one program alone has used dies with it. A chunk that several have used, or turns without a program, is a shared prefix (a
system prompt, say) and goes by its age like any other.

Pure: told what was used, what ended and what left the tier; answers which chunks are dead. As large as the tier's content.
"""

from __future__ import annotations

from collections.abc import Iterable

from agent_program.ids import ProgramId


class ChunkOwners:
    """The program that each chunk belongs to, if it is one."""

    def __init__(self) -> None:
        #: Chunk → its only user; None where several use it, or somebody without a program.
        self._owner: dict[bytes, ProgramId | None] = {}
        #: Program → the chunks that only it has used, in the order of their first use: the start of a context first.
        self._chunks: dict[ProgramId, dict[bytes, None]] = {}

    def __len__(self) -> int:
        return len(self._owner)

    def used(self, chunks: Iterable[bytes], program_id: ProgramId | None) -> None:
        """A turn of the program, or one without a program, stored these chunks or found them."""
        for chunk in chunks:
            if chunk not in self._owner:
                self._owner[chunk] = program_id
                if program_id is not None:
                    self._chunks.setdefault(program_id, {})[chunk] = None
            elif self._owner[chunk] != program_id:
                self._disown(chunk)
                self._owner[chunk] = None

    def ended(self, program_id: ProgramId) -> list[bytes]:
        """The program is over. Returns the chunks that die with it, the end of a context first: a prefix is of use without what
        follows it, not the other way round."""
        chunks = self._chunks.pop(program_id, {})
        for chunk in chunks:
            # If anybody should use it after all, it is no longer the dead program's.
            del self._owner[chunk]
        return list(reversed(chunks))

    def gone(self, chunks: Iterable[bytes]) -> None:
        """These left the tier."""
        for chunk in chunks:
            if chunk in self._owner:
                self._disown(chunk)
                del self._owner[chunk]

    def clear(self) -> None:
        """The tier is empty."""
        self._owner.clear()
        self._chunks.clear()

    def _disown(self, chunk: bytes) -> None:
        owner = self._owner[chunk]
        if owner is None:
            return
        chunks = self._chunks[owner]
        del chunks[chunk]
        if not chunks:
            del self._chunks[owner]

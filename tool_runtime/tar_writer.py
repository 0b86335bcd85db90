"""A workspace of this machine as a tar: what `inside/archive.py` writes, with the errors of this side."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path

from tool_runtime.inside import archive
from tool_runtime.workspace_errors import WorkspaceTooLarge

_PIECE_BYTES = 256 * 1024


def tar_of(root: Path, *, bytes_max: int, files_max: int) -> Generator[bytes, None, None]:
    """The content of `root` as an uncompressed pax archive, in pieces of at most 256 KiB.

    Raises (while iterating):
        WorkspaceTooLarge: it holds more than `bytes_max` bytes of content or `files_max` entries, or is nested too deeply.
        FileNotFoundError: there is no such directory.
    """
    try:
        yield from _gathered(archive.tar_of(root, bytes_max=bytes_max, files_max=files_max))
    except archive.TooLarge as exc:
        raise WorkspaceTooLarge(str(exc)) from exc


def _gathered(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """The same bytes in pieces of some size: an archive of small files is mostly headers."""
    waiting: list[bytes] = []
    size = 0
    for piece in pieces:
        waiting.append(piece)
        size += len(piece)
        if size >= _PIECE_BYTES:
            whole = b"".join(waiting)
            yield from (whole[at : at + _PIECE_BYTES] for at in range(0, len(whole), _PIECE_BYTES))
            waiting, size = [], 0
    whole = b"".join(waiting)
    yield from (whole[at : at + _PIECE_BYTES] for at in range(0, len(whole), _PIECE_BYTES))

"""A workspace of this machine as a tar: what `inside/archive.py` writes, with the errors of this side."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tool_runtime.inside import archive
from tool_runtime.workspace_errors import WorkspaceTooLarge


def tar_of(root: Path, *, bytes_max: int, files_max: int) -> Iterator[bytes]:
    """The content of `root` as an uncompressed pax archive.

    Raises (while iterating):
        WorkspaceTooLarge: it holds more than `bytes_max` bytes of content or `files_max` entries, or is nested too deeply.
        FileNotFoundError: there is no such directory.
    """
    try:
        yield from archive.tar_of(root, bytes_max=bytes_max, files_max=files_max)
    except archive.TooLarge as exc:
        raise WorkspaceTooLarge(str(exc)) from exc

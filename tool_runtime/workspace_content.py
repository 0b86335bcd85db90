"""How much was moved into a workspace."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkspaceContent:
    """What a workspace was filled with."""

    #: Files, directories and links.
    entries: int
    #: Content of all files together.
    bytes: int

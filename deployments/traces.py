"""Where finished programs' traces go: a port, and the sink that is used where traces are off."""

from __future__ import annotations

from typing import Protocol

from deployments.program_trace import Span


class TraceSink(Protocol):
    """Takes the spans of programs that have ended."""

    def program_ended(self, program: Span) -> None:
        """Send it on. Never waits and never raises: what cannot be sent is counted as dropped."""
        ...

    @property
    def is_on(self) -> bool:
        """Whether anybody takes them."""
        ...

    @property
    def dropped(self) -> int:
        """Traces that were not delivered."""
        ...

    async def close(self) -> None:
        """Finish what is under way."""
        ...


class NoTraces:
    """Traces are off."""

    is_on = False
    dropped = 0

    def program_ended(self, program: Span) -> None:
        """Nothing."""

    async def close(self) -> None:
        """Nothing."""

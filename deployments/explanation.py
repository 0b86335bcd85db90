"""Why a program's KV was kept or dropped, and where the program is: asked of every engine replica.

A program that ended is bound to no replica, and one that moved is known to several, so the binding does not say whom to ask.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agent_program.errors import EngineUnavailable
from deployments.fleet import ENGINE_PART, Fleet


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanations:
    """What the schedulers know of one program."""

    #: Of the replica that knew it most recently; None where no replica knows it.
    latest: Mapping[str, Any] | None
    #: Of replicas on which it was before.
    earlier: tuple[Mapping[str, Any], ...]
    #: Why its last turn went to the replica where it is, and (`came`) why the first one did; None where none remembers it.
    placement: Mapping[str, Any] | None = None


class Explainer:
    """Asks the engine replicas."""

    def __init__(self, fleet: Fleet, *, timeout_s: float) -> None:
        self._fleet = fleet
        self._timeout_s = timeout_s

    async def explain(self, program_id: str) -> Explanations:
        """Raises EngineUnavailable where no replica answers."""
        answer = await self._fleet.ask(ENGINE_PART, "explain_here", program_id, timeout_s=self._timeout_s)
        if not answer.is_up:
            raise EngineUnavailable("; ".join(answer.faults) or None, retry_after_s=1)
        known = [{"replica": replica, **explained} for replica, explained in answer.answers if explained["is_known"]]
        # One that has not ended there is where it is; of several, the one that met it last.
        known.sort(key=lambda explained: (explained["is_over"], explained["age_s"]))
        placed = [
            {"replica": replica, **explained["placement"]}
            for replica, explained in answer.answers
            if explained.get("placement") is not None
        ]
        home = known[0]["replica"] if known else None
        placed.sort(key=lambda placement: placement["replica"] != home)
        return Explanations(
            latest=known[0] if known else None, earlier=tuple(known[1:]), placement=placed[0] if placed else None
        )

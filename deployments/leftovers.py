"""What programs that are over left with the tool actors, found by comparing the actors with the journal.

A program that ends is released once, by whoever ended it; that message can fail to arrive: its runner died between the last
step and the release, the tool actor was being replaced, a call that had been given up reached the actor after the release. So
every runner looks, now and then, at what the actors hold, and releases what the journal says is over. Both may happen twice.

A program that the journal does not know (any more) is over too, as far as its sandbox goes, which is in an actor of this
platform; not its files, which may be another platform's on the same disk. Those are left to `tools.workspace_ttl_s`.
"""

from __future__ import annotations

import logging

from agent_program.errors import ProgramNotFound
from deployments.journal import Journal
from deployments.ports import ToolClient

logger = logging.getLogger(__name__)

#: What ran something within this time is not looked at: its end, if it came, is being dealt with.
QUIET_S = 30.0


async def release_leftovers(journal: Journal, tools: ToolClient, *, delete_workspaces: bool) -> int:
    """Release what programs that are over still hold; returns for how many programs that was.

    Raises:
        StoreUnavailable: the journal does not answer.
    """
    found = 0
    for held in await tools.held(QUIET_S):
        try:
            is_over, is_known = (await journal.get(held.program_id)).state.is_final, True
        except ProgramNotFound:
            is_over, is_known = True, False
        if is_over and (held.is_live or (is_known and delete_workspaces)):
            logger.warning("program %s is over and was not released; releasing it now", held.program_id)
            await tools.release_everywhere(held, delete_workspace=delete_workspaces and is_known)
            found += 1
    return found

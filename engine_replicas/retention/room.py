"""Room for a new lease under the caps, where leases have a price: the cheapest go, for what has just ended is worth most."""

from __future__ import annotations

from agent_program.ids import ProgramId, TenantId
from engine_replicas.retention.lease import Lease, LeaseEnd, LeaseEndReason
from engine_replicas.retention.ledger import Cap, Ledger
from engine_replicas.retention.reclaim import Reclaiming


def make_room(
    ledger: Ledger,
    reclaiming: Reclaiming,
    program_id: ProgramId,
    tenant_id: TenantId,
    blocks: frozenset[int],
    now_s: float,
) -> tuple[LeaseEnd, ...]:
    """End the cheapest leases under each cap that a new one on `blocks` would exceed."""
    ended: list[LeaseEnd] = []
    while (cap := ledger.exceeded_cap(program_id, tenant_id, ledger.not_held(blocks))) is not None:
        under: tuple[Lease, ...] = ledger.of_program(program_id)
        if cap is not Cap.PROGRAM:
            under = tuple(lease for lease in ledger.leases() if cap is Cap.ALL or lease.tenant_id == tenant_id)
        victim = reclaiming.victim(under, spare=None, now_s=now_s)
        end = ledger.reclaim(victim, LeaseEndReason.OVER_CAP) if victim is not None else None
        if end is None:
            break
        ended.append(end)
    return tuple(ended)

"""How much work a program still has, from what it declared, discounted by how far declarations proved wrong.

A declaration is a number of turns still to come: a client's hint, or what a submitted program's limits leave. Limits are upper
bounds, so the ratio of turns really taken to turns declared is tracked per tenant, over the newest programs that ended, and
applied to what its programs declare now. A program that outlives its declaration is expected to go on in proportion to what it
has done: turns left = max(declared · ratio − done, 0.3 · done + 1).

Seconds come from the program's own mean time a turn so far, or everybody's before it has one. A program that declares nothing
counts as typical: the running mean of what those that declare have left when their turns come, so that it is neither preferred
nor put off.
"""

from __future__ import annotations

from collections import OrderedDict, deque

from agent_program.ids import TenantId

_TENANTS_MAX = 1024
_PROGRAMS_WINDOW = 64
_PRIOR_WEIGHT = 4.0
_SMOOTHING = 0.02


class DeclaredWork:
    """What declarations are worth, and what they say."""

    def __init__(self) -> None:
        self._ratios: OrderedDict[TenantId, deque[float]] = OrderedDict()
        self._turn_s = 0.0
        self._turns = 0
        self._typical_s = 0.0

    def turn_ran(self, seconds: float) -> None:
        """A turn ran for so long, its time in the queue apart."""
        self._turns += 1
        self._turn_s += (seconds - self._turn_s) * max(_SMOOTHING, 1.0 / self._turns)

    def program_ended(self, tenant_id: TenantId, *, declared_turns: int, turns: int) -> None:
        """A program that had declared `declared_turns` in all ended after `turns`."""
        if declared_turns <= 0 or turns <= 0:
            return
        ratios = self._ratios.setdefault(tenant_id, deque(maxlen=_PROGRAMS_WINDOW))
        self._ratios.move_to_end(tenant_id)
        ratios.append(min(10.0, turns / declared_turns))
        if len(self._ratios) > _TENANTS_MAX:
            self._ratios.popitem(last=False)

    def ratio(self, tenant_id: TenantId) -> float:
        """Turns taken over turns declared, of the tenant's programs; 1 before any has ended."""
        ratios = self._ratios.get(tenant_id, ())
        return (_PRIOR_WEIGHT + sum(ratios)) / (_PRIOR_WEIGHT + len(ratios))

    def remaining_s(
        self, tenant_id: TenantId, *, declared_turns: int | None, turns_done: int, attained_s: float
    ) -> float:
        """Seconds for which the program's turns will run from now on."""
        if declared_turns is None:
            return self._typical_s
        turns_left = max(declared_turns * self.ratio(tenant_id) - turns_done, 0.3 * turns_done + 1.0)
        return turns_left * (attained_s / turns_done if turns_done else self._turn_s)

    def declared(self, remaining_s: float) -> None:
        """A turn came with a declaration that leaves `remaining_s` of work."""
        self._typical_s += (remaining_s - self._typical_s) * (_SMOOTHING if self._typical_s else 1.0)

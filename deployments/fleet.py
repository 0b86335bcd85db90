"""The rest of the platform as the REST API sees it: one call to every replica of a deployment at once.

For readiness, metrics and explanations only; turns and tools go through `ray_clients.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

#: The parts that the API asks by name.
ENGINE_PART, TOOLS_PART, INGRESS_PART = "engine", "tools", "ingress"


@dataclass(frozen=True, kw_only=True, slots=True)
class PartAnswer:
    """What the replicas of one deployment answered."""

    #: One answer for each replica that gave one.
    answers: tuple[Any, ...]
    #: Why others gave none.
    faults: tuple[str, ...]

    @property
    def is_up(self) -> bool:
        """At least one replica answered."""
        return bool(self.answers)


class Fleet(Protocol):
    """The deployments behind the API, by part name."""

    @property
    def parts(self) -> Sequence[str]:
        """Their names, in the order in which people want to read them."""
        ...

    async def ask(self, part: str, method: str, *arguments: Any, timeout_s: float) -> PartAnswer:
        """Call a method on every replica of a part. Never raises for what a replica does."""
        ...


class RayFleet:
    """`Fleet` over deployment handles."""

    def __init__(self, handles: Mapping[str, DeploymentHandle]) -> None:
        self._handles = handles

    @property
    def parts(self) -> Sequence[str]:
        return tuple(self._handles)

    async def ask(self, part: str, method: str, *arguments: Any, timeout_s: float) -> PartAnswer:
        try:
            results = (
                await self._handles[part]
                .broadcast(method, *arguments)
                .results_async(timeout_s=timeout_s, return_exceptions=True)
            )
        except TimeoutError:
            return PartAnswer(answers=(), faults=(f"no answer within {timeout_s:g} s",))
        except (RayError, RayServeException) as error:
            return PartAnswer(answers=(), faults=(_reason(error),))
        return PartAnswer(
            answers=tuple(result for result in results if not isinstance(result, BaseException)),
            faults=tuple(_reason(result) for result in results if isinstance(result, BaseException)),
        )


def _reason(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1][:300] if lines else type(error).__name__

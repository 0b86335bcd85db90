"""Errors of Ray and Serve, told apart by what they mean for a turn or a tool call.

the replica died under the call          it may have run        ActorDiedError, any other RayError
no replica takes the call                it has not run         BackPressureError, DeploymentUnavailableError, ...
the replica's own PlatformError          as it says             comes back wrapped in RayTaskError
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ray.exceptions import RayActorError, RayError, RayTaskError, TaskCancelledError, WorkerCrashedError
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    ReplicaUnavailableError,
    RequestCancelledError,
)

from agent_program.errors import Overloaded, PlatformError, Unavailable

_LOST = (RayActorError, WorkerCrashedError)
_REFUSED = (DeploymentUnavailableError, ReplicaUnavailableError)


@contextmanager
def translated_ray_errors(*, lost: type[Unavailable], what: str) -> Iterator[None]:
    """Raise `lost` where whoever ran the call died, `Unavailable` where nobody took it, the replica's own PlatformError
    where it raised one. Any other error of the replica's code is a fault and stays as it is."""
    try:
        yield
    except RayTaskError as error:
        if isinstance(error.cause, PlatformError):
            raise error.cause from error
        if isinstance(error.cause, (*_LOST, TaskCancelledError)):
            raise lost(f"{what} was lost: {error.cause}") from error
        raise
    except BackPressureError as error:
        raise Overloaded(f"{what} takes no more requests now; try again later", retry_after_s=1) from error
    except _REFUSED as error:
        raise Unavailable(f"{what} is not available: {error}", retry_after_s=1) from error
    except (RayError, RequestCancelledError) as error:
        # Whatever else Ray says: the call may have run.
        raise lost(f"{what} was lost: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    # Ray's messages run over many lines of advice.
    return str(error).strip().partition("\n")[0]

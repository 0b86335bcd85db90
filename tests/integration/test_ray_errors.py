"""What Ray and Serve raise, told apart by whether the call may have run."""

from __future__ import annotations

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayTaskError, WorkerCrashedError
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from agent_program.errors import EngineUnavailable, InvalidRequest, Overloaded, PlatformError, Unavailable
from deployments.ports import ContextOverflow, ReplicaLost
from deployments.ray_clients import engine_error
from deployments.ray_errors import translated_ray_errors

pytestmark = pytest.mark.integration


def from_replica(cause: Exception) -> RayTaskError:
    """How an exception of the replica's own code arrives."""
    return RayTaskError("chat", "traceback", cause)


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (ActorDiedError(), ReplicaLost),
        (ActorUnavailableError("away", None), ReplicaLost),
        (WorkerCrashedError(), ReplicaLost),
        (from_replica(ActorDiedError()), ReplicaLost),
        (BackPressureError(num_queued_requests=1, max_queued_requests=1), Overloaded),
        (DeploymentUnavailableError(DeploymentID("EngineReplica", "continuum")), Unavailable),
        (GetTimeoutError("late"), ReplicaLost),
        (from_replica(EngineUnavailable("the core is dead")), EngineUnavailable),
        (from_replica(InvalidRequest("bad", param="x")), InvalidRequest),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else value.__name__,
)
def test_each_error_becomes_what_it_means(raised: Exception, expected: type[PlatformError]) -> None:
    with pytest.raises(expected) as caught, translated_ray_errors(lost=ReplicaLost, what="the engine replica"):
        raise raised
    assert type(caught.value) is expected
    assert "\n" not in caught.value.message


def test_a_fault_of_the_replicas_code_stays_a_fault() -> None:
    with pytest.raises(RayTaskError), translated_ray_errors(lost=ReplicaLost, what="the engine replica"):
        raise from_replica(ZeroDivisionError())


@pytest.mark.parametrize(
    ("status", "error", "expected"),
    [
        (400, {"message": "too long", "param": "input_tokens"}, ContextOverflow),
        (400, {"message": "Input length (9) exceeds model's maximum context length (8)."}, ContextOverflow),
        (400, {"message": "bad temperature", "param": "temperature"}, InvalidRequest),
        (503, {"message": "starting"}, EngineUnavailable),
    ],
)
def test_error_documents_of_the_engine_get_stable_codes(
    status: int, error: dict[str, str], expected: type[PlatformError]
) -> None:
    assert type(engine_error(status, {"error": error})) is expected

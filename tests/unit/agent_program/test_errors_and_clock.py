import inspect
import pickle

import pytest

from agent_program import errors
from agent_program.clock import ManualClock, SystemClock
from agent_program.errors import Overloaded, PlatformError

CLASSES = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, PlatformError)]


@pytest.mark.parametrize("cls", CLASSES)
def test_every_error_has_a_message_an_http_status_and_openai_s_shape(cls: type[PlatformError]) -> None:
    error = cls()
    assert error.message
    assert 400 <= error.status < 600
    assert set(error.body()["error"]) == {"message", "type", "param", "code"}


def test_codes_are_unique_except_where_a_class_is_a_pure_parent() -> None:
    codes = [cls.code for cls in CLASSES]
    assert len(codes) == len(set(codes))


def test_an_error_crosses_a_process_border_whole() -> None:
    error = pickle.loads(pickle.dumps(Overloaded("full", param="programs", retry_after_s=2.5)))
    assert (type(error), error.message, error.param, error.retry_after_s) == (Overloaded, "full", "programs", 2.5)


def test_a_manual_clock_moves_only_when_told_and_never_back() -> None:
    clock = ManualClock(now_s=5.0, wall_s=1000.0)
    clock.advance(2.5)
    assert (clock.now_s(), clock.wall_s()) == (7.5, 1002.5)
    with pytest.raises(ValueError, match="does not go back"):
        clock.advance(-1)


def test_the_system_clock_does_not_go_back() -> None:
    clock = SystemClock()
    assert clock.now_s() <= clock.now_s()

"""People who wait are told what for, and for how long already."""

from __future__ import annotations

import threading

import pytest

from deployments.progress import told


class Lines:
    """Lines that were told, and a way to wait for some number of them."""

    def __init__(self, wanted: int) -> None:
        self.said: list[str] = []
        self._wanted = wanted
        self.reached = threading.Event()

    def __call__(self, line: str) -> None:
        self.said.append(line)
        if len(self.said) >= self._wanted:
            self.reached.set()


def test_a_stage_is_told_at_once_and_what_is_quick_is_not_repeated() -> None:
    lines = Lines(1)
    with told("stopping Ray", lines):
        assert lines.said == ["stopping Ray"]
    assert lines.said == ["stopping Ray"]


def test_what_takes_long_is_repeated_with_what_is_missing() -> None:
    lines = Lines(3)
    with told("starting", lines, detail=lambda: "EngineReplica 0 of 1", remind_s=0.01):
        assert lines.reached.wait(30)
    assert lines.said[1] == "starting, for 0 s now: EngineReplica 0 of 1"


def test_an_error_of_the_detail_leaves_it_out_and_one_of_the_work_passes() -> None:
    def broken() -> str:
        raise RuntimeError("the part that is asked is starting")

    lines = Lines(2)
    with pytest.raises(ValueError, match="the work"), told("starting", lines, detail=broken, remind_s=0.01):  # noqa: PT012
        assert lines.reached.wait(30)
        raise ValueError("the work")
    assert lines.said[1] == "starting, for 0 s now"
    said = len(lines.said)
    lines.reached.clear()
    assert not lines.reached.wait(0.05)
    assert len(lines.said) == said, "no reminder is left"

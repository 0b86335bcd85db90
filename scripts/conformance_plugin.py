"""The pytest plugin that runs vLLM's own tests on our scheduler. Loaded by `conformance.py`; settings are environment variables.

vLLM's tests import `Scheduler` and `AsyncScheduler` by name. Before any of them is collected, those names are bound to our
classes with the preset in `CONTINUUM_CONFORMANCE_VARIANT` (`stock` leaves vLLM's). With `+programs` behind the preset every
request is the only turn of a program of its own, so that leases and queues are not merely idle. How each test ended is written to the file
in `CONTINUUM_CONFORMANCE_REPORT`.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

VARIANT = "CONTINUUM_CONFORMANCE_VARIANT"
REPORT = "CONTINUUM_CONFORMANCE_REPORT"
STOCK = "stock"
PROGRAMS = "programs"

#: Worst last: a test whose call passed and whose teardown failed has failed.
_RANKS = ("passed", "skipped", "failed")


class _Outcomes:
    """How each test ended, and why where it did not pass."""

    def __init__(self) -> None:
        self._outcomes: dict[str, str] = {}
        self._why: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        before = self._outcomes.get(report.nodeid, "passed")
        self._outcomes[report.nodeid] = max(before, report.outcome, key=_RANKS.index)
        if report.outcome != "passed":
            self._why[report.nodeid] = _last_line(report)

    def pytest_sessionfinish(self) -> None:
        found = {"outcomes": self._outcomes, "why": self._why}
        Path(os.environ[REPORT]).write_text(json.dumps(found), encoding="utf-8")


def _last_line(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else str(report.longrepr)
    return text.strip().partition("\n")[0][:200]


@pytest.fixture
def caplog_vllm(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """vLLM's log records; the suite's own fixture of that name is in a conftest that is left out."""
    logger = logging.getLogger("vllm")
    before = logger.propagate
    logger.propagate = True
    try:
        with caplog.at_level(logging.INFO, logger="vllm"):
            yield caplog
    finally:
        logger.propagate = before


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cpu_test: upstream's mark for what needs no GPU")
    config.pluginmanager.register(_Outcomes(), "conformance-outcomes")
    preset, _, suffix = os.environ[VARIANT].partition("+")
    if preset != STOCK:
        _substitute(preset)
    if suffix == PROGRAMS:
        _make_programs()


def _substitute(preset: str) -> None:
    from vllm.v1.core.sched import async_scheduler, scheduler

    from engine_replicas.vllm_scheduler import RetainingAsyncScheduler, RetainingScheduler

    def configured(base: type) -> type:
        class WithPreset(base):
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                config = kwargs["vllm_config"] if "vllm_config" in kwargs else args[0]
                config.additional_config = {"continuum": {"preset": preset}}
                super().__init__(*args, **kwargs)

        return WithPreset

    scheduler.Scheduler = configured(RetainingScheduler)
    async_scheduler.AsyncScheduler = configured(RetainingAsyncScheduler)


def _make_programs() -> None:
    from vllm.v1.request import Request

    make = Request.__init__

    def make_turn(self: Request, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        if self.session_id is None:
            self.session_id = self.request_id

    Request.__init__ = make_turn

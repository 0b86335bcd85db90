"""How long steps take, in both scheduling modes."""

import json
from dataclasses import dataclass, field
from pathlib import Path

from engine_replicas.step_log import StepLog, StepTimer


@dataclass
class Scheduled:
    """The part of vLLM's SchedulerOutput that is read."""

    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())


@dataclass
class Computing:
    """The part of vLLM's Request that is read."""

    num_computed_tokens: int


def test_a_step_lasts_from_its_scheduling_to_its_output() -> None:
    timer = StepTimer(None)
    step = Scheduled({"a": 100})
    timer.scheduled(step, {"a": Computing(100)}, 10.0)
    sample = timer.finished(step, 10.5)
    assert sample is not None
    assert (sample.tokens, sample.pairs, sample.duration_s) == (100, 5050, 0.5)


def test_a_step_scheduled_ahead_lasts_from_the_end_of_the_one_before() -> None:
    timer = StepTimer(None)
    first, second = Scheduled({"a": 100}), Scheduled({"a": 50})
    timer.scheduled(first, {"a": Computing(100)}, 10.0)
    timer.scheduled(second, {"a": Computing(150)}, 10.1)
    timer.finished(first, 10.5)
    sample = timer.finished(second, 10.7)
    assert sample is not None
    # 50 tokens behind 100 others: 50·100 + 50·51/2.
    assert (round(sample.duration_s, 6), sample.pairs) == (0.2, 6275)


def test_a_step_that_mostly_decodes_is_no_prefill_sample() -> None:
    timer = StepTimer(None)
    for tokens in ({"a": 1, "b": 1}, {"a": 2, **{f"b{index}": 1 for index in range(10)}}):
        step = Scheduled(tokens)
        timer.scheduled(step, {name: Computing(500) for name in tokens}, 1.0)
        assert timer.finished(step, 2.0) is None


def test_an_empty_step_disturbs_nothing() -> None:
    timer = StepTimer(None)
    step = Scheduled({"a": 100})
    timer.scheduled(step, {"a": Computing(100)}, 1.0)
    timer.scheduled(Scheduled(), {}, 1.1)
    assert timer.finished(Scheduled(), 1.2) is None
    assert timer.finished(step, 2.0) is not None


def test_a_step_whose_output_never_came_is_skipped() -> None:
    timer = StepTimer(None)
    lost, step = Scheduled({"a": 100}), Scheduled({"a": 100})
    timer.scheduled(lost, {"a": Computing(100)}, 1.0)
    timer.scheduled(step, {"a": Computing(200)}, 1.0)
    assert timer.finished(step, 2.0) is not None


def test_with_a_log_every_step_becomes_a_line(tmp_path: Path) -> None:
    log = tmp_path / "steps.jsonl"
    timer = StepTimer(StepLog(str(log)))
    for tokens in (100, 1):
        step = Scheduled({"a": tokens})
        timer.scheduled(step, {"a": Computing(500)}, 1.0)
        timer.finished(step, 2.0)
    timer.close()
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(line["tokens"], line["prefill_tokens"]) for line in lines] == [(100, 100), (1, 0)]

"""Which waiting turn runs next on the real queue."""

from collections.abc import Callable

from support.engine_core import SchedulerHarness, prompt

Build = Callable[..., SchedulerHarness]
#: One turn at a time, so that the order of scheduling is the order of the queue.
ONE_AT_A_TIME = {"blocks": 200, "max_num_seqs": 1}


def busy(engine: SchedulerHarness) -> None:
    """Something runs, so that what is submitted next has to queue."""
    engine.submit("busy", prompt(99, 20), output_tokens=10)
    engine.step()


def test_an_earlier_programs_later_turn_runs_before_a_later_programs_first(engine: Build) -> None:
    ordered = engine(preset="continuum", pool=ONE_AT_A_TIME)
    context = ordered.run_turn("a1", prompt(1, 40), program="a")
    ordered.stats()
    ordered.clock.advance(60)
    busy(ordered)
    ordered.submit("b1", prompt(2, 40), program="b")
    ordered.submit("a2", context + prompt(3, 20), program="a")
    ordered.run()
    assert ordered.first_scheduled == ["a1", "busy", "a2", "b1"]


def test_stock_order_is_by_turn(engine: Build) -> None:
    ordered = engine(preset="vllm", pool=ONE_AT_A_TIME)
    context = ordered.run_turn("a1", prompt(1, 40), program="a")
    busy(ordered)
    ordered.submit("b1", prompt(2, 40), program="b")
    ordered.submit("a2", context + prompt(3, 20), program="a")
    ordered.run()
    assert ordered.first_scheduled == ["a1", "busy", "b1", "a2"]


def test_a_turn_whose_kv_is_retained_runs_before_one_of_an_earlier_program_whose_is_not(engine: Build) -> None:
    ordered = engine(retention="static_ttl", ttl_s=30, pool=ONE_AT_A_TIME)
    early = ordered.run_turn("early1", prompt(1, 40), program="early")
    ordered.clock.advance(31)
    late = ordered.run_turn("late1", prompt(2, 40), program="late")
    busy(ordered)
    ordered.submit("early2", early + prompt(3, 20), program="early")
    ordered.submit("late2", late + prompt(4, 20), program="late")
    ordered.run()
    assert ordered.first_scheduled[-2:] == ["late2", "early2"]


def test_turns_without_a_program_are_programs_of_their_own(engine: Build) -> None:
    ordered = engine(preset="continuum", pool=ONE_AT_A_TIME)
    context = ordered.run_turn("a1", prompt(1, 40), program="a")
    ordered.clock.advance(60)
    busy(ordered)
    ordered.submit("plain1", prompt(5, 40))
    ordered.clock.advance(1)
    ordered.submit("plain2", prompt(6, 40))
    ordered.submit("a2", context + prompt(3, 20), program="a")
    ordered.run()
    assert ordered.first_scheduled[-3:] == ["a2", "plain1", "plain2"]


def test_where_the_operator_chose_vllms_priorities_those_decide(engine: Build) -> None:
    ordered = engine(preset="continuum", pool={**ONE_AT_A_TIME, "policy": "priority"})
    context = ordered.run_turn("a1", prompt(1, 40), program="a")
    busy(ordered)
    ordered.submit("a2", context + prompt(3, 20), program="a", priority=5)
    ordered.submit("urgent", prompt(2, 40), program="b", priority=1)
    ordered.run()
    assert ordered.first_scheduled[-2:] == ["urgent", "a2"]


def test_every_program_gets_its_turn_while_others_keep_coming_back(engine: Build) -> None:
    ordered = engine(preset="continuum", retention="static_ttl", ttl_s=100, turn_wait_max_s=2.0, pool=ONE_AT_A_TIME)
    contexts = {name: prompt(index, 32) for index, name in enumerate("ab")}
    turns = dict.fromkeys("ab", 0)

    def keep_both_busy() -> None:
        for name in "ab":
            turn_id = f"{name}-{turns[name]}"
            if turn_id not in ordered.scheduler.requests:
                turns[name] += 1
                ordered.submit(f"{name}-{turns[name]}", contexts[name], program=name, output_tokens=5)

    keep_both_busy()
    ordered.step()
    ordered.submit("newcomer", prompt(9, 32), program="new", output_tokens=5)
    arrived_s = ordered.clock.now_s()
    while "newcomer" not in ordered.first_scheduled:
        keep_both_busy()
        ordered.step()
        assert ordered.clock.now_s() - arrived_s < 3.0
    # The two that came earlier did keep it out until then.
    assert ordered.clock.now_s() - arrived_s > 1.9

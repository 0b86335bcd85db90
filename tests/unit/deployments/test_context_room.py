"""Tool outputs are cut to what the model's context has room for."""

import pytest

from deployments.context_room import fitted, room_bytes
from deployments.memory_clients import ScriptedEngine, ScriptedTools, answer, tool_calls
from support.programs import Bench, limits, spec


def test_the_room_is_what_the_context_has_left_less_what_the_next_turn_may_generate() -> None:
    room = room_bytes(context_tokens=1000, context_tokens_max=4096, turn_tokens_max=128, calls=1)
    assert room == 4096 - 1000 - 128 - 96


def test_parallel_calls_share_it() -> None:
    one = room_bytes(context_tokens=1000, context_tokens_max=4096, turn_tokens_max=128, calls=1)
    two = room_bytes(context_tokens=1000, context_tokens_max=4096, turn_tokens_max=128, calls=2)
    assert one is not None
    assert two is not None
    assert 2 * two <= one


def test_there_is_never_less_than_none() -> None:
    assert room_bytes(context_tokens=5000, context_tokens_max=4096, turn_tokens_max=None, calls=3) == 0


def test_where_the_limit_is_not_known_nothing_is_cut() -> None:
    assert room_bytes(context_tokens=1000, context_tokens_max=None, turn_tokens_max=128, calls=1) is None
    assert fitted("x" * 100_000, None) == "x" * 100_000


def test_what_fits_stays_as_it_is() -> None:
    assert fitted("hello", 5) == "hello"


def test_a_cut_output_keeps_its_start_and_its_end_and_says_how_much_is_missing() -> None:
    cut = fitted("start " + "x" * 10_000 + " end", 100)
    assert cut.startswith("start ")
    assert cut.endswith(" end")
    assert "bytes left out: the context has no room for them" in cut


@pytest.mark.parametrize("bytes_max", [0, 1, 7, 50])
def test_no_character_is_cut_in_two(bytes_max: int) -> None:
    fitted("\u00e4\U0001f600" * 1000, bytes_max).encode()


async def test_a_tool_that_says_more_than_the_context_holds_does_not_end_its_program() -> None:
    calls = tool_calls(("call_1", "shell", {"command": "yes"}), prompt_tokens=500, context_tokens_max=2048)
    bench = Bench(
        spec(limits=limits(max_tokens_per_turn=128)),
        engine=ScriptedEngine([calls, answer("Done.")]),
        tools=ScriptedTools({"shell": ["y\n" * 30_000]}),
    )
    await bench.run()
    (result,) = [message for message in bench.engine.bodies[-1]["messages"] if message["role"] == "tool"]
    assert len(result["content"].encode()) < 2048 - 500 - 128
    assert "bytes left out" in result["content"]

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_program.ids import DEFAULT_TENANT, ProgramId, TenantId, ToolKey
from agent_program.turn import TurnHints

names = st.text(alphabet="abcxyz019_-.", min_size=1, max_size=12)
hints = st.builds(
    TurnHints,
    program_id=names.map(ProgramId),
    tenant_id=names.map(TenantId),
    branch=names,
    is_last_turn=st.booleans(),
    next_tool=st.none() | names.map(ToolKey),
    remaining_turns=st.none() | st.integers(0, 10_000),
    last_tool=st.none() | names.map(ToolKey),
    last_tool_s=st.none() | st.floats(0, 1e6),
)


@given(hints)
def test_hints_survive_the_trip_through_vllm_xargs(one: TurnHints) -> None:
    assert TurnHints.from_xargs(one.program_id, one.to_xargs()) == one


@given(hints)
def test_the_flat_form_holds_only_what_vllm_xargs_may_hold(one: TurnHints) -> None:
    assert all(type(value) in (str, int, float) for value in one.to_xargs().values())


@given(
    st.dictionaries(names.map(lambda name: "continuum_" + name), st.none() | st.integers() | names | st.lists(names))
)
def test_no_hint_whatever_it_holds_is_an_error(flat: dict[str, object]) -> None:
    assert TurnHints.from_xargs("p", flat).program_id == "p"


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), "3", True, None, [3]])
def test_a_malformed_number_is_dropped(value: object) -> None:
    assert TurnHints.from_xargs("p", {"continuum_last_tool_s": value}).last_tool_s is None


def test_absent_hints_take_their_defaults() -> None:
    one = TurnHints.from_xargs("p", None)
    assert (one.tenant_id, one.branch, one.is_last_turn, one.next_tool) == (DEFAULT_TENANT, "0", False, None)

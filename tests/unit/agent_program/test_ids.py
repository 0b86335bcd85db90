import pytest

from agent_program.errors import InvalidRequest
from agent_program.ids import ID_BYTES_MAX, new_program_id, parse_id, parse_program_id


@pytest.mark.parametrize("text", ["a", "prog_1", "A-b.c:d@e+f=g", "7" * ID_BYTES_MAX])
def test_a_safe_id_comes_back_unchanged(text: str) -> None:
    assert parse_program_id(text) == text


@pytest.mark.parametrize(
    "text", ["", "x" * (ID_BYTES_MAX + 1), "a b", "../x", "-a", ".a", "a/b", "a\n", "ü", "a\x00", None, 7, ["a"]]
)
def test_an_unsafe_id_is_refused_and_the_error_names_the_field(text: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_id(text, what="tenant")
    assert caught.value.param == "tenant"
    assert caught.value.status == 400


def test_length_is_counted_in_bytes_not_characters() -> None:
    with pytest.raises(InvalidRequest, match="bytes"):
        parse_id("é" * (ID_BYTES_MAX // 2 + 1), what="id")


def test_fresh_ids_differ_and_are_themselves_valid() -> None:
    ids = {new_program_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(parse_program_id(one) == one for one in ids)

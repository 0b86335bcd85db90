"""Block names without tokens: equal prefixes share names, different ones never do."""

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.replay.lineage import ContextLineage

BLOCK = 16


def test_a_context_that_grows_keeps_the_names_of_what_it_had():
    lineage = ContextLineage("a", BLOCK)
    lineage.start_turn(0, 0)
    first = lineage.hashes(100)
    lineage.start_turn(1, 100)
    assert lineage.hashes(200)[: len(first)] == first


def test_an_edited_context_changes_from_the_first_edited_block_on():
    lineage = ContextLineage("a", BLOCK)
    lineage.start_turn(0, 0)
    before = lineage.hashes(160)
    lineage.start_turn(1, 70)
    after = lineage.hashes(160)
    # 70 tokens are 4 whole blocks; the fifth holds an edited token.
    assert after[:4] == before[:4]
    assert not set(after[4:]) & set(before[4:])


def test_programs_share_the_names_of_a_common_prefix_and_no_others():
    one, two = (ContextLineage(name, BLOCK, shared="system", shared_tokens=64) for name in ("a", "b"))
    assert one.hashes(160)[:4] == two.hashes(160)[:4]
    assert not set(one.hashes(160)[4:]) & set(two.hashes(160)[4:])


def test_an_edit_never_touches_the_shared_prefix():
    lineage = ContextLineage("a", BLOCK, shared="system", shared_tokens=64)
    before = lineage.hashes(160)
    lineage.start_turn(1, 10)
    assert lineage.hashes(160)[:4] == before[:4]


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(1, 200)), min_size=1, max_size=8))
def test_names_agree_exactly_where_the_content_does(turns):
    """Against the real thing: token lists, edited and extended as the lineage is told."""
    lineage = ContextLineage("a", BLOCK)
    tokens: list[tuple[int, int]] = []
    names: dict[tuple[tuple[int, int], ...], bytes] = {}
    for turn, (kept, new) in enumerate(turns):
        prefix = min(kept, len(tokens)) if turn else 0
        tokens = tokens[:prefix] + [(turn, place) for place in range(new)]
        lineage.start_turn(turn, prefix)
        for index, name in enumerate(lineage.hashes(len(tokens))):
            content = tuple(tokens[: (index + 1) * BLOCK])
            assert names.setdefault(content, name) == name
    assert len(set(names.values())) == len(names)

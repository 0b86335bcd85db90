"""A program's next prompt repeats the tokens of its last turn, or is left alone."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_replicas.token_continuity import Continuity, TokenMemory

END = "<|end|>"
#: A tokenizer in miniature: the longest piece first, and never across the special token, as real ones do.
PIECES = [END, '{"', "ab", *'abcd{"} ']
CANONICAL = re.compile("|".join(re.escape(piece) for piece in PIECES))


def encode(text: str) -> list[int]:
    return [PIECES.index(piece) for piece in CANONICAL.findall(text)]


def decode(tokens: list[int]) -> str:
    return "".join(PIECES[token] for token in tokens)


def one_by_one(text: str) -> list[int]:
    """Another spelling of the same text: what a model may write under a grammar."""
    return [PIECES.index(character) for character in text]


def test_a_first_turn_keeps_its_own_tokens() -> None:
    memory = TokenMemory()
    assert memory.continue_prompt("p", "0", "ab", encode("ab"), encode) == (encode("ab"), Continuity.UNKNOWN)


def test_what_the_model_wrote_is_repeated_token_by_token() -> None:
    memory = TokenMemory()
    prompt, output = f"ab{END}", '{"ab"}'
    written = encode(prompt) + one_by_one(output)
    memory.remember("p", "0", prompt + output, written)
    text = f"{prompt}{output}{END}cd{END}"
    tokens, continuity = memory.continue_prompt("p", "0", text, encode(text), encode)
    assert continuity is Continuity.CONTINUED
    assert tokens == [*written, *encode(f"{END}cd{END}")]
    assert tokens != encode(text)
    assert decode(tokens) == text


def test_an_output_that_the_tokenizer_spells_alike_needs_nothing() -> None:
    memory = TokenMemory()
    memory.remember("p", "0", f"ab{END}cd{END}", encode(f"ab{END}cd{END}"))
    text = f"ab{END}cd{END}ab"
    assert memory.continue_prompt("p", "0", text, encode(text), encode) == (encode(text), Continuity.SAME)


def test_a_client_that_rewrites_history_gets_its_own_tokens() -> None:
    memory = TokenMemory()
    memory.remember("p", "0", f"ab{END}cd{END}", one_by_one("ab") + encode(f"{END}cd{END}"))
    text = f"ab{END}c{END}"
    assert memory.continue_prompt("p", "0", text, encode(text), encode) == (encode(text), Continuity.REWRITTEN)


def test_a_new_part_that_merges_with_the_old_one_is_left_alone() -> None:
    memory = TokenMemory()
    memory.remember("p", "0", "cda", one_by_one("cda"))
    text = "cdab"  # the tokenizer joins the old `a` and the new `b`
    assert memory.continue_prompt("p", "0", text, encode(text), encode) == (encode(text), Continuity.NO_SEAM)


def test_branches_remember_apart_and_a_program_is_forgotten_whole() -> None:
    memory = TokenMemory()
    for branch in "01":
        memory.remember("p", branch, f"a{END}", one_by_one("a") + encode(END))
    memory.remember("q", "0", "a", one_by_one("a"))
    memory.forget("p")
    assert memory.tokens == 1
    assert memory.continue_prompt("p", "1", "a", encode("a"), encode)[1] is Continuity.UNKNOWN


def test_memory_is_bounded_in_tokens_and_the_oldest_go() -> None:
    memory = TokenMemory(tokens_max=10)
    for number in range(50):
        memory.remember(f"p{number}", "0", "abcd", one_by_one("abcd"))
        assert memory.tokens <= 10
    assert memory.continue_prompt("p49", "0", "abcd" + END, encode("abcd" + END), encode)[1] is Continuity.CONTINUED
    assert memory.continue_prompt("p40", "0", "abcd" + END, encode("abcd" + END), encode)[1] is Continuity.UNKNOWN


def test_a_turn_larger_than_the_memory_is_not_kept() -> None:
    memory = TokenMemory(tokens_max=3)
    memory.remember("p", "0", "abcd", one_by_one("abcd"))
    assert memory.tokens == 0


words = st.text(alphabet='abcd{"} ', max_size=12)


@given(prompt=words, output=words, new=words, data=st.data())
def test_text_is_never_changed_and_known_tokens_are_always_repeated(prompt: str, output: str, new: str, data) -> None:
    # Any spelling of the output: each place is either merged as the tokenizer would, or left apart.
    spelling = data.draw(st.sampled_from([encode, one_by_one]))
    memory = TokenMemory()
    before = encode(prompt + END) + spelling(output)
    memory.remember("p", "0", prompt + END + output, before)
    text = prompt + END + output + END + new
    tokens, continuity = memory.continue_prompt("p", "0", text, encode(text), encode)
    assert decode(tokens) == text
    assert tokens[: len(before)] == before
    assert continuity in (Continuity.SAME, Continuity.CONTINUED)


@pytest.mark.parametrize("text", ["", END])
def test_an_unchanged_prompt_is_no_continuation(text: str) -> None:
    memory = TokenMemory()
    memory.remember("p", "0", "ab" + text, one_by_one("ab") + encode(text))
    tokens, continuity = memory.continue_prompt("p", "0", "ab" + text, encode("ab" + text), encode)
    assert tokens == encode("ab" + text)
    assert continuity is Continuity.NO_SEAM

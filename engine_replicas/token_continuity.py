"""Keeps a program's tokens the same from turn to turn, so that its KV is found again.

A prompt is text before it is tokens, and one text has many tokenisations. What a model generates is often not the
tokenisation that its tokenizer would choose, above all under a grammar: it writes `{` and `"` where the tokenizer has `{"`.
The next turn's prompt repeats the text, is tokenised anew, and from the first differing token on no KV block matches.

So the tokens of a turn (prompt and output) are remembered with their text. When the next prompt's text starts with that
text, its tokens are the remembered ones followed by those of the new part:

    previous prompt + output        new part
    remembered tokens               tail of the prompt's own tokenisation

Text is never changed, only which tokens spell the part that the engine has seen already; those are the tokens that the
model itself wrote. The new part must begin where tokenisation begins anew (at `<|im_end|>` and its like): that is so where
its tokens are exactly the tail of the whole prompt's tokens, which is checked. Where anything does not match, the prompt's
own tokenisation stands. Pure.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Continuity(StrEnum):
    """How a prompt's tokens relate to those of the turn before."""

    #: Nothing is remembered: a first turn, or one that came after its memory had to go.
    UNKNOWN = "unknown"
    #: The prompt's own tokenisation repeats the remembered tokens already.
    SAME = "same"
    #: The remembered tokens replaced another spelling of the same text.
    CONTINUED = "continued"
    #: The prompt does not repeat the text: the client, or the chat template, changed what was said.
    REWRITTEN = "rewritten"
    #: The text is repeated, but the new part does not begin where tokenisation begins anew.
    NO_SEAM = "no_seam"


@dataclass(frozen=True, slots=True)
class _Remembered:
    text: str
    token_ids: array[int]


class TokenMemory:
    """The last turn's text and tokens of each branch of each program; the least recently used go first."""

    def __init__(self, *, tokens_max: int = 4_000_000):
        self._tokens_max = tokens_max
        self._turns: OrderedDict[tuple[str, str], _Remembered] = OrderedDict()
        #: Tokens remembered now.
        self.tokens = 0
        #: Prompts seen, by what became of them.
        self.counts: Counter[Continuity] = Counter()

    def remember(self, program_id: str, branch: str, text: str, token_ids: Sequence[int]) -> None:
        """Keep a finished turn in place of the branch's previous one."""
        self._drop((program_id, branch))
        self._turns[program_id, branch] = _Remembered(text, array("I", token_ids))
        self.tokens += len(token_ids)
        while self.tokens > self._tokens_max:
            self._drop(next(iter(self._turns)))

    def forget(self, program_id: str) -> None:
        """The program is over."""
        for key in [key for key in self._turns if key[0] == program_id]:
            self._drop(key)

    def continue_prompt(
        self, program_id: str, branch: str, text: str, token_ids: list[int], encode: Callable[[str], list[int]]
    ) -> tuple[list[int], Continuity]:
        """The tokens to give the engine for a prompt, and how they relate to the previous turn.

        Args:
            program_id: whose turn it is.
            branch: which of the program's branches.
            text: the whole prompt.
            token_ids: its own tokenisation.
            encode: tokenises the new part, without special tokens added.
        """
        tokens, continuity = self._continued((program_id, branch), text, token_ids, encode)
        self.counts[continuity] += 1
        return tokens, continuity

    def _continued(
        self, key: tuple[str, str], text: str, token_ids: list[int], encode: Callable[[str], list[int]]
    ) -> tuple[list[int], Continuity]:
        known = self._turns.get(key)
        if known is None:
            return token_ids, Continuity.UNKNOWN
        if not text.startswith(known.text):
            return token_ids, Continuity.REWRITTEN
        before = known.token_ids.tolist()
        if token_ids[: len(before)] == before:
            return token_ids, Continuity.SAME
        tail = encode(text[len(known.text) :])
        if not tail or token_ids[-len(tail) :] != tail:
            return token_ids, Continuity.NO_SEAM
        return before + tail, Continuity.CONTINUED

    def _drop(self, key: tuple[str, str]) -> None:
        dropped = self._turns.pop(key, None)
        if dropped is not None:
            self.tokens -= len(dropped.token_ids)

"""Bash text cut into its simple commands, well enough to see what runs. No expansion is done, and nothing is refused.

Quotes, escapes, comments, here-documents (bodies dropped), redirections (dropped), `;` `&` `&&` `||` `|` newlines and
parentheses are understood; `$(…)`, `${…}` and backticks are kept inside their word. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(kw_only=True, slots=True)
class Command:
    """One simple command."""

    #: Its words with quotes removed.
    words: list[str] = field(default_factory=list)
    #: It stands behind a `|`.
    reads_pipe: bool = False


def split_commands(text: str) -> list[Command]:
    """The simple commands of `text`, in the order in which they stand."""
    return _Scanner(text).run()


class _Scanner:
    """One pass over the text, in time linear in its length."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._commands: list[Command] = []
        self._current = Command()
        self._word: list[str] | None = None
        self._heredocs: list[tuple[str, bool]] = []
        self._parentheses = 0

    def run(self) -> list[Command]:
        while self._at < len(self._text):
            self._step()
        self._end_command(pipes=False)
        return self._commands

    def _step(self) -> None:
        text, at = self._text, self._at
        char = text[at]
        if char == "\\":
            if text[at + 1 : at + 2] != "\n":
                self._add(text[at + 1 : at + 2])
            self._at += 2
        elif char == "'":
            self._at = self._quoted_until(at + 1, "'")
        elif char == '"':
            self._double_quoted()
        elif char == "`":
            self._verbatim(self._closing(at + 1, "`"))
        elif char == "$" and text[at + 1 : at + 2] in ("(", "{"):
            self._verbatim(self._balanced(at + 1))
        elif char == "$" and text[at + 1 : at + 2] == "'":
            self._at = self._quoted_until(at + 2, "'")
        elif char == "#" and self._word is None:
            end = text.find("\n", at)
            self._at = len(text) if end < 0 else end
        elif char in "<>":
            self._redirection()
        elif char == "&" and text[at + 1 : at + 2] == ">":
            self._at += 1  # `&>file`
        elif char in ";&|\n()":
            self._separator(char)
        elif char in " \t\r":
            self._end_word()
            self._at += 1
        else:
            self._add(char)
            self._at += 1

    def _separator(self, char: str) -> None:
        if char == "(":
            self._parentheses += 1
        elif char == ")" and self._parentheses:
            self._parentheses -= 1
        elif char == ")":  # the end of a pattern of `case`, which is no command, nor are its alternatives
            while self._current.reads_pipe and self._commands:
                self._current = self._commands.pop()
            self._word, self._current = None, Command()
        doubled = self._text[self._at + 1 : self._at + 2] == char and char in "&|;"
        is_pipe = char == "|" and not doubled
        self._end_command(pipes=is_pipe)
        self._at += 2 if doubled or (is_pipe and self._text[self._at + 1 : self._at + 2] == "&") else 1
        if char == "\n":
            self._skip_heredocs()

    def _redirection(self) -> None:
        """Drop `2>&1`, `>file`, `<<EOF` and the rest, with a number that stands directly before."""
        text = self._text
        if self._word is not None and "".join(self._word).isdigit():
            self._word = None
        self._end_word()
        if text.startswith("<<", self._at) and not text.startswith("<<<", self._at):
            self._heredoc()
            return
        if text[self._at + 1 : self._at + 2] == "(":  # process substitution is a word
            self._verbatim(self._balanced(self._at + 1))
            return
        while self._at < len(text) and text[self._at] in "<>&|":
            self._at += 1
        while self._at < len(text) and text[self._at] in " \t":
            self._at += 1
        self._skip_word()

    def _heredoc(self) -> None:
        self._at += 2
        strips_tabs = self._text.startswith("-", self._at)
        self._at += strips_tabs
        while self._at < len(self._text) and self._text[self._at] in " \t":
            self._at += 1
        delimiter = self._skip_word()
        if delimiter:
            self._heredocs.append((delimiter, strips_tabs))

    def _skip_heredocs(self) -> None:
        for delimiter, strips_tabs in self._heredocs:
            while self._at < len(self._text):
                end = self._text.find("\n", self._at)
                line = self._text[self._at : len(self._text) if end < 0 else end]
                self._at = len(self._text) if end < 0 else end + 1
                if (line.lstrip("\t") if strips_tabs else line) == delimiter:
                    break
        self._heredocs.clear()

    def _skip_word(self) -> str:
        """Read one word at the current place without making it part of the command."""
        saved, self._word = self._word, None
        while self._at < len(self._text) and self._text[self._at] not in " \t\r\n;&|()<>":
            self._step()
        skipped, self._word = "".join(self._word or ()), saved
        return skipped

    def _double_quoted(self) -> None:
        self._add("")
        self._at += 1
        while self._at < len(self._text):
            char = self._text[self._at]
            if char == '"':
                self._at += 1
                return
            if char == "\\":
                following = self._text[self._at + 1 : self._at + 2]
                self._add(following if following in '"\\$`' else "\\" + following)
                self._at += 2
            elif char == "$" and self._text[self._at + 1 : self._at + 2] in ("(", "{"):
                self._verbatim(self._balanced(self._at + 1))
            else:
                self._add(char)
                self._at += 1

    def _quoted_until(self, start: int, quote: str) -> int:
        end = self._closing(start, quote)
        self._add(self._text[start : end - 1] if self._text[end - 1 : end] == quote else self._text[start:end])
        return end

    def _closing(self, start: int, quote: str) -> int:
        """The place behind the next `quote`, or the end of the text."""
        end = self._text.find(quote, start)
        return len(self._text) if end < 0 else end + 1

    def _balanced(self, start: int) -> int:
        """The place behind the bracket that closes the one at `start`, or the end of the text."""
        opening = self._text[start]
        closing = {"(": ")", "{": "}"}[opening]
        depth, at = 0, start
        while at < len(self._text):
            char = self._text[at]
            if char == "\\":
                at += 2
                continue
            if char == "'":
                at = self._closing(at + 1, "'")
                continue
            depth += (char == opening) - (char == closing)
            at += 1
            if depth == 0:
                return at
        return len(self._text)

    def _verbatim(self, end: int) -> None:
        self._add(self._text[self._at : end])
        self._at = end

    def _add(self, text: str) -> None:
        if self._word is None:
            self._word = []
        self._word.append(text)

    def _end_word(self) -> None:
        if self._word is not None:
            self._current.words.append("".join(self._word))
            self._word = None

    def _end_command(self, *, pipes: bool) -> None:
        self._end_word()
        if self._current.words:
            self._commands.append(self._current)
            self._current = Command(reads_pipe=pipes)
        elif not pipes:
            self._current = Command()

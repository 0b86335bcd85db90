"""What is kept of a stream: its head and its tail, because errors stand at the end and what was asked for at the start.

Both are bounded in bytes and in lines. The middle is counted and dropped as it comes, so memory is bounded whatever a program
prints. Where the cut goes through a character, the rest of the character goes too. What is no text is not shown. Pure.
"""

from __future__ import annotations

import re

from tool_runtime.config import OutputLimits
from tool_runtime.sandbox import BoundedText

#: Escape sequences of terminals (ECMA-48 CSI and OSC, and two-character ones).
_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
#: Output of at least so many bytes, of which more than this share is no text, is told of and not shown.
_BINARY_BYTES_MIN, _BINARY_SHARE = 256, 0.2


class HeadTail:
    """A bounded view of a stream of bytes."""

    def __init__(self, head_bytes: int, tail_bytes: int, head_lines: int = 1000, tail_lines: int = 1000) -> None:
        self._head_room = head_bytes
        self._head_lines_left = head_lines
        self._tail_bytes = tail_bytes
        self._tail_lines = tail_lines
        self._head = bytearray()
        self._tail = bytearray()
        self.total_bytes = 0
        self._newlines = 0

    def feed(self, data: bytes) -> None:
        """Take what was printed next."""
        self.total_bytes += len(data)
        self._newlines += data.count(b"\n")
        taken = self._take_head(data)
        self._tail += data[taken:] if taken < len(data) else b""
        # Trimmed now and then, so that many small pieces cost no more than few large ones.
        if len(self._tail) > 2 * self._tail_bytes:
            del self._tail[: -self._tail_bytes]

    def _take_head(self, data: bytes) -> int:
        """How many bytes of `data` went to the head."""
        if not self._head_room:
            return 0
        piece = data[: self._head_room]
        at = -1
        for _ in range(min(self._head_lines_left, piece.count(b"\n"))):
            at = piece.index(b"\n", at + 1)
            self._head_lines_left -= 1
        if not self._head_lines_left:
            piece = piece[: at + 1]
        self._head += piece
        self._head_room = self._head_room - len(piece) if self._head_lines_left else 0
        return len(piece)

    def result(self) -> BoundedText:
        """What was kept, as text that a model can read, with a mark where the middle is missing."""
        tail = _last_lines(bytes(self._tail[-self._tail_bytes :]) if self._tail else b"", self._tail_lines)
        head = bytes(self._head)
        if len(head) + len(tail) < self.total_bytes:
            head, tail = _without_partial_end(head), _without_partial_start(tail)
        dropped = self.total_bytes - len(head) - len(tail)
        if self.total_bytes >= _BINARY_BYTES_MIN and _share_of_no_text(head + tail) > _BINARY_SHARE:
            return BoundedText(
                text=f"[{self.total_bytes} bytes that are not text]",
                truncated_bytes=self.total_bytes,
                truncated_lines=self._newlines,
            )
        if not dropped:
            return BoundedText(text=readable(head + tail))
        lines = self._newlines - head.count(b"\n") - tail.count(b"\n")
        mark = f"[… {dropped} bytes{f' and {lines} lines' if lines else ''} left out …]"
        return BoundedText(
            text=f"{readable(head)}\n{mark}\n{readable(tail)}", truncated_bytes=dropped, truncated_lines=lines
        )


def bounded(limits: OutputLimits) -> HeadTail:
    """A stream within the settings' limits."""
    return HeadTail(limits.head_bytes, limits.tail_bytes, limits.head_lines, limits.tail_lines)


def _last_lines(data: bytes, lines: int) -> bytes:
    at = len(data) - data.endswith(b"\n")
    for _ in range(lines):
        at = data.rfind(b"\n", 0, at)
        if at < 0:
            return data
    return data[at + 1 :]


def _without_partial_end(data: bytes) -> bytes:
    """Without the beginning of a UTF-8 character at the end."""
    for back in range(1, min(3, len(data)) + 1):
        lead = data[-back]
        if lead >= 0xC0:
            wanted = 4 if lead >= 0xF0 else 3 if lead >= 0xE0 else 2
            return data[:-back] if back < wanted else data
        if lead < 0x80:
            break
    return data


def _without_partial_start(data: bytes) -> bytes:
    """Without the end of a UTF-8 character at the start."""
    skipped = 0
    while skipped < min(3, len(data)) and 0x80 <= data[skipped] < 0xC0:
        skipped += 1
    return data[skipped:]


def _share_of_no_text(raw: bytes) -> float:
    """The share of characters that are invalid, or control characters which no terminal program prints."""
    text = _ANSI.sub("", raw.decode("utf-8", "replace")).replace("\r", "")
    return (text.count(_REPLACEMENT) + len(_CONTROL.findall(text))) / len(text) if text else 0.0


def readable(raw: bytes) -> str:
    """Bytes as text: invalid UTF-8 replaced, colours and cursor movements removed, other control characters replaced.

    Of a line that was overwritten with carriage returns, as progress bars do, the last version stays.
    """
    text = _ANSI.sub("", raw.decode("utf-8", "replace")).replace("\r\n", "\n")
    if "\r" in text:
        text = "\n".join(line.rstrip("\r").rsplit("\r", 1)[-1] for line in text.split("\n"))
    return _CONTROL.sub(_REPLACEMENT, text)

"""What is kept of a stream: its head and its tail, because errors stand at the end and what was asked for at the start.

The middle is counted and dropped as it comes, so memory is bounded whatever a program prints. Pure.
"""

from __future__ import annotations

import re

from tool_runtime.sandbox import BoundedText

#: Escape sequences of terminals (ECMA-48 CSI and OSC, and two-character ones).
_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


class HeadTail:
    """A bounded view of a stream of bytes."""

    def __init__(self, head_bytes: int, tail_bytes: int) -> None:
        self._head_bytes = head_bytes
        self._tail_bytes = tail_bytes
        self._head = bytearray()
        self._tail = bytearray()
        self.total_bytes = 0

    def feed(self, data: bytes) -> None:
        """Take what was printed next."""
        self.total_bytes += len(data)
        room = self._head_bytes - len(self._head)
        self._head += data[:room]
        self._tail += data[room:] if room < len(data) else b""
        # Trimmed now and then, so that many small pieces cost no more than few large ones.
        if len(self._tail) > 2 * self._tail_bytes:
            del self._tail[: -self._tail_bytes]

    def result(self) -> BoundedText:
        """What was kept, as text that a model can read, with a mark where the middle is missing."""
        tail = bytes(self._tail[-self._tail_bytes :]) if self._tail else b""
        dropped = self.total_bytes - len(self._head) - len(tail)
        if not dropped:
            return BoundedText(text=readable(bytes(self._head) + tail))
        mark = f"\n[… {dropped} bytes left out …]\n"
        return BoundedText(text=readable(bytes(self._head)) + mark + readable(tail), truncated_bytes=dropped)


def readable(raw: bytes) -> str:
    """Bytes as text: invalid UTF-8 replaced, colours and cursor movements removed, other control characters replaced.

    Of a line that was overwritten with carriage returns, as progress bars do, the last version stays.
    """
    text = _ANSI.sub("", raw.decode("utf-8", "replace")).replace("\r\n", "\n")
    if "\r" in text:
        text = "\n".join(line.rstrip("\r").rsplit("\r", 1)[-1] for line in text.split("\n"))
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)

"""What is kept of a tool's output, and how it reads."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tool_runtime.output import HeadTail, readable


def kept(pieces: list[bytes], head: int = 4, tail: int = 6) -> HeadTail:
    stream = HeadTail(head, tail)
    for piece in pieces:
        stream.feed(piece)
    return stream


def test_what_fits_is_kept_whole() -> None:
    result = kept([b"0123", b"456789"]).result()
    assert (result.text, result.truncated_bytes) == ("0123456789", 0)


def test_of_more_the_head_and_the_tail_are_kept_and_the_middle_counted() -> None:
    result = kept([b"0123456789abcdef"]).result()
    assert result.text == "0123\n[… 6 bytes left out …]\nabcdef"
    assert result.truncated_bytes == 6


@given(st.lists(st.binary(max_size=40), max_size=30))
def test_pieces_make_no_difference_and_nothing_is_lost_uncounted(pieces: list[bytes]) -> None:
    whole = b"".join(pieces)
    assert kept(pieces).result() == kept([whole]).result()
    assert kept(pieces).result().truncated_bytes == max(0, len(whole) - 10)


def test_memory_is_bounded_whatever_comes() -> None:
    stream = HeadTail(100, 100)
    for _ in range(1000):
        stream.feed(b"x" * 10_000)
    assert stream.total_bytes == 10_000_000
    assert len(stream._tail) <= 10_200


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        ("grün ✓".encode(), "grün ✓"),
        (b"\xff\xfe", "��"),
        (b"a\x00b\x07", "a�b�"),
        (b"\x1b[31mred\x1b[0m \x1b[2K\x1b]0;title\x07x", "red x"),
        (b"10%\r50%\r100%\nok\r\n", "100%\nok\n"),
        (b"done\r", "done"),
        (b"tab\tkept\n", "tab\tkept\n"),
    ],
)
def test_output_reads_as_text(raw: bytes, text: str) -> None:
    assert readable(raw) == text

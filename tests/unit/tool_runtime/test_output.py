"""What is kept of a tool's output, and how it reads."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tool_runtime.output import HeadTail, readable


def kept(pieces: list[bytes], head: int = 4, tail: int = 6, **lines: int) -> HeadTail:
    stream = HeadTail(head, tail, **lines)
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


@given(st.lists(st.binary(max_size=40), max_size=5))
def test_pieces_make_no_difference_and_nothing_is_lost_uncounted(pieces: list[bytes]) -> None:
    whole = b"".join(pieces)
    assert kept(pieces).result() == kept([whole]).result()
    # A character that the cut goes through is dropped, three bytes of it on either side at most.
    least = max(0, len(whole) - 10)
    assert least <= kept(pieces).result().truncated_bytes <= (least and least + 6)


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


def numbered(count: int) -> bytes:
    return b"".join(b"%d\n" % number for number in range(count))


def test_lines_are_limited_as_bytes_are_and_those_left_out_counted() -> None:
    result = kept([numbered(10)], head=100, tail=100, head_lines=2, tail_lines=3).result()
    assert result.text == "0\n1\n\n[… 10 bytes and 5 lines left out …]\n7\n8\n9\n"
    assert (result.truncated_bytes, result.truncated_lines) == (10, 5)


@given(st.lists(st.sampled_from([b"a", b"\n", b"bc\nd", b"\n\n"]), max_size=40), st.integers(0, 40))
def test_pieces_make_no_difference_to_the_lines_either(pieces: list[bytes], cut: int) -> None:
    whole = b"".join(pieces)
    limits = {"head": 20, "tail": 20, "head_lines": 3, "tail_lines": 2}
    result = kept(pieces, **limits).result()
    assert result == kept([whole[:cut], whole[cut:]], **limits).result()
    assert result.text.count("\n") <= 3 + 2 + 2


def test_a_cut_through_a_character_drops_the_whole_character() -> None:
    # 4 bytes of head end in the middle of the second ü, 6 bytes of tail begin in the middle of a ✓.
    result = kept(["aüü0123456✓✓".encode()], head=4, tail=5).result()
    assert "\N{REPLACEMENT CHARACTER}" not in result.text
    assert result.text.startswith("aü\n")
    assert result.text.endswith("\n✓")


def test_binary_output_is_told_of_and_not_shown() -> None:
    result = kept([bytes(range(256)) * 8], head=1000, tail=1000).result()
    assert result.text == "[2048 bytes that are not text]"
    assert result.truncated_bytes == 2048


def test_text_with_a_few_strange_bytes_is_shown() -> None:
    for text in (b"/a/long/enough/path/name\0" * 100, "Grüße an alle".encode("latin-1") * 100):
        assert "not text" not in kept([text], head=10_000).result().text

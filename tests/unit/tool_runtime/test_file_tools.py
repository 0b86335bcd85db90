"""The file tools that run inside a sandbox, here without one."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from tool_runtime.inside import files


@pytest.fixture(autouse=True)
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(tool: str, **arguments: str | bytes | int) -> tuple[int, str]:
    """(exit code, answer)."""
    fields = {
        name: value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogateescape")
        for name, value in arguments.items()
    }
    read, write = os.pipe()
    os.set_blocking(read, False)
    try:
        code = files.run({**fields, "tool": tool.encode()}, write)
        os.close(write)
        with os.fdopen(read, "rb", closefd=False) as answer:
            return code, answer.read().decode()
    finally:
        os.close(read)


class TestRead:
    def test_a_part_of_a_file(self) -> None:
        Path("f").write_text("".join(f"{i}\n" for i in range(1, 11)))
        assert run("read_file", path="f", first_line=3, max_lines=2) == (
            0,
            "3\n4\n[more follows; read on with first_line=5]\n",
        )
        assert run("read_file", path="f", first_line=9) == (0, "9\n10\n")
        assert run("read_file", path="f", first_line=11) == (1, "f has only 10 lines")

    def test_a_large_file_is_cut_at_a_line_and_says_where_to_go_on(self) -> None:
        Path("f").write_text("".join(f"{i:07d}\n" for i in range(1, 10_001)))
        code, text = run("read_file", path="f")
        lines = text.splitlines()
        assert code == 0
        assert lines[-1] == f"[more follows; read on with first_line={len(lines)}]"
        assert int(lines[-2]) == len(lines) - 1

    def test_one_line_of_a_gigabyte_costs_no_gigabyte(self) -> None:
        with open("f", "wb") as sink:
            sink.write(b"x" * 100_000)
        code, text = run("read_file", path="f")
        assert (code, len(text) < 50_000) == (0, True)
        assert "more follows" in text

    def test_a_sparse_terabyte_is_a_binary_file(self) -> None:
        with open("f", "wb") as sink:
            sink.truncate(2**40)
        assert run("read_file", path="f") == (1, f"f is a binary file of {2**40} bytes")

    def test_what_is_not_a_plain_file_is_not_read(self) -> None:
        os.mkfifo("fifo")
        os.mkdir("dir")
        with socket.socket(socket.AF_UNIX) as local:
            local.bind("socket")
        assert run("read_file", path="fifo") == (1, "fifo is not a plain file")
        assert run("read_file", path="dir") == (1, "dir is a directory")
        assert run("read_file", path="socket")[0] == 1
        assert run("read_file", path="/dev/zero") == (1, "/dev/zero is not a plain file")

    def test_text_that_is_not_utf8_is_shown_as_well_as_it_can_be(self) -> None:
        Path("f").write_bytes(b"gr\xfcn\n")
        assert run("read_file", path="f") == (0, "gr\N{REPLACEMENT CHARACTER}n\n")


class TestWrite:
    def test_missing_directories_are_made_and_a_longer_file_is_replaced_whole(self) -> None:
        run("write_file", path="a/b/c", content="long content")
        assert run("write_file", path="a/b/c", content="short") == (0, "wrote 5 bytes to a/b/c")
        assert Path("a/b/c").read_text() == "short"

    def test_a_fifo_or_directory_in_the_way_is_an_error_and_not_a_hang(self) -> None:
        os.mkfifo("fifo")
        os.mkdir("dir")
        assert run("write_file", path="fifo", content="x")[0] == 1
        assert run("write_file", path="dir", content="x") == (1, "Is a directory: dir")
        assert run("write_file", path="/proc/nope/x", content="x")[0] == 1

    def test_permissions_of_a_file_survive(self) -> None:
        Path("run.sh").write_text("old")
        os.chmod("run.sh", 0o755)
        run("write_file", path="run.sh", content="new")
        assert os.stat("run.sh").st_mode & 0o777 == 0o755


class TestEdit:
    def test_the_one_occurrence_is_replaced(self) -> None:
        Path("f").write_text("one\ntwo\nthree\n")
        assert run("edit_file", path="f", old_text="two", new_text="2") == (
            0,
            "replaced 1 occurrence in f, the first in line 2",
        )
        assert Path("f").read_text() == "one\n2\nthree\n"

    def test_several_are_refused_with_their_lines_unless_all_are_meant(self) -> None:
        Path("f").write_text("a\nb\na\n")
        code, text = run("edit_file", path="f", old_text="a", new_text="x")
        assert code == 1
        assert "occurs 2 times in f (lines 1, 3)" in text
        assert Path("f").read_text() == "a\nb\na\n"
        assert run("edit_file", path="f", old_text="a", new_text="x", replace_all=1)[0] == 0
        assert Path("f").read_text() == "x\nb\nx\n"

    def test_a_miss_is_told_with_a_hint(self) -> None:
        Path("f").write_text("def f():\n    return  1\n")
        assert "differs only in white space" in run("edit_file", path="f", old_text="return 1", new_text="")[1]
        assert "its first line does, in line 1" in run("edit_file", path="f", old_text="def f():\n  x", new_text="")[1]
        assert run("edit_file", path="f", old_text="nowhere", new_text="") == (1, "old_text does not occur in f")

    def test_bytes_that_are_not_utf8_survive_an_edit_elsewhere(self) -> None:
        Path("f").write_bytes(b"\xff one\n")
        assert run("edit_file", path="f", old_text="one", new_text="two")[0] == 0
        assert Path("f").read_bytes() == b"\xff two\n"


class TestListAndSearch:
    def test_entries_are_sorted_and_sized_and_strange_names_stay_on_their_line(self) -> None:
        Path("b.txt").write_text("12345")
        Path("a").mkdir()
        Path("a", "inner").touch()
        Path("new\nline").touch()
        Path("link").symlink_to("b.txt")
        assert run("list_files") == (0, "a/\nb.txt 5\nlink -> b.txt\nnew\\nline 0\n")
        assert "a/inner 0\n" in run("list_files", depth=2)[1]

    def test_a_directory_of_very_many_is_cut_off(self) -> None:
        for i in range(files.ENTRIES_MAX + 5):
            Path(str(i)).touch()
        text = run("list_files")[1]
        assert text.count("\n") == files.ENTRIES_MAX + 1
        assert "more than" in text

    def test_search_finds_lines_in_text_files_only(self) -> None:
        Path("a.py").write_text("import os\n  needle = 1\n")
        Path("b.txt").write_text("needle\n")
        Path("c.bin").write_bytes(b"\0needle")
        Path(".git").mkdir()
        Path(".git", "x").write_text("needle")
        assert run("search_files", pattern="need.e") == (0, "a.py:2:needle = 1\nb.txt:1:needle\n")
        assert run("search_files", pattern="needle", glob="*.py") == (0, "a.py:2:needle = 1\n")
        assert run("search_files", pattern="needle", path="b.txt") == (0, "b.txt:1:needle\n")
        assert run("search_files", pattern="absent") == (0, "no match\n")
        assert run("search_files", pattern="(")[0] == 1

    def test_search_does_not_follow_links_or_hang_on_fifos(self) -> None:
        Path("loop").symlink_to(".")
        os.mkfifo("fifo")
        Path("f").write_text("needle")
        assert run("search_files", pattern="needle") == (0, "f:1:needle\n")


def test_an_unknown_operation_is_an_error() -> None:
    assert run("fly") == (1, "there is no such file operation")

"""File tools. They run inside the sandbox and so see what the program sees: no path has to be checked, none can escape.

Hostile files cost no more than an error: FIFOs, devices and sockets are not opened for reading, sizes are bounded whatever a
sparse file claims, directories of a million entries end at a limit.
"""

from __future__ import annotations

import errno
import fnmatch
import os
import stat
from collections.abc import Callable, Iterator

from tool_runtime.inside.frames import Fields

READ_BYTES_MAX = 48 * 1024
#: How far into a file `first_line` is looked for.
SCANNED_BYTES_MAX = 256 * 1024 * 1024
EDIT_BYTES_MAX = 10 * 1024 * 1024
SEARCHED_FILE_BYTES_MAX = 5 * 1024 * 1024
ENTRIES_MAX = 1000
MATCHES_MAX = 200
MATCH_CHARS_MAX = 300
VISITED_MAX = 100_000
_CHUNK_BYTES = 65536
_PASSED_BY = {".git", "node_modules", "__pycache__", ".venv"}


class FileToolError(Exception):
    """What the model is told went wrong."""


def run(fields: Fields, output_fd: int) -> int:
    """Do the operation that `fields` name, write the answer to `output_fd`, and return an exit code."""
    operation = _OPERATIONS.get(_text(fields, "tool"))
    code = 0
    try:
        if operation is None:
            raise FileToolError("there is no such file operation")
        answer = operation(fields)
    except FileToolError as exc:
        answer, code = str(exc), 1
    except OSError as exc:
        answer, code = f"{exc.strerror or exc}: {_text(fields, 'path')}", 1
    except MemoryError:
        answer, code = "out of memory", 1
    data = memoryview(answer.encode("utf-8", "replace"))
    while data:
        data = data[os.write(output_fd, data) :]
    return code


def read_file(fields: Fields) -> str:
    path = _text(fields, "path")
    first, wanted = _number(fields, "first_line", 1), _number(fields, "max_lines", 0)
    with _open_regular(path) as source:
        lines: list[bytes] = []
        size, number, is_cut = 0, 0, False
        for line in _bounded_lines(source):
            if number == 0 and b"\0" in line:
                raise FileToolError(f"{path} is a binary file of {os.fstat(source.fileno()).st_size} bytes")
            number += 1
            if number < first:
                continue
            if (wanted and len(lines) >= wanted) or size + len(line) > READ_BYTES_MAX:
                is_cut = True
                if not lines:  # one line that is larger than everything we may show
                    lines.append(line[:READ_BYTES_MAX])
                break
            lines.append(line)
            size += len(line)
    if not lines and first > 1:
        raise FileToolError(f"{path} has only {number} lines")
    text = b"".join(lines).decode("utf-8", "replace")
    if is_cut:
        after = first + len(lines)
        text += ("" if text.endswith("\n") else "\n") + f"[more follows; read on with first_line={after}]\n"
    return text


def write_file(fields: Fields) -> str:
    path, content = _text(fields, "path"), fields.get("content", b"")
    parent = os.path.dirname(path)
    if parent:
        os.makedirs(parent, exist_ok=True)
    _replace_content(path, content)
    return f"wrote {len(content)} bytes to {path}"


def edit_file(fields: Fields) -> str:
    path = _text(fields, "path")
    old, new = fields.get("old_text", b""), fields.get("new_text", b"")
    with _open_regular(path) as source:
        content = source.read(EDIT_BYTES_MAX + 1)
    if len(content) > EDIT_BYTES_MAX:
        raise FileToolError(f"{path} is larger than {EDIT_BYTES_MAX} bytes; edit it with the shell")
    count = content.count(old) if old else 0
    if count == 0:
        raise FileToolError(f"old_text does not occur in {path}{_near_miss(content, old)}")
    if count > 1 and _text(fields, "replace_all") != "1":
        places = ", ".join(str(line) for line in _lines_of(content, old)[:10])
        raise FileToolError(
            f"old_text occurs {count} times in {path} (lines {places}); add what stands around it, or set replace_all"
        )
    first = _lines_of(content, old)[0]
    _replace_content(path, content.replace(old, new))
    return f"replaced {count} occurrence{'s' if count > 1 else ''} in {path}, the first in line {first}"


def list_files(fields: Fields) -> str:
    root, depth = _text(fields, "path") or ".", _number(fields, "depth", 1)
    lines: list[str] = []
    if _list_into(lines, root, "", depth):
        lines.append(f"[more than {ENTRIES_MAX} entries; list a directory further down]")
    return "\n".join(lines) + "\n" if lines else f"{root} is empty\n"


def search_files(fields: Fields) -> str:
    import re  # costs milliseconds to import, and only this operation needs it

    try:
        pattern = re.compile(_text(fields, "pattern"))
    except re.error as exc:
        raise FileToolError(f"not a regular expression: {exc}") from exc
    root, glob = _text(fields, "path") or ".", _text(fields, "glob")
    lines: list[str] = []
    for path in _files_below(root):
        if glob and not fnmatch.fnmatch(os.path.basename(path), glob):
            continue
        for number, line in _text_lines(path):
            if pattern.search(line):
                lines.append(f"{_shown(path)}:{number}:{line.strip()[:MATCH_CHARS_MAX]}")
                if len(lines) >= MATCHES_MAX:
                    lines.append(f"[more than {MATCHES_MAX} matches; narrow the pattern or the path]")
                    return "\n".join(lines) + "\n"
    return "\n".join(lines) + "\n" if lines else "no match\n"


_OPERATIONS: dict[str, Callable[[Fields], str]] = {
    "read_file": read_file,
    "write_file": write_file,
    "edit_file": edit_file,
    "list_files": list_files,
    "search_files": search_files,
}


def _text(fields: Fields, name: str) -> str:
    return fields.get(name, b"").decode("utf-8", "surrogateescape")


def _number(fields: Fields, name: str, default: int) -> int:
    raw = fields.get(name, b"")
    return int(raw) if raw else default


def _open_regular(path: str):  # type: ignore[no-untyped-def]
    """Open for reading what is a plain file, and nothing that could block or act on being opened."""
    # A FIFO opened this way does not wait for a writer; devices and sockets are turned away before a read.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        raise FileToolError(f"{path} is a directory" if stat.S_ISDIR(mode) else f"{path} is not a plain file")
    return os.fdopen(fd, "rb", buffering=_CHUNK_BYTES)


def _bounded_lines(source) -> Iterator[bytes]:  # type: ignore[no-untyped-def]
    """Lines with their ends; a line longer than what may be shown comes in pieces, so that memory stays bounded."""
    scanned = 0
    while scanned < SCANNED_BYTES_MAX:
        line = source.readline(READ_BYTES_MAX + 1)
        if not line:
            return
        scanned += len(line)
        yield line


def _replace_content(path: str, content: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY, 0o644)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise FileToolError(f"{path} is not a plain file")
        os.ftruncate(fd, 0)
        view = memoryview(content)
        while view:
            view = view[os.write(fd, view) :]
    except OSError as exc:
        if exc.errno in (errno.EFBIG, errno.ENOSPC, errno.EDQUOT):
            raise FileToolError(f"{path}: {exc.strerror}; the workspace is limited in size") from exc
        raise
    finally:
        os.close(fd)


def _lines_of(content: bytes, passage: bytes) -> list[int]:
    """The line in which each occurrence begins."""
    lines, at, line = [], content.find(passage), 1
    counted = 0
    while at >= 0:
        line += content.count(b"\n", counted, at)
        counted = at
        lines.append(line)
        at = content.find(passage, at + len(passage))
    return lines


def _near_miss(content: bytes, old: bytes) -> str:
    """A hint where only white space differs, the most common way to miss."""
    wanted = b" ".join(old.split())
    if wanted and wanted in b" ".join(content.split()):
        return ", but a passage that differs only in white space does: copy it to the letter"
    first = old.strip().split(b"\n")[0].strip()
    at = content.find(first) if first else -1
    if at < 0:
        return ""
    return f"; its first line does, in line {content.count(bytes((10,)), 0, at) + 1}"


def _list_into(lines: list[str], root: str, shown: str, depth: int) -> bool:
    """Append the entries below `root`; True if the limit cut them off."""
    with os.scandir(root) as entries:
        found = []
        for entry in entries:
            found.append(entry)
            if len(found) > ENTRIES_MAX:
                break
    for entry in sorted(found, key=lambda entry: entry.name):
        if len(lines) >= ENTRIES_MAX:
            return True
        name = shown + entry.name
        if entry.is_symlink():
            lines.append(f"{_shown(name)} -> {_shown(os.readlink(entry.path))}")
        elif entry.is_dir(follow_symlinks=False):
            lines.append(f"{_shown(name)}/")
            if depth > 1:
                try:
                    if _list_into(lines, entry.path, name + "/", depth - 1):
                        return True
                except PermissionError:
                    lines.append(f"{_shown(name)}/ [not readable]")
        else:
            lines.append(f"{_shown(name)} {entry.stat(follow_symlinks=False).st_size}")
    return len(found) > ENTRIES_MAX


def _shown(name: str) -> str:
    """A file name on one line, whatever bytes it has."""
    if name.isprintable():
        return name
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace").encode("unicode_escape").decode()


def _files_below(root: str) -> Iterator[str]:
    """Plain files in a stable order, at most `VISITED_MAX` directory entries; symbolic links are not followed."""
    if not os.path.isdir(root):
        yield root
        return
    waiting, visited = [root], 0
    while waiting:
        directory = waiting.pop()
        try:
            with os.scandir(directory) as entries:
                found = sorted(entries, key=lambda entry: entry.name)
        except OSError:
            continue
        for entry in found:
            visited += 1
            if visited > VISITED_MAX:
                return
            if entry.is_file(follow_symlinks=False):
                yield entry.path[2:] if entry.path.startswith("./") else entry.path
        waiting += [e.path for e in reversed(found) if e.is_dir(follow_symlinks=False) and e.name not in _PASSED_BY]


def _text_lines(path: str) -> Iterator[tuple[int, str]]:
    """Numbered lines of a text file; nothing of a binary, unreadable or very large one."""
    try:
        with _open_regular(path) as source:
            if os.fstat(source.fileno()).st_size > SEARCHED_FILE_BYTES_MAX:
                return
            content = source.read(SEARCHED_FILE_BYTES_MAX)
    except (OSError, FileToolError):
        return
    if b"\0" not in content[:8192]:
        yield from enumerate(content.decode("utf-8", "replace").splitlines(), start=1)

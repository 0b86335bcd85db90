"""Writes a directory as a tar, a piece at a time, reading nothing but plain files and following no link.

Safe while the directory's program runs and rearranges it: names are looked up in open directories, what turns out to be something
else is left out, and a file that shrinks or grows meanwhile has the size that its header says. Sockets, fifos and devices are
left out; a file with several names is written once for each; owners are not told.

The host uses it on workspaces that it has; sandboxes that have theirs elsewhere run it, and what unpacks such an archive, themselves.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
import tarfile
from collections.abc import Iterator

BLOCK_BYTES = 512
#: A tree that is deeper than this is over the limit whatever it holds: nobody needs it, and walking it would cost depth.
DEPTH_MAX = 200
_PIECE_BYTES = 256 * 1024
#: A link or a socket took its place, or its owner closed it even to us.
_NOT_OURS = (errno.ELOOP, errno.ENXIO, errno.EACCES)
_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: should a fifo have taken the file's place, opening it waits for nobody.
_OPEN_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class TooLarge(Exception):
    """The tree holds more than may be written; the message says of what."""


def tar_of(root: str | os.PathLike[str], *, bytes_max: int, files_max: int) -> Iterator[bytes]:
    """The content of `root` as an uncompressed pax archive.

    Raises (while iterating):
        TooLarge: it holds more than `bytes_max` bytes of content or `files_max` entries, or is nested too deeply.
        FileNotFoundError: there is no such directory.
    """
    writer = _Writer(bytes_max, files_max)
    directory = os.open(root, _OPEN_DIRECTORY)
    try:
        yield from writer.directory(directory, b"", 0)
    finally:
        os.close(directory)
    yield bytes(2 * BLOCK_BYTES)


class _Writer:
    def __init__(self, bytes_max: int, files_max: int) -> None:
        self._bytes_left = bytes_max
        self._entries_left = files_max

    def directory(self, directory: int, prefix: bytes, depth: int) -> Iterator[bytes]:
        if depth > DEPTH_MAX:
            raise TooLarge("the workspace's directories are nested too deeply")
        for name in sorted(os.fsencode(entry) for entry in os.listdir(directory)):
            try:
                state = os.stat(name, dir_fd=directory, follow_symlinks=False)
                yield from self._entry(directory, name, prefix + name, state, depth)
            except (FileNotFoundError, NotADirectoryError):
                continue  # it went away, or became something else
            except OSError as exc:
                if exc.errno not in _NOT_OURS:
                    raise

    def _entry(self, directory: int, name: bytes, path: bytes, state: os.stat_result, depth: int) -> Iterator[bytes]:
        header = tarfile.TarInfo(path.decode("utf-8", "surrogateescape"))
        header.mode, header.mtime = stat.S_IMODE(state.st_mode) & 0o777, int(state.st_mtime)
        if stat.S_ISDIR(state.st_mode):
            below = os.open(name, _OPEN_DIRECTORY, dir_fd=directory)
            try:
                header.type = tarfile.DIRTYPE
                yield self._header(header)
                yield from self.directory(below, path + b"/", depth + 1)
            finally:
                os.close(below)
        elif stat.S_ISLNK(state.st_mode):
            header.type = tarfile.SYMTYPE
            header.linkname = os.readlink(name, dir_fd=directory).decode("utf-8", "surrogateescape")
            yield self._header(header)
        elif stat.S_ISREG(state.st_mode):
            yield from self._file(header, os.open(name, _OPEN_FILE, dir_fd=directory))

    def _file(self, header: tarfile.TarInfo, fd: int) -> Iterator[bytes]:
        with open(fd, "rb", buffering=0) as content:
            state = os.fstat(fd)
            if not stat.S_ISREG(state.st_mode):
                return
            header.size = left = state.st_size
            self._bytes_left -= left
            if self._bytes_left < 0:
                raise TooLarge("the workspace holds more than may be exported; sparse files count in full")
            yield self._header(header)
            while left:
                piece = content.read(min(left, _PIECE_BYTES)) or bytes(min(left, _PIECE_BYTES))
                left -= len(piece)
                yield piece
        yield bytes(-header.size % BLOCK_BYTES)

    def _header(self, header: tarfile.TarInfo) -> bytes:
        self._entries_left -= 1
        if self._entries_left < 0:
            raise TooLarge("the workspace holds more files than may be exported")
        return header.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def send(output_fd: int, root: str, bytes_max: str, files_max: str) -> None:
    """Write the content of `root` to a descriptor; says on standard error what is wrong with it, and ends with 1."""
    try:
        for piece in tar_of(root, bytes_max=int(bytes_max), files_max=int(files_max)):
            left = memoryview(piece)
            while left:
                left = left[os.write(output_fd, left) :]
    except (TooLarge, OSError) as exc:
        sys.exit(str(exc))


def receive(input_fd: int, root: str) -> None:
    """Unpack what comes from a descriptor below `root`. Only for archives that one trusts, or in a place that one does not mind."""
    # From 3.12 on (and in later versions of those before) there is a choice, and a warning for those who do not make it.
    chosen = {"filter": "fully_trusted"} if hasattr(tarfile, "fully_trusted_filter") else {}
    try:
        with open(input_fd, "rb") as source, tarfile.open(fileobj=source, mode="r|") as archive:
            archive.extractall(root, **chosen)  # type: ignore[arg-type]
    except (tarfile.TarError, OSError) as exc:
        sys.exit(f"the workspace cannot be unpacked: {exc}")

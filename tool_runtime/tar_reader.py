"""Reads tar archives that strangers made. Pure: bytes in, entries out; nothing is created here.

    file   = block… (512 bytes each), gzip-compressed or not
    entry  = header block, content in whole blocks        a name, a kind, a size
    before it, optionally:  x, g (pax) or L, K (GNU)      longer names than a header holds

The standard library's reader serves archives that one trusts: it reads a pax header of any size into memory, decompresses without
end and gives out device nodes. This one knows four kinds of entry (file, directory, symbolic link, hard link), refuses the rest by
name, and never holds more than a header, a long name and one piece of content. What remains wrong is refused, not repaired: a
name that leaves the workspace, a name twice, set-user-ID, a checksum. Owners are not even read.
"""

from __future__ import annotations

import tarfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from tool_runtime.inside.archive import BLOCK_BYTES, DEPTH_MAX
from tool_runtime.workspace_errors import ArchiveRefused, WorkspaceTooLarge

_PIECE_BYTES = 256 * 1024
_NAME_BYTES_MAX, _COMPONENT_BYTES_MAX = 4096, 255
#: Long names and pax headers are no longer than this.
_EXTENSION_BYTES_MAX = 64 * 1024
#: What an archive may have beside content, for each entry: its header, extension headers, padding.
_OVERHEAD_BYTES = 8 * BLOCK_BYTES
_GZIP_MAGIC = b"\x1f\x8b"
_GZIP_WINDOW = 16 + zlib.MAX_WBITS
_SET_ID_BITS = 0o6000


class EntryKind(StrEnum):
    """What an entry becomes."""

    FILE = "file"
    DIRECTORY = "directory"
    SYMLINK = "symlink"
    HARDLINK = "hardlink"


_KINDS = {
    tarfile.REGTYPE: EntryKind.FILE,
    tarfile.AREGTYPE: EntryKind.FILE,
    tarfile.CONTTYPE: EntryKind.FILE,
    tarfile.DIRTYPE: EntryKind.DIRECTORY,
    tarfile.SYMTYPE: EntryKind.SYMLINK,
    tarfile.LNKTYPE: EntryKind.HARDLINK,
}
_REFUSED_KINDS = {
    tarfile.CHRTYPE: "a device",
    tarfile.BLKTYPE: "a device",
    tarfile.FIFOTYPE: "a fifo",
    tarfile.GNUTYPE_SPARSE: "a sparse file",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TarLimits:
    """What an archive may come to."""

    #: Content of all files together.
    bytes_max: int
    #: Entries of all kinds.
    entries_max: int
    #: Symbolic links may point anywhere. They are never followed here; inside a sandbox they lead no further than it does.
    keeps_all_symlinks: bool = False

    @property
    def archive_bytes_max(self) -> int:
        """Bytes of the archive itself, uncompressed."""
        return self.bytes_max + _OVERHEAD_BYTES * (self.entries_max + 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class TarEntry:
    """One thing to make. Names are components, none of which is empty, `.` or `..`; the workspace itself has none."""

    kind: EntryKind
    path: tuple[bytes, ...]
    mode: int
    mtime_s: float
    #: Bytes of content; 0 for all but files.
    size: int
    #: What a symbolic link says.
    target: bytes = b""
    #: The earlier entry that a hard link is another name of.
    linked: tuple[bytes, ...] = ()

    @property
    def name(self) -> str:
        return shown(b"/".join(self.path))


def entries_of(read: Callable[[int], bytes], limits: TarLimits) -> Iterator[tuple[TarEntry, Iterator[bytes]]]:
    """Each entry with its content, which must be used up before the next entry is asked for.

    `read` gives at most so many bytes of the archive, and none at its end.

    Raises (while iterating):
        ArchiveRefused: it is not a whole tar, or asks for something that it may not have.
        WorkspaceTooLarge: it passes `limits`.
    """
    blocks = _Blocks(read, limits.archive_bytes_max)
    known = _Known(limits)
    names: dict[str, bytes] = {}
    while (header := blocks.header()) is not None:
        if header.type in (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.XGLTYPE):
            found = _pax(blocks.whole(header.size))
            # A global header holds names for all that follow, which nobody has a use for.
            names |= found if header.type != tarfile.XGLTYPE else {}
        elif header.type == tarfile.GNUTYPE_LONGNAME:
            names["path"] = blocks.whole(header.size).rstrip(b"\0")
        elif header.type == tarfile.GNUTYPE_LONGLINK:
            names["linkpath"] = blocks.whole(header.size).rstrip(b"\0")
        else:
            entry = known.admitted(header, names)
            names = {}
            content = blocks.content(entry.size)
            yield entry, content
            for _ in content:
                raise AssertionError("the content was not used up")


class _Blocks:
    """The archive, decompressed and counted."""

    def __init__(self, read: Callable[[int], bytes], bytes_max: int) -> None:
        self._read = read
        self._bytes_max = bytes_max
        self._total = 0
        self._buffer = b""
        first = read(_PIECE_BYTES)
        self._pieces = self._decompressed(first) if first.startswith(_GZIP_MAGIC) else self._plain(first)

    def header(self) -> tarfile.TarInfo | None:
        """The next header; None at the end of the archive."""
        block = self._take(BLOCK_BYTES, may_end=True)
        if block.strip(b"\0") == b"":
            return None
        try:
            header = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except tarfile.HeaderError as exc:
            raise ArchiveRefused(f"this is not a tar archive, or a damaged one: {exc}") from exc
        if header.size < 0:
            raise ArchiveRefused("an entry with a size below zero")
        return header

    def whole(self, size: int) -> bytes:
        """A long name or pax header."""
        if size > _EXTENSION_BYTES_MAX:
            raise ArchiveRefused(f"a name or extended header of {size} bytes")
        return b"".join(self.content(size))

    def content(self, size: int) -> Iterator[bytes]:
        left = size
        while left:
            piece = self._take(min(left, _PIECE_BYTES))
            left -= len(piece)
            yield piece
        self._take(-size % BLOCK_BYTES)

    def _take(self, size: int, *, may_end: bool = False) -> bytes:
        while len(self._buffer) < size:
            piece = next(self._pieces, b"")
            if not piece:
                if may_end and not self._buffer:
                    return b""
                raise ArchiveRefused("the archive ends in the middle of an entry")
            self._total += len(piece)
            if self._total > self._bytes_max:
                raise WorkspaceTooLarge("the archive unpacks to more than a workspace may hold")
            self._buffer += piece
        taken, self._buffer = self._buffer[:size], self._buffer[size:]
        return taken

    def _plain(self, piece: bytes) -> Iterator[bytes]:
        while piece:
            yield piece
            piece = self._read(_PIECE_BYTES)

    def _decompressed(self, piece: bytes) -> Iterator[bytes]:
        unzip = zlib.decompressobj(_GZIP_WINDOW)
        try:
            while piece:
                if unzip.eof:
                    unzip = zlib.decompressobj(_GZIP_WINDOW)  # another gzip member follows
                # A piece at a time, whatever it swells to.
                if data := unzip.decompress(piece, _PIECE_BYTES):
                    yield data
                piece = unzip.unconsumed_tail or unzip.unused_data or self._read(_PIECE_BYTES)
        except zlib.error as exc:
            raise ArchiveRefused(f"the compressed data is damaged: {exc}") from exc


class _Known:
    """What was in the archive so far, which decides what may come next."""

    def __init__(self, limits: TarLimits) -> None:
        self._limits = limits
        self._entries = 0
        self._bytes = 0
        self._seen: dict[tuple[bytes, ...], EntryKind] = {}

    def admitted(self, header: tarfile.TarInfo, names: dict[str, bytes]) -> TarEntry:
        entry = _entry(header, names, self._limits)
        self._entries += 1
        self._bytes += entry.size
        if self._bytes > self._limits.bytes_max:
            raise WorkspaceTooLarge("the archive unpacks to more than a workspace may hold")
        before = self._seen.get(entry.path)
        if before is not None and not before == entry.kind == EntryKind.DIRECTORY:
            raise ArchiveRefused(f"{entry.name} is in the archive twice")
        for depth in range(1, len(entry.path)):
            if self._seen.setdefault(entry.path[:depth], EntryKind.DIRECTORY) is not EntryKind.DIRECTORY:
                raise ArchiveRefused(f"{entry.name} lies below something that is not a directory")
        if entry.kind is EntryKind.HARDLINK and self._seen.get(entry.linked) is not EntryKind.FILE:
            raise ArchiveRefused(
                f"{entry.name} is a hard link to something that is not a file before it in the archive"
            )
        # A hard link to a hard link is one to the file.
        self._seen[entry.path] = EntryKind.FILE if entry.kind is EntryKind.HARDLINK else entry.kind
        if max(self._entries, len(self._seen)) > self._limits.entries_max:
            raise WorkspaceTooLarge(f"the archive has more than {self._limits.entries_max} entries")
        return entry


def _entry(header: tarfile.TarInfo, names: dict[str, bytes], limits: TarLimits) -> TarEntry:
    raw = names.get("path", header.name.encode("utf-8", "surrogateescape"))
    if header.type not in _KINDS or "GNU.sparse" in names:
        what = _REFUSED_KINDS.get(header.type, "a sparse file" if "GNU.sparse" in names else f"of kind {header.type!r}")
        raise ArchiveRefused(f"{shown(raw)} is {what}; files, directories and links are taken")
    kind = _KINDS[header.type]
    if kind is EntryKind.FILE and raw.endswith(b"/"):
        kind = EntryKind.DIRECTORY  # as archives older than POSIX have it
    path = _components(raw)
    if not path and kind is not EntryKind.DIRECTORY:
        raise ArchiveRefused(f"{shown(raw)} names the workspace itself")
    if header.mode & _SET_ID_BITS and kind is not EntryKind.SYMLINK:
        raise ArchiveRefused(f"{shown(raw)} would run as somebody else (set-user-ID or set-group-ID)")
    link = names.get("linkpath", header.linkname.encode("utf-8", "surrogateescape"))
    if kind is EntryKind.SYMLINK and not limits.keeps_all_symlinks:
        _check_symlink(raw, path, link)
    return TarEntry(
        kind=kind,
        path=path,
        mode=header.mode & 0o777,
        mtime_s=max(0.0, min(float(header.mtime), 2.0**33)),
        size=_size(header, names) if kind is EntryKind.FILE else 0,
        target=_checked_target(raw, link) if kind is EntryKind.SYMLINK else b"",
        linked=_components(link) if kind is EntryKind.HARDLINK else (),
    )


def _size(header: tarfile.TarInfo, names: dict[str, bytes]) -> int:
    size = names.get("size")
    if size is None:
        return int(header.size)
    if not size.isdigit() or len(size) > 15:
        raise ArchiveRefused(f"an entry with the size {shown(size)}")
    return int(size)


def _components(raw: bytes) -> tuple[bytes, ...]:
    name = shown(raw)
    if raw.startswith(b"/"):
        raise ArchiveRefused(f"{name} is an absolute path")
    if len(raw) > _NAME_BYTES_MAX or b"\0" in raw:
        raise ArchiveRefused(f"{name} is no name for a file")
    components = tuple(part for part in raw.split(b"/") if part not in (b"", b"."))
    if b".." in components:
        raise ArchiveRefused(f"{name} leads out of the workspace")
    if len(components) > DEPTH_MAX or any(len(part) > _COMPONENT_BYTES_MAX for part in components):
        raise ArchiveRefused(f"{name} is too long or nested too deeply")
    return components


def _checked_target(raw: bytes, target: bytes) -> bytes:
    if not target or len(target) > _NAME_BYTES_MAX or b"\0" in target:
        raise ArchiveRefused(f"{shown(raw)} is a link to nowhere")
    return target


def _check_symlink(raw: bytes, path: tuple[bytes, ...], target: bytes) -> None:
    """It must stay in the workspace, whatever other links there are.

    What it lies in are directories, so leading `..` go up by one each. After a name, which may be a link itself, nobody knows
    where `..` leads; such a target is refused.
    """
    parts = [part for part in target.split(b"/") if part not in (b"", b".")]
    ups = next((n for n, part in enumerate(parts) if part != b".."), len(parts))
    if target.startswith(b"/") or ups > len(path) - 1 or b".." in parts[ups:]:
        raise ArchiveRefused(f"{shown(raw)} is a link out of the workspace, to {shown(target)}")


def _pax(data: bytes) -> dict[str, bytes]:
    """The records that matter here: path, linkpath and size; and a mark for sparse files, which are not taken."""
    found: dict[str, bytes] = {}
    while data.strip(b"\0"):
        length, blank, _ = data.partition(b" ")
        end = int(length) if length.isdigit() and len(length) < 8 else 0
        record = data[len(length) + 1 : end]
        key, equals, value = record.partition(b"=")
        if not blank or not equals or not value.endswith(b"\n"):
            raise ArchiveRefused("a damaged extended header")
        if key in (b"path", b"linkpath", b"size"):
            found[key.decode()] = value[:-1]
        elif key.startswith(b"GNU.sparse"):
            found["GNU.sparse"] = b""
        data = data[end:]
    return found


def shown(name: bytes) -> str:
    """A name in a message: bounded, and without what a terminal could take for a command."""
    return repr(name[:200].decode("utf-8", "replace"))

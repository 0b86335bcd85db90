"""Archives as honest and as hostile senders make them."""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import Mapping
from typing import Any


def member(name: str, content: bytes = b"", **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    """An entry; `fields` are those of `TarInfo`."""
    info = tarfile.TarInfo(name)
    info.size = len(content)
    info.mode = 0o644
    for field, value in fields.items():
        setattr(info, field, value)
    return info, content


def tar(*members: tuple[tarfile.TarInfo, bytes], tar_format: int = tarfile.PAX_FORMAT) -> bytes:
    """An archive of entries as they are: nothing is corrected."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tar_format) as archive:
        for info, content in members:
            archive.addfile(info, io.BytesIO(content) if content else None)
    return buffer.getvalue()


def files(content: Mapping[str, bytes | str]) -> bytes:
    """An archive of plain files."""
    return tar(*(member(name, text.encode() if isinstance(text, str) else text) for name, text in content.items()))


def zipped(archive: bytes) -> bytes:
    return gzip.compress(archive, mtime=0)


def listed(archive: bytes) -> dict[str, tarfile.TarInfo]:
    """Its entries by name, as the standard library reads them."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
        return {info.name: info for info in opened.getmembers()}

"""How the host and the exec agent talk: flat records of byte strings over a stream socket.

    frame   = length (4 bytes, big endian) fields
    field   = name length (1 byte) name value length (4 bytes) value

There is nothing to nest and nothing to execute: whatever a hostile program inside the sandbox writes, the reader either
gets a dict of byte strings of bounded size or a `FrameError`.
"""

from __future__ import annotations

import struct

FRAME_BYTES_MAX = 20 * 1024 * 1024
_LENGTH = struct.Struct(">I")

Fields = dict[str, bytes]


class FrameError(Exception):
    """What arrived is not a frame."""


def encode(fields: dict[str, bytes | str | int]) -> bytes:
    """One frame. Strings become UTF-8, numbers decimal text.

    Raises:
        FrameError: the frame would be larger than `FRAME_BYTES_MAX`.
    """
    parts: list[bytes] = []
    for name, value in fields.items():
        raw = value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogateescape")
        key = name.encode("ascii")
        parts += (bytes((len(key),)), key, _LENGTH.pack(len(raw)), raw)
    body = b"".join(parts)
    if len(body) > FRAME_BYTES_MAX:
        raise FrameError(f"a frame of {len(body)} bytes")
    return _LENGTH.pack(len(body)) + body


class Decoder:
    """Turns a stream of bytes back into records."""

    def __init__(self, frame_bytes_max: int = FRAME_BYTES_MAX) -> None:
        self._buffer = bytearray()
        self._frame_bytes_max = frame_bytes_max

    def feed(self, data: bytes) -> list[Fields]:
        """The records that `data` completes.

        Raises:
            FrameError: a length that is too large, or a body that does not divide into fields. The stream is then useless.
        """
        self._buffer += data
        records: list[Fields] = []
        while len(self._buffer) >= 4:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > self._frame_bytes_max:
                raise FrameError(f"a frame of {length} bytes")
            if len(self._buffer) < 4 + length:
                break
            body = bytes(self._buffer[4 : 4 + length])
            del self._buffer[: 4 + length]
            records.append(_fields(body))
        return records


def _fields(body: bytes) -> Fields:
    fields: Fields = {}
    at = 0
    while at < len(body):
        name_end = at + 1 + body[at]
        if name_end + 4 > len(body):
            raise FrameError("a field is cut off")
        (length,) = _LENGTH.unpack_from(body, name_end)
        end = name_end + 4 + length
        if end > len(body):
            raise FrameError("a field is cut off")
        try:
            name = body[at + 1 : name_end].decode("ascii")
        except UnicodeDecodeError:
            raise FrameError("a field's name is not text") from None
        fields[name] = body[name_end + 4 : end]
        at = end
    return fields

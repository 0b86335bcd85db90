"""The host that a TLS client greets, read from the first bytes it sends (RFC 8446 §4.1.2, RFC 6066 §3). Pure.

Nothing is decrypted: the name stands in the clear. What is not a greeting, or names no host, is an error, so that nothing
passes that was not understood.
"""

from __future__ import annotations

#: A greeting may be split over several records; a longer one is no honest one.
GREETING_BYTES_MAX = 64 * 1024
_HANDSHAKE, _CLIENT_HELLO, _SERVER_NAME, _HOST_NAME = 22, 1, 0, 0


class NotAGreeting(Exception):
    """These bytes do not begin a TLS connection that names its host."""


class _Incomplete(Exception):
    pass


def server_name(data: bytes) -> str | None:
    """The name that is greeted; None if more bytes are needed to know.

    Raises:
        NotAGreeting: they are no client's greeting, or it names no host.
    """
    try:
        return _name_in(_Cursor(_handshake(data)))
    except _Incomplete:
        return None


class _Cursor:
    """Reads lengths and what they announce."""

    def __init__(self, data: bytes, *, is_whole: bool = False) -> None:
        self._data = data
        self._at = 0
        self._is_whole = is_whole

    @property
    def is_at_end(self) -> bool:
        return self._at >= len(self._data)

    def take(self, count: int) -> bytes:
        end = self._at + count
        if end > len(self._data):
            raise NotAGreeting("a length leads out of the greeting") if self._is_whole else _Incomplete
        taken, self._at = self._data[self._at : end], end
        return taken

    def number(self, count: int) -> int:
        return int.from_bytes(self.take(count), "big")

    def block(self, length_bytes: int) -> _Cursor:
        """What a length of that many bytes announces, whole."""
        return _Cursor(self.take(self.number(length_bytes)), is_whole=True)


def _handshake(data: bytes) -> bytes:
    """The handshake bytes of the records at the beginning of `data`, as far as they are there."""
    found, at = b"", 0
    while at < len(data):
        if data[at] != _HANDSHAKE or (at + 1 < len(data) and data[at + 1] != 3):
            if at == 0:
                raise NotAGreeting("it does not begin with a TLS handshake")
            break
        if at + 5 > len(data):
            break
        length = int.from_bytes(data[at + 3 : at + 5], "big")
        if not 0 < length <= 2**14:
            raise NotAGreeting("a record of that length does not exist")
        found += data[at + 5 : at + 5 + length]
        at += 5 + length
    return found


def _name_in(handshake: _Cursor) -> str:
    if handshake.number(1) != _CLIENT_HELLO:
        raise NotAGreeting("its first message is no client's greeting")
    length = handshake.number(3)
    if length > GREETING_BYTES_MAX:
        raise NotAGreeting("it is too long")
    hello = _Cursor(handshake.take(length), is_whole=True)
    hello.take(2 + 32)  # version, random
    hello.block(1)  # session
    hello.block(2)  # ciphers
    hello.block(1)  # compression
    if hello.is_at_end:
        raise NotAGreeting("it names no host")
    extensions = hello.block(2)
    while not extensions.is_at_end:
        kind, content = extensions.number(2), extensions.block(2)
        if kind == _SERVER_NAME:
            names = content.block(2)
            if names.number(1) != _HOST_NAME:
                raise NotAGreeting("it names something that is no host")
            try:
                return names.take(names.number(2)).decode("ascii")
            except UnicodeDecodeError:
                raise NotAGreeting("the host's name is no text") from None
    raise NotAGreeting("it names no host")

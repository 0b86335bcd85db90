"""The host in a TLS greeting, as real clients write it and as hostile ones might."""

from __future__ import annotations

import functools
import ssl

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tool_runtime.tls_greeting import NotAGreeting, server_name


@functools.cache
def greeting(host: str | None) -> bytes:
    """What Python's own TLS client sends first."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = host is not None
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context.wrap_bio(incoming, outgoing, server_hostname=host)
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


def test_the_name_is_read() -> None:
    assert server_name(greeting("pypi.test")) == "pypi.test"


def test_more_is_asked_for_until_it_is_there() -> None:
    whole = greeting("pypi.test")
    known = [server_name(whole[:length]) for length in range(len(whole) + 1)]
    first = known.index("pypi.test")
    assert known[:first] == [None] * first
    assert set(known[first:]) == {"pypi.test"}


def test_a_greeting_over_several_records_is_one() -> None:
    whole = greeting("pypi.test")
    body = whole[5:]
    pieces = [body[at : at + 100] for at in range(0, len(body), 100)]
    split = b"".join(b"\x16\x03\x01" + len(piece).to_bytes(2, "big") + piece for piece in pieces)
    assert server_name(split) == "pypi.test"


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"SSH-2.0-x\r\n",
        b"\x16\x02\x00\x00\x10" + bytes(16),
        b"\x16\x03\x01\x00\x00",
        b"\x16\x03\x01\xff\xff" + bytes(100),
        b"\x16\x03\x01\x00\x04\x02\x00\x00\x00",
        b"\x16\x03\x01\x00\x04\x01\xff\xff\xff",
        b"\x16\x03\x01\x00\x05\x01\x00\x00\x01\x00",
    ],
    ids=["http", "ssh", "old ssl", "empty record", "huge record", "another message", "huge message", "cut inside"],
)
def test_what_is_no_greeting_is_refused(data: bytes) -> None:
    with pytest.raises(NotAGreeting):
        server_name(data)


def test_a_greeting_without_a_name_is_refused() -> None:
    with pytest.raises(NotAGreeting, match="names no host"):
        server_name(greeting(None))


@given(st.binary(max_size=300))
def test_no_bytes_make_it_fail_otherwise(data: bytes) -> None:
    try:
        name = server_name(b"\x16\x03\x01" + data)
    except NotAGreeting:
        return
    assert name is None or name.isascii()


@given(st.integers(0, 400), st.integers(0, 255))
def test_a_greeting_with_one_byte_changed_makes_it_fail_in_no_other_way(at: int, value: int) -> None:
    data = bytearray(greeting("pypi.test"))
    data[at % len(data)] = value
    try:
        server_name(bytes(data))
    except NotAGreeting:
        return

"""How a sandbox's listening socket comes out of it: with the first message on the control socket (see `egress_proxy.py`)."""

from __future__ import annotations

import asyncio
import contextlib
import socket

_READ_BYTES = 256 * 1024


async def received_listener(control: socket.socket, timeout_s: float) -> tuple[socket.socket | None, bytes]:
    """The listener, and what came along on the stream; None if none comes in time."""
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(control.fileno(), readable.set)
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await readable.wait()
    finally:
        loop.remove_reader(control.fileno())
    try:
        data, fds, _, _ = socket.recv_fds(control, _READ_BYTES, 1)
    except OSError:
        return None, b""
    if not fds:
        return None, data
    listener = socket.socket(fileno=fds[0])
    listener.setblocking(False)
    return listener, data

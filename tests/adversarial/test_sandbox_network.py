"""Attacks by network: the platform's own services, the machine's sockets, the cloud's metadata. There is no network."""

from __future__ import annotations

import secrets
import socket
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from support.attacks import assert_held
from support.tools import Program

pytestmark = [pytest.mark.adversarial, pytest.mark.asyncio(loop_scope="module")]


@pytest.fixture(scope="module")
def listeners() -> Iterator[dict[str, object]]:
    """What a platform has listening: TCP and UDP on loopback and on all addresses, abstract and named local sockets."""
    with ExitStack() as opened:
        tcp = opened.enter_context(socket.create_server(("127.0.0.1", 0)))
        anywhere = opened.enter_context(socket.create_server(("0.0.0.0", 0)))
        udp = opened.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        udp.bind(("127.0.0.1", 0))
        abstract = f"ct-abstract-{secrets.token_hex(8)}"
        local = opened.enter_context(socket.socket(socket.AF_UNIX))
        local.bind("\0" + abstract)
        local.listen()
        directory = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="ct-raylet-")))
        directory.chmod(0o755)
        named = opened.enter_context(socket.socket(socket.AF_UNIX))
        named.bind(str(directory / "raylet"))
        (directory / "raylet").chmod(0o777)
        named.listen()
        yield {
            "TCP": tcp.getsockname()[1],
            "ANYWHERE": anywhere.getsockname()[1],
            "UDP": udp.getsockname()[1],
            "ABSTRACT": abstract,
            "NAMED": str(directory / "raylet"),
            "HOST": own_address(),
        }


def own_address() -> str:
    """An address of this machine that is not loopback, where it has one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.1.1"
        return str(probe.getsockname()[0])


def with_names(listeners: dict[str, object], attack: str) -> str:
    return "".join(f"{name} = {value!r}\n" for name, value in listeners.items()) + attack


@pytest.mark.parametrize(
    "target",
    [
        *(
            '("127.0.0.1", TCP)',
            '("localhost", TCP)',
            '("127.0.0.1", ANYWHERE)',
            "(HOST, ANYWHERE)",
            '("0.0.0.0", TCP)',
        ),
        *('("127.1", TCP)', '("2130706433", TCP)', '("0x7f000001", TCP)', '("0177.0.0.1", TCP)'),
        *('("169.254.169.254", 80)', '("2852039166", 80)', '("8.8.8.8", 53)'),
    ],
)
async def test_no_address_can_be_connected_to(
    standing_program: Program, listeners: dict[str, object], target: str
) -> None:
    await assert_held(
        standing_program,
        with_names(
            listeners,
            f"""
@attack
def _():
    with socket.create_connection({target}, timeout=3):
        return "connected"
""",
        ),
    )


@pytest.mark.parametrize("target", ['("::1", TCP)', '("::ffff:127.0.0.1", TCP)', '("fd00:ec2::254", 80)'])
async def test_nor_by_the_newer_protocol(standing_program: Program, listeners: dict[str, object], target: str) -> None:
    await assert_held(
        standing_program,
        with_names(
            listeners,
            f"""
@attack
def _():
    with socket.socket(socket.AF_INET6) as client:
        client.settimeout(3)
        client.connect({target})
        return "connected"
""",
        ),
    )


async def test_datagrams_reach_nobody(program: Program) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver:
        receiver.bind(("127.0.0.1", 0))
        receiver.setblocking(False)
        await program.python(
            f"import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
            f"s.sendto(b'hello', ('127.0.0.1', {receiver.getsockname()[1]}))"
        )
        with pytest.raises(BlockingIOError):
            receiver.recv(10)


@pytest.mark.parametrize("address", ['"\\0" + ABSTRACT', "NAMED", '"/proc/self/root" + NAMED'])
async def test_local_sockets_of_the_host_cannot_be_reached(
    standing_program: Program, listeners: dict[str, object], address: str
) -> None:
    await assert_held(
        standing_program,
        with_names(
            listeners,
            f"""
@attack
def _():
    with socket.socket(socket.AF_UNIX) as client:
        client.connect({address})
        return "connected"
""",
        ),
    )


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("vsock", "40, socket.SOCK_STREAM"),
        ("packet", "17, socket.SOCK_RAW"),
        ("raw", "socket.AF_INET, socket.SOCK_RAW, 1"),
        ("alg", "38, socket.SOCK_SEQPACKET"),
        ("bluetooth", "31, socket.SOCK_RAW"),
        ("can", "29, socket.SOCK_RAW"),
        ("key", "15, socket.SOCK_RAW, 2"),
        ("tipc", "30, socket.SOCK_SEQPACKET"),
        ("xdp", "44, socket.SOCK_RAW"),
        ("rxrpc", "33, socket.SOCK_DGRAM"),
    ],
)
async def test_no_other_kind_of_socket_opens(standing_program: Program, name: str, arguments: str) -> None:
    await assert_held(
        standing_program, f"@attack\ndef _():\n    with socket.socket({arguments}):\n        return {name!r}\n"
    )


async def test_io_uring_is_no_way_around_the_filter(program: Program) -> None:
    await assert_held(
        program, "@attack\ndef _():\n    return syscall(425, 425, 8, ctypes.create_string_buffer(120)) + 1\n"
    )


async def test_the_network_cannot_be_configured(program: Program) -> None:
    """Netlink opens, for the C library looks at interfaces; adding one is another matter, and there is none to use."""
    await assert_held(
        program,
        r"""
@attack
def _():
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as route:
        route.bind((0, 0))
        # RTM_NEWLINK, NLM_F_REQUEST|ACK|CREATE: a dummy interface.
        body = struct.pack("=BxHiII", 0, 0, 0, 0, 0) + struct.pack("=HH", 12, 3) + b"planted\0"
        route.send(struct.pack("=IHHII", 16 + len(body), 16, 0x405, 1, 0) + body)
        answer = route.recv(4096)
        error = struct.unpack_from("=i", answer, 16)[0]
        return "made" if error == 0 else None
@attack
def _():
    return [name for _, name in socket.if_nameindex() if name != "lo"]
""",
    )


async def test_programs_do_not_share_a_loopback(program: Program, neighbour: Program) -> None:
    await neighbour.python("import socket; server = socket.create_server(('127.0.0.1', 7777))")
    await assert_held(
        program,
        '@attack\ndef _():\n    with socket.create_connection(("127.0.0.1", 7777), timeout=3):\n        return "met"\n',
    )

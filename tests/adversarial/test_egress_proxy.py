"""A sandbox with a network of allowed hosts: programs reach those through the proxy, and nothing else by any trick.

Each test is a program in a real sandbox; the hosts are servers of the test on this machine, and names resolve as a table says.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from agent_program.tool_events import ToolOutcome
from support.attacks import PRELUDE
from support.tools import Program, descendants_of, tool_actor
from tool_runtime.actor import ToolActor
from tool_runtime.config import EgressSettings, SandboxBackend

pytestmark = [pytest.mark.adversarial, pytest.mark.asyncio(loop_scope="module")]

NAMES = {
    "web.test": ["127.0.0.1"],
    "tls.test": ["127.0.0.1"],
    "rebound.test": ["169.254.169.254"],
    "inside.test": ["10.0.0.1"],
}


async def resolver(host: str) -> list[str]:
    if host not in NAMES:
        raise OSError("no such name")
    return NAMES[host]


class Hosts:
    """An HTTP server and a TLS one, and what they were asked."""

    def __init__(self) -> None:
        self.http_port = 0
        self.tls_port = 0
        self.seen: list[bytes] = []
        self.greeted: list[bytes] = []

    async def http(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            self.seen.append(head)
            if b"POST" in head:
                self.seen.append(await reader.read(1000))
            if b"/endless" in head:
                writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
                while True:
                    writer.write(b"x" * 65536)
                    await writer.drain()
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\nconnection: close\r\n\r\nhello")
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def tls(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            self.greeted.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\nconnection: close\r\n\r\nsecure")
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


def certificate(directory: Path) -> Path:
    """A certificate for tls.test and its key, in one file."""
    path = directory / "tls.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=tls.test"),
            *("-addext", "subjectAltName=DNS:tls.test", "-keyout", str(path), "-out", str(directory / "cert.pem")),
        ],
        check=True,
        capture_output=True,
    )
    path.write_text(path.read_text() + (directory / "cert.pem").read_text())
    return path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def hosts(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Hosts]:
    found = Hosts()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate(tmp_path_factory.mktemp("tls")))
    http = await asyncio.start_server(found.http, "127.0.0.1", 0)
    tls = await asyncio.start_server(found.tls, "127.0.0.1", 0, ssl=context)
    found.http_port, found.tls_port = (one.sockets[0].getsockname()[1] for one in (http, tls))
    async with http, tls:
        yield found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def networked(hosts: Hosts) -> AsyncIterator[ToolActor]:
    listed = [f"{name}:{port}" for name in NAMES for port in (hosts.http_port, hosts.tls_port)]
    egress = EgressSettings(
        allow_hosts=tuple(listed), allow_addresses=("127.0.0.1/32",), connections_max=4, connection_bytes_max=2**20
    )
    async with tool_actor(sandbox=SandboxBackend.BUBBLEWRAP, egress=egress) as actor:
        actor._dialer._resolver = resolver
        yield actor


@pytest.fixture
def program(networked: ToolActor) -> Program:
    return Program(networked)


def ask(lines: str, *, more: str = "b''") -> str:
    """Send a head to the proxy and print the answer."""
    return (
        PRELUDE
        + f"""
with socket.create_connection(("127.0.0.1", 3128), timeout=20) as proxy:
    proxy.sendall({lines!r}.replace("\\n", "\\r\\n").encode() + b"\\r\\n\\r\\n")
    proxy.sendall({more})
    answer = b""
    try:
        while piece := proxy.recv(65536):
            answer += piece
    except OSError:
        pass
print(answer.decode("latin-1")[:2000])
"""
    )


async def test_ordinary_programs_reach_allowed_hosts_without_being_told_how(program: Program, hosts: Hosts) -> None:
    code = (
        f"import urllib.request\nprint(urllib.request.urlopen('http://web.test:{hosts.http_port}/x').read().decode())"
    )
    assert (await program.python(code)).output == "hello"
    assert hosts.seen[-1].startswith(b"GET /x HTTP/1.1\r\nHost: web.test:")


async def test_tls_goes_through_end_to_end(program: Program, hosts: Hosts) -> None:
    code = f"""
import ssl, urllib.request
context = ssl._create_unverified_context()
print(urllib.request.urlopen('https://tls.test:{hosts.tls_port}/y', context=context).read().decode())
"""
    assert (await program.python(code)).output == "secure"
    assert hosts.greeted[-1].startswith(b"GET /y ")


async def test_there_is_still_no_network_but_the_proxy(program: Program, hosts: Hosts) -> None:
    printed = await program.python(
        PRELUDE
        + f"""
@attack
def _():
    with socket.create_connection(("127.0.0.1", {hosts.http_port}), timeout=3):
        return "direct"
@attack
def _():
    return [name for _, name in socket.if_nameindex() if name != "lo"]
@attack
def _():
    return socket.gethostbyname("web.test")
"""
    )
    assert "OPEN" not in printed.output
    assert printed.output.count("held") == 3


REFUSED = {
    "a host that is not listed": ("GET http://evil.test/ HTTP/1.1\nhost: evil.test", "403"),
    "another port of a listed host": ("GET http://web.test:6379/ HTTP/1.1\nhost: web.test", "403"),
    "a name that resolves to the metadata service": ("GET http://rebound.test:{http}/ HTTP/1.1\nhost: x", "403"),
    "a name that resolves to a private network": ("GET http://inside.test:{http}/ HTTP/1.1\nhost: x", "403"),
    "an address": ("GET http://127.0.0.1:{http}/ HTTP/1.1\nhost: web.test", "403"),
    "an address in another spelling": ("GET http://2130706433:{http}/ HTTP/1.1\nhost: web.test", "403"),
    "another scheme": ("GET ftp://web.test:{http}/ HTTP/1.1\nhost: web.test", "400"),
    "no address": ("GET / HTTP/1.1\nhost: web.test", "400"),
    "a user in the address": ("GET http://web.test@rebound.test:{http}/ HTTP/1.1\nhost: web.test", "400"),
    "a tunnel to a host that is not listed": ("CONNECT evil.test:443 HTTP/1.1\nhost: web.test", "403"),
    "a tunnel to another port": ("CONNECT tls.test:22 HTTP/1.1\nhost: tls.test", "403"),
    "a tunnel to an address": ("CONNECT 169.254.169.254:80 HTTP/1.1\nhost: web.test", "403"),
    "a tunnel to a private name": ("CONNECT inside.test:{tls} HTTP/1.1\nhost: web.test", "403"),
    "a tunnel to nowhere": ("CONNECT web.test HTTP/1.1\nhost: web.test", "400"),
    "a chunked body": ("POST http://web.test:{http}/ HTTP/1.1\nhost: web.test\ntransfer-encoding: chunked", "400"),
    "two lengths": ("POST http://web.test:{http}/ HTTP/1.1\nhost: x\ncontent-length: 5\ncontent-length: 6", "400"),
    "a header that is none": ("GET http://web.test:{http}/ HTTP/1.1\nhost: x\n folded: y", "400"),
    "nonsense": ("hello", "400"),
}


@pytest.mark.parametrize(("head", "status"), REFUSED.values(), ids=REFUSED)
async def test_the_proxy_refuses(program: Program, hosts: Hosts, head: str, status: str) -> None:
    before = len(hosts.seen)
    head = head.replace("{http}", str(hosts.http_port)).replace("{tls}", str(hosts.tls_port))
    result = await program.python(ask(head))
    assert result.output.startswith(f"HTTP/1.1 {status} "), result.output
    assert len(hosts.seen) == before


async def test_the_host_that_was_checked_is_the_host_that_is_asked(program: Program, hosts: Hosts) -> None:
    """A Host header that names another site behind the same address is replaced; a second request is not passed on."""
    head = f"GET http://web.test:{hosts.http_port}/a HTTP/1.1\nhost: hidden.test\nproxy-authorization: secret"
    second = f"b'GET http://web.test:{hosts.http_port}/b HTTP/1.1\\r\\nhost: hidden.test\\r\\n\\r\\n'"
    before = len(hosts.seen)
    assert "hello" in (await program.python(ask(head, more=second))).output
    assert len(hosts.seen) == before + 1
    assert b"hidden.test" not in hosts.seen[-1]
    assert b"secret" not in hosts.seen[-1]
    assert hosts.seen[-1].count(b"Host:") == 1


async def test_a_body_is_passed_on_to_its_length_and_no_further(program: Program, hosts: Hosts) -> None:
    head = f"POST http://web.test:{hosts.http_port}/p HTTP/1.1\nhost: x\ncontent-length: 4"
    await program.python(ask(head, more="b'bodyGET /smuggled HTTP/1.1\\r\\n\\r\\n'"))
    assert hosts.seen[-1] == b"body"


GREETINGS = {
    "no tls": "b'GET / HTTP/1.1\\r\\nhost: tls.test\\r\\n\\r\\n'",
    "tls for another host": "greeting('hidden.test')",
    "tls without a host": "greeting(None)",
    "ssh": "b'SSH-2.0-x\\r\\n' + bytes(200)",
    "zeros": "bytes(100000)",
}


@pytest.mark.parametrize("greeting", GREETINGS.values(), ids=GREETINGS)
async def test_a_tunnel_carries_tls_for_its_own_host_and_nothing_else(
    program: Program, hosts: Hosts, greeting: str
) -> None:
    before = len(hosts.greeted)
    maker = """
import ssl
def greeting(host):
    context = ssl.create_default_context()
    context.check_hostname = host is not None
    out = ssl.MemoryBIO()
    try:
        context.wrap_bio(ssl.MemoryBIO(), out, server_hostname=host).do_handshake()
    except ssl.SSLWantReadError:
        return out.read()
"""
    result = await program.python(maker + ask(f"CONNECT tls.test:{hosts.tls_port} HTTP/1.1\nhost: x", more=greeting))
    assert result.output.strip() == "HTTP/1.1 200 Connection established"
    assert len(hosts.greeted) == before


async def test_what_one_connection_carries_is_bounded(program: Program, hosts: Hosts) -> None:
    head = f"GET http://web.test:{hosts.http_port}/endless HTTP/1.1\nhost: x"
    code = ask(head).replace("print(answer", "print(len(answer)); print(''")
    carried = int((await program.python(code)).output.split()[0])
    assert 500_000 < carried <= 2**20


async def test_a_flood_of_connections_is_held_to_its_number(program: Program) -> None:
    result = await program.python(
        PRELUDE
        + """
held = [socket.create_connection(("127.0.0.1", 3128), timeout=20) for _ in range(20)]
answers = 0
for connection in held:
    connection.settimeout(1)
    try:
        answers += b"503" in connection.recv(100)
    except OSError:
        pass
answers
"""
    )
    assert int(result.output) >= 12
    other = Program(program.actor)
    assert (await other.python("import socket; socket.create_connection(('127.0.0.1', 3128)); 1")).output == "1"


async def test_a_head_without_end_is_cut_off(program: Program) -> None:
    result = await program.python(
        PRELUDE
        + """
with socket.create_connection(("127.0.0.1", 3128), timeout=30) as proxy:
    sent = 0
    try:
        while sent < 2**24:
            sent += proxy.send(b"GET http://web.test/ HTTP/1.1\\r\\n" + b"a: b\\r\\n" * 1000)
    except OSError:
        pass
print("cut" if sent < 2**24 else "took it all")
"""
    )
    assert result.output == "cut"


async def test_a_neighbours_proxy_is_out_of_reach_and_ends_with_its_sandbox(program: Program) -> None:
    other = Program(program.actor)
    await other.shell("true")
    await program.shell("true")
    before = len(os.listdir("/proc/self/fd"))
    await program.actor.release(other.id, delete_workspace=True)
    assert len(os.listdir("/proc/self/fd")) < before
    assert (await program.python("import socket; socket.create_connection(('127.0.0.1', 3128)); 1")).output == "1"


async def test_the_proxy_is_still_there_after_sleep(hosts: Hosts) -> None:
    egress = EgressSettings(allow_hosts=(f"web.test:{hosts.http_port}",), allow_addresses=("127.0.0.1/32",))
    before = descendants_of(os.getpid())
    async with tool_actor(sandbox=SandboxBackend.BUBBLEWRAP, egress=egress, idle_sandbox_sleep_s=0.05) as actor:
        actor._dialer._resolver = resolver
        program = Program(actor)
        await program.shell("true")
        await asyncio.sleep(0.5)
        fetch = (
            f"python3 -c \"import urllib.request as u; print(u.urlopen('http://web.test:{hosts.http_port}/').read())\""
        )
        assert (await program.shell(fetch)).output == "b'hello'"
    assert descendants_of(os.getpid()) - before == set()


async def test_http_fetch_passes_the_same_gates(program: Program, hosts: Hosts) -> None:
    fetched = await program.run("http_fetch", {"url": f"http://web.test:{hosts.http_port}/z"})
    assert fetched.outcome is ToolOutcome.OK
    refused = await program.run("http_fetch", {"url": f"http://rebound.test:{hosts.http_port}/z"})
    assert refused.outcome is ToolOutcome.ERROR
    assert "must not be reached" in refused.output


async def test_without_rules_there_is_no_proxy_and_fetching_says_so() -> None:
    async with tool_actor(sandbox=SandboxBackend.BUBBLEWRAP) as actor:
        program = Program(actor)
        assert (
            "refused" in (await program.python("import socket; socket.create_connection(('127.0.0.1', 3128))")).output
        )
        assert (await program.shell("env | grep -ci proxy")).output.startswith("0")
        fetched = await program.run("http_fetch", {"url": "http://web.test/"})
        assert "not on the operator's list" in fetched.output

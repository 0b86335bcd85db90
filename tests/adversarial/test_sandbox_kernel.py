"""Attacks through the kernel: other processes, namespaces, mounts, keys, terminals, and calls few have heard of."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.attacks import assert_held, outcome_of
from support.tools import Program
from support.waiting import wait_for

pytestmark = [pytest.mark.adversarial, pytest.mark.asyncio(loop_scope="module")]

#: name, number on x86-64, number on aarch64, arguments. Each would do something if it were allowed.
CALLS = [
    ("ptrace a child", 101, 117, "0, 0, 0, 0"),
    ("process_vm_readv", 310, 270, "os.getppid(), None, 0, None, 0, 0"),
    ("process_vm_writev", 311, 271, "os.getppid(), None, 0, None, 0, 0"),
    ("pidfd_getfd", 438, 438, "os.pidfd_open(os.getppid()), 0, 0"),
    ("kcmp", 312, 272, "os.getpid(), os.getpid(), 0, 0, 0"),
    ("unshare a user namespace", 272, 97, "0x10000000"),
    ("unshare a mount namespace", 272, 97, "0x20000"),
    ("unshare a network namespace", 272, 97, "0x40000000"),
    ("setns", 308, 268, "os.open('/proc/1/ns/user', os.O_RDONLY) if os.access('/proc/1/ns/user', 4) else -1, 0"),
    ("clone into a user namespace", 56, 220, "0x10000011, 0, 0, 0, 0"),
    (
        "clone3",
        435,
        435,
        "ctypes.create_string_buffer(struct.pack('=11Q', 0x10000000, 0, 0, 0, 17, 0, 0, 0, 0, 0, 0)), 88",
    ),
    ("mount", 165, 40, "b'none', b'/tmp', b'tmpfs', 0, None"),
    ("remount writable", 165, 40, "None, b'/usr', None, 0x20 | 0x1000, None"),
    ("bind mount", 165, 40, "b'/workspace', b'/tmp', None, 0x1000, None"),
    ("umount", 166, 39, "b'/proc/sys', 2"),
    ("pivot_root", 155, 41, "b'/tmp', b'/tmp'"),
    ("chroot", 161, 51, "b'/workspace'"),
    ("open_tree", 428, 428, "-100, b'/', 1"),
    ("fsopen", 430, 430, "b'tmpfs', 0"),
    ("move_mount", 429, 429, "-100, b'/tmp', -100, b'/usr', 0"),
    ("mount_setattr", 442, 442, "-100, b'/', 0, ctypes.create_string_buffer(32), 32"),
    ("keyctl", 250, 219, "0, -3, 1"),
    ("add_key", 248, 217, "b'user', b'planted', b'x', 1, -4"),
    ("request_key", 249, 218, "b'user', b'planted', None, -4"),
    ("bpf", 321, 280, "0, ctypes.create_string_buffer(72), 72"),
    ("perf_event_open", 298, 241, "ctypes.create_string_buffer(struct.pack('=II', 1, 112) + bytes(104)), 0, -1, -1, 0"),
    ("userfaultfd", 323, 282, "0"),
    ("open_by_handle_at", 304, 265, "-100, ctypes.create_string_buffer(24), 0"),
    (
        "name_to_handle_at",
        303,
        264,
        "-100, b'/usr', ctypes.create_string_buffer(140), ctypes.create_string_buffer(4), 0",
    ),
    ("fanotify_init", 300, 262, "0, 0"),
    ("personality without randomisation", 135, 92, "0x0040000"),
    ("quotactl", 179, 60, "0x80000100, b'/', 0, ctypes.create_string_buffer(100)"),
    ("acct", 163, 89, "b'/workspace/acct'"),
    ("syslog", 103, 116, "3, ctypes.create_string_buffer(100), 100"),
    ("reboot", 169, 142, "0xfee1dead, 672274793, 0"),
    ("swapon", 167, 224, "b'/workspace/swap', 0"),
    ("init_module", 175, 105, "b'x', 1, b''"),
    ("finit_module", 313, 273, "0, b'', 0"),
    ("kexec_load", 246, 104, "0, 0, None, 0"),
    ("settimeofday", 164, 170, "ctypes.create_string_buffer(16), None"),
    ("clock_settime", 227, 112, "0, ctypes.create_string_buffer(16)"),
    ("sethostname", 170, 161, "b'planted', 7"),
    ("memfd_secret", 447, 447, "0"),
    ("io_uring_setup", 425, 425, "8, ctypes.create_string_buffer(120)"),
]


@pytest.mark.parametrize(("x86", "arm", "arguments"), [case[1:] for case in CALLS], ids=[case[0] for case in CALLS])
async def test_the_kernel_says_no(standing_program: Program, x86: int, arm: int, arguments: str) -> None:
    printed = await assert_held(
        standing_program,
        f"@attack\ndef _():\n    value = syscall({x86}, {arm}, {arguments})\n"
        "    os._exit(0) if value == 0 and os.getppid() == os.getpid() else None\n    return f'answered {value}'\n",
    )
    assert any(refusal in printed for refusal in ("EPERM", "ENOSYS", "EACCES")), printed


@pytest.fixture
def victim() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def shared_memory() -> Iterator[str]:
    """A segment that everybody may attach, by its number."""
    made = subprocess.run(["ipcmk", "-M", "4096", "-p", "0666"], capture_output=True, text=True, check=True)
    number = made.stdout.split(":")[1].strip()
    yield number
    subprocess.run(["ipcrm", "-m", number], check=True)


@pytest.fixture
def object_store() -> Iterator[Path]:
    """A file in /dev/shm that everybody may read, as a careless object store has one."""
    path = Path(f"/dev/shm/ct-plasma-{os.getpid()}")
    path.write_text("objects")
    path.chmod(0o666)
    yield path
    path.unlink()


async def test_processes_of_the_host_can_be_neither_seen_nor_signalled(
    program: Program, victim: subprocess.Popen[bytes]
) -> None:
    await assert_held(
        program,
        f"""
@attack
def _():
    os.kill({victim.pid}, 9)
    return "killed"
@attack
def _():
    return os.listdir("/proc/{victim.pid}/fd")
@attack
def _():
    # Everything that is visible is its own.
    return [pid for pid in os.listdir("/proc") if pid.isdigit() and int(pid) > 5000]
""",
    )
    assert victim.poll() is None


async def test_killing_everything_kills_itself_only(program: Program, neighbour: Program) -> None:
    await neighbour.shell("A=1")
    await program.shell("kill -9 1; kill -9 -1")
    assert (await program.shell("echo alive")).output.splitlines()[0] == "alive"
    assert (await neighbour.shell("echo $A")).output == "1"


@pytest.mark.parametrize("command", ["0x5412", "0x5412 | 0x7fffffff00000000", "0x541C", "0x541C | (1 << 63)"])
async def test_nothing_can_be_typed_into_a_terminal(standing_program: Program, command: str) -> None:
    """TIOCSTI and TIOCLINUX, also on a terminal of its own, where the kernel alone would allow it."""
    await assert_held(
        standing_program,
        f"""
import pty
@attack
def _():
    ours, theirs = pty.openpty()
    syscall(16, 29, theirs, ctypes.c_ulong({command}), ctypes.create_string_buffer(b"x"))
    return "typed"
""",
    )


async def test_terminals_work_otherwise(program: Program) -> None:
    result = await program.python("import pty; pty.spawn(['/bin/echo', 'hello'])")
    assert "hello" in result.output


@pytest.mark.skipif(platform.machine() != "x86_64", reason="there are no 32-bit entries to try")
async def test_32_bit_entries_do_not_slip_past_the_filter(program: Program) -> None:
    printed = await outcome_of(
        program,
        r"""
import mmap
def entry(code):
    # In a child: the filter kills for it.
    child = os.fork()
    if child == 0:
        page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        page.write(code)
        function = ctypes.CFUNCTYPE(ctypes.c_long)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
        value = function()
        os._exit(42 if value > 0 else 43)
    status = os.waitpid(child, 0)[1]
    return f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit {os.WEXITSTATUS(status)}"
# int 0x80 with eax = 20, getpid of i386.
print("int80:", entry(b"\xb8\x14\x00\x00\x00\xcd\x80\xc3"))
# syscall with eax = 0x40000027, getpid of x32.
print("x32:", entry(b"\xb8\x27\x00\x00\x40\x0f\x05\x48\x98\xc3"))
# syscall with eax = 39, getpid: the attack itself works.
print("native:", entry(b"\xb8\x27\x00\x00\x00\x0f\x05\x48\x98\xc3"))
""",
    )
    assert "int80: signal 31" in printed  # SIGSYS
    assert "x32: exit 43" in printed
    assert "native: exit 42" in printed


async def test_code_from_memory_is_as_confined_as_any(program: Program) -> None:
    result = await program.python(
        r"""
import os, shutil
fd = os.memfd_create("code")
with open("/usr/bin/cat", "rb") as source:
    shutil.copyfileobj(source, os.fdopen(fd, "wb", closefd=False))
os.spawnv(os.P_WAIT, f"/proc/self/fd/{fd}", ["cat", "/etc/shadow"])
"""
    )
    assert any(refusal in result.output for refusal in ("No such file", "Permission denied"))
    assert "root:" not in result.output


STRANGE_DESCRIPTORS = """
import os, stat
kinds = {}
for fd in range(4096):
    try:
        mode = os.fstat(fd).st_mode
    except OSError:
        continue
    if not stat.S_ISFIFO(mode) and not stat.S_ISCHR(mode):
        kinds[fd] = stat.filemode(mode)
print("strange:", kinds)
"""


async def test_no_descriptor_of_the_host_is_inherited(program: Program) -> None:
    """Pipes and null devices are all that the kept sessions and their children have; the agent's socket is not among them."""
    await program.run("write_file", {"path": "look.py", "content": STRANGE_DESCRIPTORS})
    assert (await program.shell("python3 look.py 3<&-")).output == "strange: {}"
    assert (await program.shell("exec python3 look.py")).output.splitlines()[0] == "strange: {}"
    assert (await program.python(STRANGE_DESCRIPTORS)).output == "strange: {}"


async def test_shared_memory_and_queues_of_the_host_are_not_there(
    program: Program, shared_memory: str, object_store: Path
) -> None:
    await assert_held(
        program,
        f"""
@attack
def _():
    return syscall(30, 196, {shared_memory}, None, 0)
@attack
def _():
    with open({str(object_store)!r}) as segment:
        return segment.read()
@attack
def _():
    return os.listdir("/dev/shm")
@attack
def _():
    return os.listdir("/dev/mqueue")
""",
    )


async def test_devices_are_few_and_none_can_be_made(program: Program) -> None:
    printed = await outcome_of(
        program,
        """
import stat
allowed = {"null", "zero", "full", "random", "urandom", "tty", "ptmx"}
@attack
def _():
    return [name for name in os.listdir("/dev") if stat.S_ISCHR(os.stat(f"/dev/{name}").st_mode) and name not in allowed]
@attack
def _():
    return [name for name in os.listdir("/dev") if stat.S_ISBLK(os.stat(f"/dev/{name}").st_mode)]
@attack
def _():
    os.mknod("disk", 0o600 | stat.S_IFBLK, os.makedev(254, 0))
    return "made"
@attack
def _():
    os.mknod("/tmp/mem", 0o600 | stat.S_IFCHR, os.makedev(1, 1))
    return "made"
""",
    )
    assert "OPEN" not in printed
    assert printed.count("held") == 4


async def test_limits_and_priorities_of_host_processes_are_out_of_reach(program: Program) -> None:
    await assert_held(
        program,
        f"""
import resource
@attack
def _():
    return resource.prlimit({os.getpid()}, resource.RLIMIT_NOFILE)
@attack
def _():
    os.sched_setaffinity({os.getpid()}, {{0}})
    return "pinned"
@attack
def _():
    os.setpriority(os.PRIO_PROCESS, {os.getpid()}, 19)
    return "slowed"
@attack
def _():
    os.setpriority(os.PRIO_PROCESS, 0, -5)
    return "raised its own"
@attack
def _():
    resource.setrlimit(resource.RLIMIT_NPROC, (100000, 100000))
    return "raised its own"
@attack
def _():
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    return "real time"
""",
    )


async def test_it_is_not_root_in_any_sense(program: Program) -> None:
    printed = await outcome_of(
        program,
        """
PR_GET_SECCOMP, PR_CAPBSET_READ, PR_GET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 21, 23, 39, 47
print("ids", 0 in (os.getuid(), os.geteuid(), os.getgid(), os.getegid(), *os.getgroups()))
print("no new privileges", _libc.prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0))
print("filter", _libc.prctl(PR_GET_SECCOMP, 0, 0, 0, 0))
header, data = ctypes.create_string_buffer(struct.pack("=Ii", 0x20080522, 0)), ctypes.create_string_buffer(24)
syscall(125, 90, header, data)
print("capabilities", struct.unpack("=6I", data.raw))
@attack
def _():
    os.setuid(0)
    return "root"
@attack
def _():
    os.setgroups([0])
    return "root's group"
""",
    )
    lines = printed.splitlines()
    assert lines[:3] == ["ids False", "no new privileges 1", "filter 2"]
    effective, permitted = lines[3].split("(")[1].rstrip(")").split(", ")[0:2]
    assert (effective, permitted) == ("0", "0")
    assert "OPEN" not in printed


async def test_the_user_outside_is_not_root_either(program: Program) -> None:
    """kuid 0 could write /proc/sys/kernel/core_pattern from inside any namespace, and run code outside with it."""
    mark = f"sleep 98.{os.getpid()}"
    await program.shell(f"{mark} &")
    pids = wait_for(
        lambda: [pid for pid in os.listdir("/proc") if pid.isdigit() and command_of(pid) == mark], what="the sleeper"
    )
    owners = {os.stat(f"/proc/{pid}").st_uid for pid in pids}
    assert 0 not in owners
    if os.geteuid() == 0:
        assert all(owner >= 200_000 for owner in owners)


def command_of(pid: str) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as command:
            return command.read().replace(b"\0", b" ").decode("utf-8", "replace").strip()
    except OSError:
        return ""

"""The system-call filter of a sandbox, as the BPF program that the kernel takes. Pure: no libseccomp, no compiler.

Namespaces leave open what seccomp closes here: AF_VSOCK, kernel keyrings, io_uring (which would also get around a filter on
`socket`), userfaultfd, nested user namespaces, TIOCSTI, and system calls that were never made for namespaces. It is a deny
list, because tools are arbitrary programs; what it denies fails with EPERM so that programs fall back.

    wrong architecture            → the process is killed (32-bit and x32 entry would slip past the numbers below)
    clone3                        → ENOSYS: its flags lie in memory, where a filter cannot look; the C library falls back to clone
    clone with a namespace flag   → EPERM
    ioctl TIOCSTI, TIOCLINUX      → EPERM, compared on the low 32 bits as the kernel does
    socket of other families      → EPERM; socketpair stays, and with it everything that programs do among themselves
    everything in `denied`        → EPERM

Numbers are those of Linux's `unistd_64.h` (x86-64) and `asm-generic/unistd.h` (aarch64).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum

_EPERM, _ENOSYS = 1, 38
_RET_KILL_PROCESS, _RET_ALLOW, _RET_ERRNO = 0x80000000, 0x7FFF0000, 0x00050000
_X32_BIT = 0x40000000
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C

#: CLONE_NEW{TIME,NS,CGROUP,UTS,IPC,USER,PID,NET}. NEWTIME shares its bit with a signal number of `clone`, where it means
#: nothing; `unshare` and `clone3`, where it means a time namespace, are denied altogether.
_NAMESPACE_FLAGS = 0x7E020000


class Family(IntEnum):
    """Address families that a sandbox without network still needs: the C library opens them to look around."""

    INET = 2
    INET6 = 10
    NETLINK = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """What differs between processors."""

    #: AUDIT_ARCH_* of `linux/audit.h`.
    audit: int
    clone: int
    clone3: int
    ioctl: int
    socket: int
    denied: tuple[int, ...]
    #: Calls on shared memory, semaphores and queues of System V and POSIX, which only an IPC namespace keeps apart.
    shared: tuple[int, ...]
    #: Call that acts on a process by its number → which argument has the number; 0 is the caller itself.
    on_process: Mapping[int, int]
    has_x32: bool = False


#: Same numbers everywhere: they were added after the tables were unified.
_DENIED_COMMON = (
    *range(425, 434),  # io_uring_{setup,enter,register}, open_tree, move_mount, fsopen, fsconfig, fsmount, fspick
    438,  # pidfd_getfd
    440,  # process_madvise
    442,  # mount_setattr
    443,  # quotactl_fd
    447,  # memfd_secret
    467,  # open_tree_attr
)

_X86_64 = Architecture(
    audit=0xC000003E,
    clone=56,
    clone3=435,
    ioctl=16,
    socket=41,
    has_x32=True,
    denied=(
        *(165, 166, 155, 161),  # mount, umount2, pivot_root, chroot
        *(272, 308),  # unshare, setns
        *(101, 310, 311, 312),  # ptrace, process_vm_readv, process_vm_writev, kcmp
        *(321, 298, 323),  # bpf, perf_event_open, userfaultfd
        *(250, 248, 249),  # keyctl, add_key, request_key
        *(135,),  # personality
        *(304, 303, 300, 301),  # open_by_handle_at, name_to_handle_at, fanotify_init, fanotify_mark
        *(179, 163, 103, 169),  # quotactl, acct, syslog, reboot
        *(246, 320, 175, 313, 176),  # kexec_load, kexec_file_load, init_module, finit_module, delete_module
        *(167, 168),  # swapon, swapoff
        *(164, 227, 159, 305),  # settimeofday, clock_settime, adjtimex, clock_adjtime
        *(170, 171, 172, 173, 153),  # sethostname, setdomainname, iopl, ioperm, vhangup
        *(212, 180, 134, 139, 156),  # lookup_dcookie, nfsservctl, uselib, sysfs, _sysctl
        *(256, 279, 237, 238),  # migrate_pages, move_pages, mbind, set_mempolicy
        *_DENIED_COMMON,
    ),
    shared=(
        *(29, 30, 31, 67),  # shmget, shmat, shmctl, shmdt
        *(64, 65, 66, 220),  # semget, semop, semctl, semtimedop
        *(68, 69, 70, 71),  # msgget, msgsnd, msgrcv, msgctl
        *(240, 241),  # mq_open, mq_unlink
    ),
    # prlimit64, sched_setparam, sched_setscheduler, sched_setaffinity, sched_setattr, setpriority, ioprio_set
    on_process={302: 0, 142: 0, 144: 0, 203: 0, 314: 0, 141: 1, 251: 1},
)

_AARCH64 = Architecture(
    audit=0xC00000B7,
    clone=220,
    clone3=435,
    ioctl=29,
    socket=198,
    denied=(
        *(40, 39, 41, 51),  # mount, umount2, pivot_root, chroot
        *(97, 268),  # unshare, setns
        *(117, 270, 271, 272),  # ptrace, process_vm_readv, process_vm_writev, kcmp
        *(280, 241, 282),  # bpf, perf_event_open, userfaultfd
        *(219, 217, 218),  # keyctl, add_key, request_key
        *(92,),  # personality
        *(265, 264, 262, 263),  # open_by_handle_at, name_to_handle_at, fanotify_init, fanotify_mark
        *(60, 89, 116, 142),  # quotactl, acct, syslog, reboot
        *(104, 294, 105, 273, 106),  # kexec_load, kexec_file_load, init_module, finit_module, delete_module
        *(224, 225),  # swapon, swapoff
        *(170, 112, 171, 266),  # settimeofday, clock_settime, adjtimex, clock_adjtime
        *(161, 162, 58),  # sethostname, setdomainname, vhangup
        *(18, 42),  # lookup_dcookie, nfsservctl
        *(238, 239, 235, 237),  # migrate_pages, move_pages, mbind, set_mempolicy
        *_DENIED_COMMON,
    ),
    shared=(
        *(194, 196, 195, 197),  # shmget, shmat, shmctl, shmdt
        *(190, 193, 191, 192),  # semget, semop, semctl, semtimedop
        *(186, 189, 188, 187),  # msgget, msgsnd, msgrcv, msgctl
        *(180, 181),  # mq_open, mq_unlink
    ),
    # prlimit64, sched_setparam, sched_setscheduler, sched_setaffinity, sched_setattr, setpriority, ioprio_set
    on_process={261: 0, 118: 0, 119: 0, 122: 0, 274: 0, 140: 1, 30: 1},
)

_ARCHITECTURES = {"x86_64": _X86_64, "aarch64": _AARCH64, "arm64": _AARCH64}


class UnsupportedArchitecture(Exception):
    """There is no filter for this processor, so there is no sandbox on it."""


def architecture(machine: str) -> Architecture:
    """The table for `platform.machine()`.

    Raises:
        UnsupportedArchitecture: no table is known for it.
    """
    try:
        return _ARCHITECTURES[machine]
    except KeyError:
        raise UnsupportedArchitecture(f"no system-call filter is known for {machine!r}") from None


def filter_program(
    arch: Architecture, families: tuple[int, ...] = tuple(Family), *, guards_other_processes: bool = False
) -> bytes:
    """The program for one architecture, letting `socket` open `families` only.

    `guards_other_processes` is for sandboxes without namespaces of their own: calls that act on a process by its number are
    left to act on the caller alone, and shared memory and queues are refused.
    """
    code = _Assembler()
    code.load(_OFFSET_ARCH)
    code.if_not_equal_return(arch.audit, _RET_KILL_PROCESS)
    code.load(_OFFSET_NUMBER)
    if arch.has_x32:
        code.if_at_least_return(_X32_BIT, _RET_ERRNO | _ENOSYS)
    code.if_equal_return(arch.clone3, _RET_ERRNO | _ENOSYS)
    for number in sorted({*arch.denied, *(arch.shared if guards_other_processes else ())}):
        code.if_equal_return(number, _RET_ERRNO | _EPERM)
    code.on_call(arch.clone, lambda: code.if_any_bit_return(_NAMESPACE_FLAGS, _RET_ERRNO | _EPERM), argument=0)
    code.on_call(
        arch.ioctl,
        lambda: code.if_any_equal_return((_TIOCSTI, _TIOCLINUX), _RET_ERRNO | _EPERM),
        argument=1,
    )
    for number, argument in arch.on_process.items() if guards_other_processes else ():
        code.on_call(number, lambda: code.unless_any_return((0,), _RET_ERRNO | _EPERM), argument=argument)
    code.on_call(arch.socket, lambda: code.unless_any_return(families, _RET_ERRNO | _EPERM), argument=0)
    code.ret(_RET_ALLOW)
    return code.program()


# Offsets in `struct seccomp_data`; arguments are 64 bits, of which the low half comes first on both architectures.
_OFFSET_NUMBER, _OFFSET_ARCH, _OFFSET_ARGUMENTS = 0, 4, 16
# Opcodes of `linux/bpf_common.h`.
_LD_ABS, _JEQ, _JGE, _JSET, _RET = 0x20, 0x15, 0x35, 0x45, 0x06


class _Assembler:
    """Straight-line classic BPF. Every jump skips forward over one or a few instructions, so no labels are needed."""

    def __init__(self) -> None:
        self._instructions: list[tuple[int, int, int, int]] = []

    def load(self, offset: int) -> None:
        self._instructions.append((_LD_ABS, 0, 0, offset))

    def ret(self, value: int) -> None:
        self._instructions.append((_RET, 0, 0, value))

    def if_equal_return(self, value: int, result: int) -> None:
        self._instructions.append((_JEQ, 0, 1, value))
        self.ret(result)

    def if_any_equal_return(self, values: tuple[int, ...], result: int) -> None:
        for value in values:
            self.if_equal_return(value, result)

    def if_not_equal_return(self, value: int, result: int) -> None:
        self._instructions.append((_JEQ, 1, 0, value))
        self.ret(result)

    def if_at_least_return(self, value: int, result: int) -> None:
        self._instructions.append((_JGE, 0, 1, value))
        self.ret(result)

    def if_any_bit_return(self, bits: int, result: int) -> None:
        self._instructions.append((_JSET, 0, 1, bits))
        self.ret(result)

    def unless_any_return(self, values: tuple[int, ...], result: int) -> None:
        for index, value in enumerate(values):
            self._instructions.append((_JEQ, len(values) - index, 0, value))
        self.ret(result)

    def on_call(self, number: int, checks: Callable[[], None], *, argument: int) -> None:
        """`checks` on the low half of one argument, for one system call; the number is in the accumulator again after it."""
        at = len(self._instructions)
        self._instructions.append((_JEQ, 0, 0, number))
        self.load(_OFFSET_ARGUMENTS + 8 * argument)
        checks()
        self.load(_OFFSET_NUMBER)
        self._instructions[at] = (_JEQ, 0, len(self._instructions) - at - 1, number)

    def program(self) -> bytes:
        """The instructions as `struct sock_filter[]`."""
        return b"".join(struct.pack("=HBBI", *instruction) for instruction in self._instructions)

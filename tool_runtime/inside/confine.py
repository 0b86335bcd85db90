"""Landlock and seccomp, applied by a process to itself: the agent's walls where the machine grants no namespaces.

Landlock grants files by hierarchy and refuses everything else that it knows of, which grows with its version (ABI): files
from 1, TCP from 4, devices' ioctls from 5, abstract sockets and signals to the outside from 6. What it does not know, the
system-call filter refuses. Neither can be taken off again, and both are inherited.
"""

from __future__ import annotations

import ctypes
import os
import stat
import struct

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION_FLAG, _PATH_BENEATH = 1, 1
_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, _PR_SET_NO_NEW_PRIVS = 22, 2, 38

# Rights of `linux/landlock.h`, by bit.
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_TRUNCATE, _IOCTL_DEV = 1 << 14, 1 << 15
_FILE_RIGHTS = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV
#: ABI → all rights on files that it knows.
_FS_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1, 5: (1 << 16) - 1}
_NET_RIGHTS, _SCOPES = 0b11, 0b11

#: What a rule may grant: reading and running, writing to what is there (devices), or everything.
GRANTS = {"read": _EXECUTE | _READ_FILE | _READ_DIR, "device": _READ_FILE | _WRITE_FILE, "all": (1 << 16) - 1}


class CannotConfine(Exception):
    """This kernel cannot keep the process in."""


def landlock_abi() -> int:
    """The kernel's Landlock version; 0 without it."""
    return max(0, _syscall(_CREATE_RULESET, None, 0, _VERSION_FLAG))


def confine(rules_fd: int, filter_fd: int) -> None:
    """Restrict this process and all that it starts, for ever.

    `rules_fd` holds lines `grant path`, where paths that do not exist are passed over, and first the least ABI that will do;
    `filter_fd` the BPF program. Both are closed.

    Raises:
        CannotConfine: something cannot be applied; the process must not go on.
    """
    first, *rules = _content(rules_fd).decode("utf-8", "surrogateescape").splitlines()
    abi = landlock_abi()
    if abi < int(first):
        raise CannotConfine(f"this kernel has Landlock version {abi}, and {first} is needed")
    program = _content(filter_fd)
    _check(_libc().prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    ruleset = _ruleset(abi)
    for rule in rules:
        grant, path = rule.split(" ", 1)
        _grant(ruleset, abi, GRANTS[grant], path)
    _check(_syscall(_RESTRICT_SELF, ruleset, 0), "landlock_restrict_self")
    os.close(ruleset)
    _install_filter(program)


def _ruleset(abi: int) -> int:
    known = _FS_RIGHTS[min(abi, 5)]
    attributes = struct.pack("=QQQ", known, _NET_RIGHTS, _SCOPES)[: 8 if abi < 4 else 16 if abi < 6 else 24]
    return _check(_syscall(_CREATE_RULESET, attributes, len(attributes), 0), "landlock_create_ruleset")


def _grant(ruleset: int, abi: int, rights: int, path: str) -> None:
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    rights &= _FS_RIGHTS[min(abi, 5)]
    if not stat.S_ISDIR(os.fstat(fd).st_mode):
        rights &= _FILE_RIGHTS
    rule = struct.pack("=Qi", rights, fd)
    _check(_syscall(_ADD_RULE, ruleset, _PATH_BENEATH, rule, 0), f"landlock_add_rule {path}")
    os.close(fd)


def _install_filter(program: bytes) -> None:
    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]

    filter_program = Program(len(program) // 8, program)
    _check(_libc().prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(filter_program), 0, 0), "seccomp")


def _content(fd: int) -> bytes:
    with os.fdopen(fd, "rb") as source:
        return source.read()


def _syscall(number: int, *arguments: object) -> int:
    return int(_libc().syscall(ctypes.c_long(number), *arguments))


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check(value: int, what: str) -> int:
    if value < 0:
        raise CannotConfine(f"{what}: {os.strerror(ctypes.get_errno())}")
    return value

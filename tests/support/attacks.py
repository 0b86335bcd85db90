"""What attacks on a sandbox are written with.

An attack is a piece of Python that runs inside as the program's own code and prints `OPEN` where it got what it wanted; `held`
where it was refused. The prelude has what most of them need.
"""

from __future__ import annotations

from support.tools import Program

PRELUDE = r'''
import ctypes, errno, os, platform, socket, struct, sys, time
_libc = ctypes.CDLL(None, use_errno=True)
_ARM = platform.machine() == "aarch64"

def syscall(x86, arm, *arguments):
    """A raw system call; raises OSError as os functions do."""
    value = _libc.syscall(ctypes.c_long(arm if _ARM else x86), *arguments)
    if value < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return value

def attack(function):
    """Print how it went."""
    try:
        gain = function()
    except OSError as error:
        print("held", errno.errorcode.get(error.errno, error.errno), error)
    else:
        print(f"OPEN {gain!r}" if gain else "held")
    sys.stdout.flush()
    return function
'''


async def outcome_of(program: Program, attack: str, **call: object) -> str:
    """What the attack printed."""
    result = await program.python(f"{PRELUDE}\n{attack}", **call)
    return result.output


async def assert_held(program: Program, attack: str) -> str:
    """The attack ran, was refused, and the sandbox goes on working."""
    printed = await outcome_of(program, attack)
    assert "OPEN" not in printed, printed
    assert "held" in printed, printed
    assert (await program.shell("echo alive")).output.splitlines()[0] == "alive"
    return printed

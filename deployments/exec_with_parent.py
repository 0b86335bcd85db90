"""Run a program that ends when its parent ends, however the parent ends:

    python exec_with_parent.py PARENT_PID PROGRAM [ARGUMENT ...]

Linux sends the signal set here when the *thread* that forked us exits, so the parent must start us from a thread that lives as
long as it wants the program. Standard library only: this runs as a script, isolated from everything else.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(parent_pid: int, command: list[str]) -> None:
    """Become `command`. Does not return."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    if os.getppid() != parent_pid:
        sys.exit("the parent ended before its child began")
    os.execv(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])

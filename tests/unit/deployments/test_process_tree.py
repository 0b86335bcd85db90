"""Whatever outlives its parent is found and ended. Run in a process of its own, whose descendants are known."""

from __future__ import annotations

import subprocess
import sys

import psutil

#: Starts a child that starts a grandchild and ends, so that the grandchild is an orphan; prints its pid and what was ended.
#: (−3 is subprocess.DEVNULL: the grandchild must not hold the pipe that its grandparent reads.)
ORPHAN = """
import subprocess, sys
from deployments.process_tree import adopt_orphans, end_descendants
adopt_orphans()
start_one = "import subprocess; print(subprocess.Popen(['sleep', '60'], stdout=-3, stderr=-3).pid)"
pid = subprocess.run([sys.executable, "-c", start_one], capture_output=True, text=True, check=True).stdout.strip()
print(pid)
for line in end_descendants(grace_s=0.1):
    print(line)
"""

STUBBORN = """
import signal, subprocess, sys
from deployments.process_tree import end_descendants
ignores = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
child = subprocess.Popen([sys.executable, "-c", ignores], stdout=subprocess.PIPE, text=True)
child.stdout.readline()
print(child.pid)
for line in end_descendants(grace_s=0.1):
    print(line)
"""

OBEDIENT = """
import subprocess
from deployments.process_tree import end_descendants
child = subprocess.Popen(["sleep", "0.2"])
print(child.pid)
for line in end_descendants(grace_s=60):
    print(line)
"""


def run(code: str) -> list[str]:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.splitlines()


def test_an_orphan_is_found_ended_and_reported() -> None:
    pid, *ended = run(ORPHAN)
    assert ended == [f"{pid} sleep 60"]
    assert not psutil.pid_exists(int(pid))


def test_a_process_that_ignores_termination_is_killed() -> None:
    pid, *ended = run(STUBBORN)
    assert len(ended) == 1
    assert not psutil.pid_exists(int(pid))


def test_a_process_that_ends_by_itself_is_left_to_do_so() -> None:
    pid, *ended = run(OBEDIENT)
    assert ended == []
    assert not psutil.pid_exists(int(pid))

"""Tests run again as a user who is not root, on a machine where they run as root.

Root's interpreter may lie below a directory that nobody else may pass. In a mount namespace of the test's own such a directory is
covered by an empty one with only what is needed in it; nothing of the machine is changed.
"""

from __future__ import annotations

import shlex
import shutil
import stat
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: No user of the machine has this number, and no sandbox.
UID = 64_123


def why_not() -> str | None:
    """Why tests cannot be run as a plain user here; None where they can."""
    if shutil.which("unshare") is None or shutil.which("setpriv") is None:
        return "there is no unshare or setpriv (util-linux)"
    tried = subprocess.run(as_plain_user(["true"]), capture_output=True, text=True, check=False, cwd="/")
    return tried.stderr.strip() or f"exit {tried.returncode}" if tried.returncode else None


def as_plain_user(command: list[str]) -> list[str]:
    """A command line that runs `command` in the checkout as a user without any privilege."""
    script = ["set -e"]
    needed = [Path(sys.base_prefix), Path(sys.prefix), ROOT]
    closed = sorted({parent for path in needed for parent in _closed_above(path)})
    for directory in [one for one in closed if not any(other in one.parents for other in closed)]:
        below = [path for path in needed if path.is_relative_to(directory)]
        kept = [path for path in below if not any(other in path.parents for other in below)]
        script += [f"stash{n}=$(mktemp -d) && mount --bind {_q(path)} $stash{n}" for n, path in enumerate(kept)]
        script.append(f"mount -t tmpfs -o mode=755 none {_q(directory)}")
        for n, path in enumerate(kept):
            script.append(
                f"mkdir -p {_q(path)} && mount --bind $stash{n} {_q(path)} && umount $stash{n} && rmdir $stash{n}"
            )
    drop = ["setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups", "--inh-caps=-all", "--bounding-set=-all"]
    script += [f"cd {_q(ROOT)}", "exec " + shlex.join([*drop, *command])]
    return ["unshare", "--mount", "--propagation=private", "sh", "-c", "\n".join(script)]


def _closed_above(path: Path) -> list[Path]:
    return [parent for parent in (path, *path.parents) if not parent.stat().st_mode & stat.S_IXOTH]


def _q(path: Path) -> str:
    return shlex.quote(str(path))

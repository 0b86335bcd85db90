"""Attacks on files: other people's secrets, other programs' workspaces, the system, and whoever cleans up."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_program.ids import DEFAULT_TENANT
from agent_program.tool_events import ToolOutcome
from support.attacks import assert_held, outcome_of
from support.tools import Program
from tool_runtime.actor import ToolActor

pytestmark = [pytest.mark.adversarial, pytest.mark.asyncio(loop_scope="module")]

SECRET = "the-canary-sings"


@pytest.fixture
def secret() -> Iterator[Path]:
    """A file on the host that everybody may read, so that only the sandbox stands before it."""
    with tempfile.TemporaryDirectory(prefix="ct-secret-") as directory:
        Path(directory).chmod(0o755)
        path = Path(directory, "secret")
        path.write_text(SECRET)
        path.chmod(0o644)
        yield path


def is_untouched(secret: Path) -> bool:
    """The file is as it was, and alone."""
    return secret.read_text() == SECRET and [path.name for path in secret.parent.iterdir()] == ["secret"]


def holds(path: Path, text: str) -> bool:
    return path.read_text().strip() == text


def workspace_of(program: Program) -> Path:
    sandboxes = program.actor._sandboxes
    assert sandboxes is not None
    return sandboxes._workspaces.path(DEFAULT_TENANT, program.id)


@pytest.mark.parametrize(
    "path",
    [
        *("/etc/shadow", "/etc/gshadow", "/root/.ssh/id_rsa", "/root/.bash_history", "/home", "/var/run/docker.sock"),
        *(
            "/var/run/secrets/kubernetes.io/serviceaccount/token",
            "/run/secrets",
            "/proc/kcore",
            "/proc/kallsyms",
            "/boot",
        ),
    ],
)
async def test_secrets_of_the_system_cannot_be_read(standing_program: Program, path: str) -> None:
    await assert_held(
        standing_program,
        f"""
@attack
def _():
    path = {path!r}
    if os.path.isdir(path):
        return os.listdir(path)
    with open(path, "rb") as secret:
        content = secret.read(4096)
    # kallsyms may be readable, with every address zero.
    return content.strip(b"0 abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_.[]\\n\\t123456789$") if "kallsyms" in path else content
""",
    )


async def test_a_readable_file_of_the_host_is_not_there(program: Program, secret: Path) -> None:
    assert SECRET not in (await program.shell(f"cat {secret}; cat /proc/self/root{secret}")).output
    assert SECRET not in (await program.run("read_file", {"path": str(secret)})).output


@pytest.mark.parametrize("where", ["/proc/self/environ", "/proc/1/environ", "/proc/2/environ"])
async def test_the_platforms_environment_is_not_in(
    program: Program, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = await program.shell(
        f"tr '\\0' '\\n' < {where} | cut -d= -f1 | sort | tr '\\n' ' '; env | cut -d= -f1 | sort"
    )
    names = set(shown.output.split()) - {"[stderr]"}
    known = {"PATH", "HOME", "USER", "TMPDIR", "LANG", "TERM", "PAGER", "GIT_PAGER", "PWD", "OLDPWD", "SHLVL", "_"}
    assert {name for name in names if name.isupper()} <= known | {"LC_CTYPE"}
    assert not {name for name in os.environ if name not in known} & names


async def test_no_process_that_is_visible_tells_of_the_host_or_of_other_programs(program: Program) -> None:
    shown = (await program.shell("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")).output
    workspace = workspace_of(program)
    for telling in (str(workspace.parent), workspace.name, str(program.id), "ray", str(Path.cwd())):
        assert telling not in shown


@pytest.mark.parametrize(
    "path",
    [
        *(
            "/usr/bin/planted",
            "/usr/bin/python3",
            "/etc/planted",
            "/etc/passwd",
            "/planted",
            "/dev/planted",
            "/dev/shm/../x",
        ),
        *(
            "/proc/sys/kernel/core_pattern",
            "/proc/sys/kernel/modprobe",
            "/proc/sysrq-trigger",
            "/sys/kernel/uevent_helper",
        ),
        *("/.agent/tool_runtime/inside/agent.py", "/.agent/planted", "/proc/1/mem"),
    ],
)
async def test_the_system_cannot_be_written(standing_program: Program, path: str) -> None:
    await assert_held(
        standing_program,
        f"""
@attack
def _():
    fd = os.open({path!r}, os.O_WRONLY | os.O_CREAT, 0o666)
    os.write(fd, b"1")
    return "written"
""",
    )


async def test_a_neighbours_workspace_is_out_of_reach(program: Program, neighbour: Program) -> None:
    await neighbour.shell(f"echo {SECRET} > secret; sleep 1000 &")
    path = workspace_of(neighbour)
    assert holds(path / "secret", SECRET)
    tried = [
        f"cat {path}/secret",
        f"cat /workspace/../{path.name}/secret",
        f"cat /workspace/../workspaces/{path.name}/secret",
        f"cat /proc/*/root{path}/secret",
        "cat /proc/*/cwd/secret",
        f"ls {path.parent}",
    ]
    for command in tried:
        assert SECRET not in (await program.shell(command)).output, command
        assert path.name not in (await program.shell(f"ls {path.parent} 2>/dev/null")).output


@pytest.mark.parametrize("tool", ["read_file", "write_file", "edit_file", "list_files", "search_files"])
async def test_file_tools_follow_no_link_out(program: Program, secret: Path, tool: str) -> None:
    await program.shell(f"ln -s {secret} link; ln -s {secret.parent} dir; ln -s /proc/1/root root")
    arguments = {
        "read_file": {"path": "link"},
        "write_file": {"path": "link", "content": "overwritten"},
        "edit_file": {"path": f"root{secret}", "old_text": SECRET, "new_text": "overwritten"},
        "list_files": {"path": "dir"},
        "search_files": {"path": "dir/", "pattern": "canary"},
    }[tool]
    result = await program.run(tool, arguments)
    assert SECRET not in result.output
    assert "secret " not in result.output
    assert is_untouched(secret)


async def test_racing_a_link_against_a_directory_wins_nothing(program: Program, secret: Path) -> None:
    """A path check on the host would be won some of the time; the tools run inside, where there is nothing to win."""
    started = await program.python(
        f"""{""}
import os, subprocess, sys
os.makedirs("dir", exist_ok=True)
open("dir/secret", "w").write("own")
os.symlink({str(secret.parent)!r}, "link")
racer = '''
import ctypes, os
rename = ctypes.CDLL(None).renameat2
while True:
    rename(-100, b"dir", -100, b"link", 2)
'''
racing = subprocess.Popen([sys.executable, "-c", racer])
racing.pid
"""
    )
    assert started.exit_code == 0
    answers = []
    for _ in range(10):
        answers += await asyncio.gather(
            *(program.run("read_file", {"path": "dir/secret"}) for _ in range(4)),
            program.run("write_file", {"path": "dir/secret", "content": "own"}),
            program.run("list_files", {"path": "dir"}),
        )
    await program.python("racing.kill(); racing.wait()")
    assert not [answer for answer in answers if SECRET in answer.output]
    assert any(answer.output == "own" for answer in answers)
    assert is_untouched(secret)


async def test_a_link_planted_for_the_next_sandbox_start_makes_nothing_on_the_host(
    sandbox_actor: ToolActor, program: Program, secret: Path
) -> None:
    """bubblewrap before 0.12 follows a link below a bind mount while it still sees the host (GHSA-pxhw-h44j-8pfx)."""
    for name in ("evil", "tmp", ".agent", "etc", "dev"):
        await program.shell(f"ln -s /oldroot{secret.parent} {name}; ln -s {secret.parent} {name}2")
    await sandbox_actor.release(program.id, delete_workspace=False)
    assert (await program.shell("ls evil/; ls -d evil")).output.endswith(
        "evil\n[stderr]\nls: cannot access 'evil/': No such file or directory"
    )
    assert is_untouched(secret)


async def test_hostile_files_given_to_the_read_tool_cost_an_error_and_no_more(program: Program) -> None:
    await program.shell("mkfifo fifo; ln -s loop loop; mkdir dir; ln -s /dev/zero zero")
    await program.python("import socket; s = socket.socketpair()[0]")
    for name in ("fifo", "loop", "dir", "zero", "/proc/kmsg", "/dev/tty", "/proc/self/mem", "/dev/stdin"):
        result = await program.run("read_file", {"path": name}, timeout_s=20)
        assert result.outcome is ToolOutcome.ERROR, name
    assert (await program.run("search_files", {"pattern": "x"}, timeout_s=20)).outcome is ToolOutcome.OK


async def test_sockets_hard_links_and_files_of_great_size_given_to_the_file_tools_hang_nothing(
    program: Program, secret: Path
) -> None:
    made = await program.python(
        f"""
import os, socket, stat
try:
    socket.socket(socket.AF_UNIX).bind("socket")
except OSError:
    os.mknod("socket", 0o600 | stat.S_IFSOCK)
open("file", "w").write("own")
os.link("file", "hard")
try:
    os.link({str(secret)!r}, "stolen")
except OSError:
    pass
sparse = os.open("sparse", os.O_CREAT | os.O_WRONLY, 0o600)
for size in (2**40, 100 * 2**20):
    try:
        os.ftruncate(sparse, size)
        break
    except OSError:
        pass
os.stat("sparse").st_size
"""
    )
    assert int(made.output.splitlines()[-1]) <= 100 * 2**20, "a file is bounded, holes included"
    assert (await program.run("read_file", {"path": "socket"}, timeout_s=20)).outcome is ToolOutcome.ERROR
    assert (await program.run("read_file", {"path": "hard"}, timeout_s=20)).output == "own"
    assert SECRET not in (await program.run("read_file", {"path": "stolen"}, timeout_s=20)).output
    sparse = await program.run("read_file", {"path": "sparse"}, timeout_s=60)
    assert len(sparse.output) < 400_000
    assert "\x00" not in sparse.output
    assert is_untouched(secret)


async def test_a_pattern_that_takes_for_ever_is_stopped(program: Program) -> None:
    await program.run("write_file", {"path": "a", "content": "a" * 60 + "!"})
    result = await program.run("search_files", {"pattern": "(a+)+$"}, timeout_s=1)
    assert result.outcome is ToolOutcome.TIMEOUT
    assert (await program.run("read_file", {"path": "a", "max_lines": 1})).outcome is ToolOutcome.OK


async def test_what_is_left_for_the_cleaner_harms_nobody(
    sandbox_actor: ToolActor, program: Program, neighbour: Program, secret: Path
) -> None:
    await neighbour.shell("echo kept > file")
    made = await program.python(
        f"""
import os
os.makedirs("closed/inner"); os.chmod("closed/inner", 0); os.chmod("closed", 0)
open(b"\\xff\\xfe", "w"); open("new\\nline", "w"); open("-rf", "w")
os.symlink({str(secret.parent)!r}, "out")
os.symlink("/", "root")
os.mkfifo("fifo")
"made"
"""
    )
    assert made.output == "'made'"
    # Deeper than recursion and open descriptors go, and far longer than a path may be.
    deep = await program.python(
        """
here, name = os.open(".", os.O_RDONLY), "d" * 100
for _ in range(1100):
    os.mkdir(name, dir_fd=here)
    below = os.open(name, os.O_RDONLY, dir_fd=here)
    os.close(here)
    here = below
os.close(here)
"deep"
"""
    )
    assert "deep" in deep.output  # it got there, or the watchdog found it nested too deeply before
    path = workspace_of(program)
    await sandbox_actor.release(program.id, delete_workspace=True)
    assert not path.exists()
    assert is_untouched(secret)
    assert (await neighbour.shell("cat file")).output == "kept"


async def test_a_planted_repository_runs_nothing_on_the_host(program: Program, secret: Path) -> None:
    """Nothing of the platform runs git, tar or pip on a program's files outside; here, that git inside is as confined."""
    await program.shell(
        "git init -q . ; mkdir -p .git/hooks; "
        f"printf '#!/bin/sh\\ntouch {secret.parent}/pwned\\n' | tee .git/hooks/post-index-change .git/fsmonitor >/dev/null; "
        "chmod +x .git/hooks/* .git/fsmonitor; git config core.fsmonitor .git/fsmonitor"
    )
    await program.run("list_files", {"path": ".", "depth": 5})
    await program.run("search_files", {"pattern": "x"})
    await program.shell("git status")
    assert is_untouched(secret)


async def test_a_set_user_id_file_gives_nothing(program: Program) -> None:
    printed = await outcome_of(
        program,
        r"""
import shutil, subprocess
shutil.copy("/usr/bin/id", "id")
@attack
def _():
    os.chmod("id", 0o6755)
    shown = subprocess.run(["./id", "-u"], capture_output=True, text=True).stdout.strip()
    return shown if shown != str(os.getuid()) else None
@attack
def _():
    found = subprocess.run(["find", "/usr", "-perm", "-4000", "-user", "root"], capture_output=True, text=True).stdout
    return found.strip()
""",
    )
    assert "OPEN" not in printed
    assert printed.count("held") == 2

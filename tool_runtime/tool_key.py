"""What latency history is grouped by: the thing whose duration it is, not the first word typed.

`cd /testbed && FOO=1 python -m pytest -q | tail` took as long as pytest took, so its key is `pytest`. Keys are made thus:

1. A tool that is not a shell: the tool's name.
2. A shell: of all simple commands in the text, the *heaviest*, and of several equally heavy ones the last.
   `cd`, `export`, assignments and the like weigh nothing; a filter behind a pipe (`| tail`, `| grep x`) weighs less than
   what feeds it; `echo`, `ls`, `mkdir` and the like weigh little, `sleep` a little more; everything else weighs most.
3. A wrapper (`sudo`, `timeout 60`, `env A=1`, `xargs`, `poetry run`, `bash -c '…'`) stands for what it runs, `python -m X` for X.
4. The directory is stripped (`/usr/bin/git` → `git`), a version suffix of Python and pip too (`python3.11` → `python`).

Never fails: text that does not parse as a shell command yields the tool's name. Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from agent_program.ids import ToolKey
from tool_runtime.shell_words import Command, split_commands

KEY_CHARS_MAX = 64
COMBINED_KEYS_MAX = 8
_SCANNED_CHARS_MAX = 20_000
_NESTING_MAX = 4

SHELL_TOOLS = frozenset(
    {"shell", "bash", "sh", "terminal", "execute_bash", "run_command", "run_shell_command", "exec_command"}
)
_COMMAND_ARGUMENTS = ("command", "cmd", "script", "input")


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_NO_WEIGHT = _words(
    "cd export source . set unset alias unalias pushd popd shopt declare local readonly typeset trap umask ulimit hash : wait"
)
_LITTLE_WEIGHT = _words(
    "echo printf true false pwd exit return test [ [[ mkdir touch rm rmdir cp mv ln chmod ls cat which type command whoami date "
    "kill jobs break continue read shift let id hostname uname basename dirname"
)
_FILTERS = _words(
    "head tail grep egrep fgrep rg wc sort uniq tee cut tr sed awk gawk less more cat column jq xargs nl tac fold"
)
#: Words that open a compound command and are followed by a command of their own.
_LEADING_WORDS = _words("if then elif else while until do { ! time fi done esac }")
#: Wrapper → options of it that take a value.
_WRAPPERS: dict[str, frozenset[str]] = {
    "sudo": frozenset({"-u", "-g", "-C", "-h", "-p"}),
    "env": frozenset({"-u", "-C", "-S", "--unset", "--chdir"}),
    "nice": frozenset({"-n"}),
    "ionice": frozenset({"-c", "-n", "-p"}),
    "nohup": frozenset(),
    "setsid": frozenset(),
    "stdbuf": frozenset({"-i", "-o", "-e"}),
    "exec": frozenset({"-a"}),
    "command": frozenset(),
    "builtin": frozenset(),
    "doas": frozenset({"-u", "-C"}),
    "flock": frozenset({"-w", "-E"}),
    "xargs": frozenset({"-I", "-n", "-P", "-L", "-d", "-a", "-s"}),
    "timeout": frozenset({"-k", "-s", "--signal", "--kill-after"}),
    "strace": frozenset({"-e", "-o", "-p"}),
    "npx": frozenset({"-p", "--package"}),
    "uvx": frozenset({"--from", "--with"}),
}
#: Wrappers whose first plain word is their own (`timeout 60 make`), by how many such words there are.
_OWN_WORDS = {"timeout": 1, "flock": 1}
#: `poetry run pytest`: program → the sub-command after which the real command stands.
_RUNNERS = {
    "poetry": "run",
    "uv": "run",
    "pipenv": "run",
    "conda": "run",
    "mamba": "run",
    "hatch": "run",
    "pdm": "run",
    "rye": "run",
}
_RUNNER_OPTIONS = frozenset({"-n", "--name", "-p", "--prefix", "--with", "--python", "--extra", "--group", "--project"})
_SHELLS = frozenset({"bash", "sh", "dash", "zsh", "ksh"})
#: Options of Python that take a value.
_PYTHON_OPTIONS = frozenset({"-X", "-W"})
_VERSIONED = re.compile(r"(python|pip|pypy)[0-9.]*")
_UNSAFE = re.compile(r"[^A-Za-z0-9._+-]+")


def tool_key(tool_name: str, arguments: Mapping[str, Any] | str | None = None) -> ToolKey:
    """The key for one call; `arguments` is the call's object, its JSON text, or for a shell the bare command text."""
    if tool_name.lower() in SHELL_TOOLS:
        command = _command_text(arguments)
        if command:
            key = _clean(_heaviest(command[:_SCANNED_CHARS_MAX], nesting=0) or "")
            if key:
                return ToolKey(key)
    return ToolKey(_clean(tool_name) or "unknown")


def combine(keys: Iterable[ToolKey]) -> ToolKey | None:
    """The key for calls that run side by side: the distinct keys, sorted and joined with `+`; None of none.

    Their common duration is the longest, so equal keys count once. At most `COMBINED_KEYS_MAX` are named.
    """
    distinct = sorted(set(keys))
    if not distinct:
        return None
    return ToolKey("+".join(distinct[:COMBINED_KEYS_MAX]))


def parts(key: ToolKey) -> list[ToolKey]:
    """The keys that `combine` joined."""
    return [ToolKey(part) for part in key.split("+") if part]


def _command_text(arguments: Mapping[str, Any] | str | None) -> str | None:
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            return arguments
        if not isinstance(parsed, dict):
            return arguments
        arguments = parsed
    for name in _COMMAND_ARGUMENTS:
        value = (arguments or {}).get(name)
        if isinstance(value, str):
            return value
        if isinstance(value, list) and value and all(isinstance(word, str) for word in value):
            return _joined(value)
    return None


def _joined(words: list[str]) -> str:
    """An argv as command text (`["bash", "-lc", "pytest"]`)."""
    return " ".join("'" + word.replace("'", "'\\''") + "'" for word in words)


def _heaviest(text: str, *, nesting: int) -> str | None:
    best_weight, best_name = -1, None
    for command in split_commands(text):
        name = _name_of(command.words, nesting)
        if name is None or not _clean(name):
            continue
        weight = _weight(name, command)
        if weight >= best_weight:
            best_weight, best_name = weight, name
    return best_name


def _weight(name: str, command: Command) -> int:
    if name in _NO_WEIGHT:
        return 0
    if command.reads_pipe and name in _FILTERS:
        return 1
    if name in _LITTLE_WEIGHT:
        return 2
    # Waiting takes time, and says nothing of what is waited for.
    return 3 if name == "sleep" else 4


def _name_of(words: list[str], nesting: int) -> str | None:
    """The program that a simple command runs; None if it only assigns."""
    words = list(words)
    while words:
        word = words[0]
        if word in _LEADING_WORDS or _is_assignment(word):
            words.pop(0)
            continue
        if word in ("for", "select", "case", "function"):
            return None
        name = _without_path(word)
        if (name in _SHELLS or name == "eval") and nesting < _NESTING_MAX:
            inner = " ".join(words[1:]) if name == "eval" else _shell_text(words)
            if inner is not None:
                return _heaviest(inner, nesting=nesting + 1) or name
        if name in _WRAPPERS:
            rest = _after_options(words[1:], _WRAPPERS[name])[_OWN_WORDS.get(name, 0) :]
            if not rest:
                return name
            words = rest
            continue
        if name in _RUNNERS and _RUNNERS[name] in words[1:3]:
            rest = _after_options(words[words.index(_RUNNERS[name]) + 1 :], _RUNNER_OPTIONS)
            if not rest:
                return name
            words = rest
            continue
        if name == "python":
            return _python_module(words) or name
        return name or None
    return None


def _without_path(word: str) -> str:
    name = word.rsplit("/", 1)[-1]
    versioned = _VERSIONED.fullmatch(name)
    return versioned.group(1) if versioned else name


def _is_assignment(word: str) -> bool:
    return re.match(r"[A-Za-z_][A-Za-z0-9_]*(\[[^]]*\])?\+?=", word) is not None


def _after_options(words: list[str], with_value: frozenset[str]) -> list[str]:
    index = 0
    while index < len(words) and words[index].startswith("-") and len(words[index]) > 1:
        if words[index] == "--":
            return words[index + 1 :]
        index += 2 if words[index] in with_value else 1
    return words[index:]


def _shell_text(words: list[str]) -> str | None:
    """What `bash -c` or `bash -lc` is given."""
    for index, word in enumerate(words[1:], start=1):
        if re.fullmatch(r"-[a-z]*c", word):
            return words[index + 1] if index + 1 < len(words) else None
        if not word.startswith("-"):
            return None
    return None


def _python_module(words: list[str]) -> str | None:
    is_value = False
    for index, word in enumerate(words[1:], start=1):
        if word == "-m":
            return words[index + 1] if index + 1 < len(words) else None
        if not is_value and (not word.startswith("-") or word == "-c"):
            return None
        is_value = word in _PYTHON_OPTIONS
    return None


def _clean(name: str) -> str:
    return _UNSAFE.sub("_", name).strip("_.")[:KEY_CHARS_MAX]

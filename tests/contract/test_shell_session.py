"""What a command may do to the shell that it runs in: an error is a result, the session goes on, and nothing of how commands
reach the shell is seen. Where the shell ends, the result says so and the next call has a new one in the same directory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
import pytest_asyncio

from support.tools import Program, tool_actor
from tool_runtime.actor import ToolActor
from tool_runtime.config import SandboxBackend

pytestmark = pytest.mark.asyncio(loop_scope="module")

BACKENDS = [SandboxBackend.BUBBLEWRAP, SandboxBackend.LANDLOCK, SandboxBackend.UNSAFE_LOCAL]


@pytest.fixture(scope="module", params=BACKENDS, ids=lambda backend: backend.value)
def backend(request: pytest.FixtureRequest) -> SandboxBackend:
    return request.param


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_actor(backend: SandboxBackend) -> AsyncIterator[ToolActor]:
    async with tool_actor(sandbox=backend, interrupt_grace_s=0.2) as actor:
        yield actor


@pytest.fixture
def program(shared_actor: ToolActor) -> Program:
    return Program(shared_actor)


@dataclass(frozen=True, kw_only=True)
class Case:
    command: str
    exit_code: int | None
    #: In the output.
    told: str = ""
    #: Nothing more than this is in the output of the next call, before what that call itself prints.
    later: str = ""


SURVIVED = {
    "a quote that is not closed": Case(
        command="echo 'x", exit_code=2, told="unexpected EOF while looking for matching `''"
    ),
    "a double quote that is not closed": Case(command='echo "x', exit_code=2, told="unexpected EOF"),
    "a quote in the last line": Case(command="echo a\necho b\necho it's", exit_code=2, told="unexpected EOF"),
    "a backtick": Case(command="echo `ls", exit_code=2, told="unexpected EOF"),
    "a substitution": Case(command="echo $(ls", exit_code=2, told="unexpected EOF while looking for matching `)'"),
    "an arithmetic expansion": Case(command="echo $((1+", exit_code=2, told="unexpected EOF"),
    "a parameter expansion": Case(command="echo ${x", exit_code=2, told="unexpected EOF"),
    "an if without fi": Case(command="if true; then echo x", exit_code=2, told="unexpected end of file"),
    "a loop without done": Case(command="while false; do echo x", exit_code=2, told="unexpected end of file"),
    "a case without esac": Case(command="case x in", exit_code=2, told="unexpected end of file"),
    "a function without end": Case(command="f() {", exit_code=2, told="unexpected end of file"),
    "a brace too many": Case(command="}", exit_code=2, told="syntax error near unexpected token"),
    "a here-document without end": Case(command="cat <<EOF\nx", exit_code=0, told="x\n[stderr]\n"),
    "a backslash at the end": Case(command="echo a \\", exit_code=0, told="a \\"),
    "a comment at the end": Case(command="echo a # it's", exit_code=0, told="a"),
    "an operator at the end": Case(command="true &&", exit_code=2, told="unexpected end of file"),
    "blanks": Case(command="  ", exit_code=0),
    "newlines": Case(command="\n\n", exit_code=0),
    "nul bytes": Case(command="\0echo \0a\0b", exit_code=0, told="ab"),
    "control bytes": Case(command="printf %s $'\\e]0;x\\a' | wc -c", exit_code=0, told="6"),
    "carriage returns": Case(command="echo a\r\necho b\r\n", exit_code=0, told="a"),
    "a line of a megabyte": Case(command=f"x='{'y' * 1_000_000}'; echo ${{#x}}", exit_code=0, told="1000000"),
    "ten thousand lines": Case(command=":\n" * 10_000 + "echo end", exit_code=0, told="end"),
    "a division by zero": Case(command="echo $((1/0)); echo no", exit_code=1, told="division by 0"),
    "a bad substitution": Case(command="echo ${x!y}", exit_code=1, told="bad substitution"),
    "a readonly variable": Case(command="readonly R=1; R=2; echo no", exit_code=1, told="readonly variable"),
    "a command that is not there": Case(command="nonesuch-command", exit_code=127, told="command not found"),
    "return outside a function": Case(command="return 5", exit_code=2, told="can only `return'"),
    "break outside a loop": Case(command="break", exit_code=0, told="only meaningful in a"),
    "set -e without a failure": Case(command="set -e; true", exit_code=0),
    "set -u without a failure": Case(command="set -u", exit_code=0),
    "set -o pipefail": Case(command="set -o pipefail; false | true", exit_code=1),
    "posix mode and a quote": Case(command="set -o posix; echo 'x", exit_code=2, told="unexpected EOF"),
    "a trace": Case(command="set -x; true", exit_code=0, told="++ true", later="[stderr]\n++ "),
    "a trace of lines": Case(command="set -v", exit_code=0, later="[stderr]\n"),
    "a trap on every command": Case(command="trap 'echo dbg' DEBUG", exit_code=0, later="dbg"),
    "a trap on errors": Case(command="trap 'echo err' ERR; false", exit_code=1, told="err"),
    "a trap on returns": Case(command="trap 'echo ret' RETURN; f() { :; }; f", exit_code=0),
    "functions with the names of builtins": Case(
        command="builtin() { :; }; eval() { :; }; printf() { :; }; command() { :; }; exec() { :; }; cd() { :; }",
        exit_code=0,
    ),
    "aliases with the names of builtins": Case(
        command="shopt -s expand_aliases; alias builtin=false eval=false printf=false for=false unset=false",
        exit_code=0,
    ),
    "prompts": Case(command="PS1='$(echo p1)'; PROMPT_COMMAND='echo pc'; PS2=x PS4='$(echo p4) '", exit_code=0),
    "no path": Case(command="PATH=", exit_code=0),
    "a strange field separator": Case(command="IFS=01234", exit_code=0),
    "job control": Case(command="set -m; sleep 0.05 & wait", exit_code=0),
    "a job that ends": Case(command="sleep 0.01 & sleep 0.1", exit_code=0),
    "positional parameters": Case(command="set -- a b; shift", exit_code=0),
    "no such job": Case(command="fg", exit_code=1, told="no job control"),
    "the framing's descriptors closed": Case(command="exec 196>&- 197>&- 199>&-", exit_code=0),
    "descriptors closed that were not open": Case(command="exec 3>&- 4<&- 9>&-", exit_code=0),
    "the framing's descriptors written to": Case(command="echo 0 0 / >&199", exit_code=1, told="Bad file descriptor"),
    "all output redirected": Case(command="exec >/dev/null 2>&1 </dev/null", exit_code=0),
    "all output closed": Case(command="exec >&- 2>&- <&-", exit_code=0),
    "its input read to the end": Case(command="cat; read line", exit_code=1),
    "a directory that is removed under it": Case(command="mkdir gone; (cd gone; rmdir ../gone; pwd)", exit_code=0),
}

#: After these the shell is another one. The exit code is what the command made of it; None where that is a signal's.
LOST = {
    "exit": Case(command="exit 7", exit_code=7),
    "exit with a trap": Case(command="trap 'echo bye' EXIT; exit 3", exit_code=3, told="bye"),
    "exit in a trap": Case(command="trap 'exit 4' ERR; false", exit_code=4),
    "exec": Case(command="exec sh -c 'echo other; exit 4'", exit_code=4, told="other"),
    "exec of nothing": Case(command="exec nonesuch-command", exit_code=127, told="not found"),
    "set -e and a failure": Case(command="set -e; echo before; false; echo after", exit_code=1, told="before"),
    "set -u and no variable": Case(command="set -u; echo $nope", exit_code=1, told="unbound variable"),
    "a variable that must be set": Case(command="echo ${nope?is missing}", exit_code=1, told="is missing"),
    "a signal to itself": Case(command="kill -TERM $$; sleep 5", exit_code=143),
    "every descriptor closed": Case(command='for fd in {3..255}; do eval "exec $fd>&-"; done', exit_code=None),
    "a builtin switched off": Case(command="enable -n eval", exit_code=None),
    "another builtin switched off": Case(command="enable -n printf", exit_code=None),
    "its memory": Case(command="ulimit -v 1000; x=$(printf '%0900000d' 1); echo ${#x}; kill -KILL $$", exit_code=None),
}


def shows_framing(output: str) -> bool:
    return any(word in output for word in ("builtin", "196", "197", "199", "for __", "/dev/fd", "\\0"))


@pytest.mark.parametrize("case", SURVIVED.values(), ids=SURVIVED)
async def test_the_session_survives(program: Program, case: Case) -> None:
    await program.shell("mkdir deep; cd deep; KEPT=1")
    result = await program.shell(case.command, timeout_s=30)
    assert result.exit_code == case.exit_code, result.output
    assert case.told in result.output
    assert "session is gone" not in result.output
    if "199" not in case.command:
        assert not shows_framing(result.output.replace("1000000", "")), result.output
    later = (await program.shell('echo "[$KEPT]" "${PWD##*/}"', timeout_s=30)).output
    assert "[1] deep" in later
    if not case.later:
        assert later == "[1] deep"
    assert not shows_framing(later), later


@pytest.mark.parametrize("case", LOST.values(), ids=LOST)
async def test_the_session_that_ends_is_replaced_and_the_model_told(program: Program, case: Case) -> None:
    await program.shell("mkdir deep; cd deep; KEPT=1")
    result = await program.shell(case.command, timeout_s=30)
    if case.exit_code is not None:
        assert result.exit_code == case.exit_code, result.output
    assert case.told in result.output
    assert "The shell session is gone" in result.output
    assert not shows_framing(result.output), result.output
    assert (await program.shell('echo "[$KEPT]" "${PWD##*/}"', timeout_s=30)).output == "[] deep"


@pytest.mark.parametrize(
    "command",
    ["shopt -s extdebug; trap false DEBUG", "builtin() { :; }; unset() { :; }", "readonly __; readonly -f builtin"],
)
async def test_who_will_not_have_a_status_has_a_time_out_or_goes_on(program: Program, command: str) -> None:
    """There are ways to make a shell unusable. What ends then is the call, at its limit."""
    await program.shell(command, timeout_s=1)
    await program.shell("true", timeout_s=1)
    assert (await program.shell("echo works", timeout_s=30)).output.endswith("works")

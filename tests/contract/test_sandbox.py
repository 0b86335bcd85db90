"""What running tools promises, whatever the sandbox is made of: asked of every backend that this machine has."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from agent_program.errors import InvalidRequest
from agent_program.tool_events import ToolOutcome
from support.tools import Program, actor_with, processes_with
from support.waiting import wait_for
from tool_runtime.actor import ToolActor
from tool_runtime.config import SandboxBackend
from tool_runtime.tool_call import ToolResult, ToolStarted

BACKENDS = [SandboxBackend.BUBBLEWRAP, SandboxBackend.LANDLOCK, SandboxBackend.UNSAFE_LOCAL, SandboxBackend.KUBERNETES]


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module", params=BACKENDS, ids=lambda backend: backend.value)
def backend(request: pytest.FixtureRequest) -> SandboxBackend:
    return request.param


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_actor(backend: SandboxBackend) -> AsyncIterator[ToolActor]:
    async with actor_with(backend, interrupt_grace_s=0.2) as actor:
        yield actor


@pytest.fixture
def program(shared_actor: ToolActor) -> Program:
    return Program(shared_actor)


class TestShell:
    """One kept bash per program."""

    async def test_a_command_gives_its_output_and_exit_code(self, program: Program) -> None:
        result = await program.shell("echo out; echo err >&2; exit_code() { return 3; }; exit_code")
        assert (result.outcome, result.exit_code) == (ToolOutcome.ERROR, 3)
        assert result.output == "out\n[stderr]\nerr\n[exit code 3]"

    async def test_directory_variables_functions_and_background_jobs_survive(self, program: Program) -> None:
        await program.shell("mkdir sub; cd sub; A=1; export B=2; f() { echo f$A; }; sleep 100 &")
        result = await program.shell("basename $PWD; f; sh -c 'echo $B'; jobs | grep -c sleep")
        assert result.output == "sub\nf1\n2\n1"

    async def test_programs_have_shells_of_their_own(self, program: Program) -> None:
        await program.shell("A=1; touch here")
        assert (await Program(program.actor).shell("echo [$A]; ls")).output == "[]"

    async def test_a_script_of_many_lines_quotes_and_here_documents_runs_as_written(self, program: Program) -> None:
        script = "cat <<'EOF'\nit's \"$HOME\" `x` \\n\nEOF\nfor i in 1 2; do\n  echo \"$i 'q'\"\ndone"
        assert (await program.shell(script)).output == "it's \"$HOME\" `x` \\n\n1 'q'\n2 'q'"

    async def test_a_syntax_error_is_told_and_the_session_goes_on(self, program: Program) -> None:
        await program.shell("A=1")
        broken = await program.shell("if then (")
        assert broken.outcome is ToolOutcome.ERROR
        assert "syntax error" in broken.output
        assert (await program.shell("echo $A")).output == "1"

    async def test_standard_input_is_empty(self, program: Program) -> None:
        assert (await program.shell("cat; read x; echo done")).output == "done"

    @pytest.mark.parametrize("trick", ["exec >/dev/null", "exec 2>/dev/null", "exec </dev/zero", "exec 1>&-"])
    async def test_redirecting_the_session_ends_with_the_call(self, program: Program, trick: str) -> None:
        await program.shell(trick)
        assert (await program.shell("echo out; echo err >&2; head -c1")).output == "out\n[stderr]\nerr"

    @pytest.mark.parametrize(
        ("trick", "exit_code"),
        [
            ("exit 7", 7),
            ("set -e; false", 1),
            ("kill -9 $$", 137),
            ("exec sh -c 'exit 4'", 4),
            ("A=2; set -u; $nope", 1),
        ],
    )
    async def test_a_shell_that_ends_is_replaced_and_the_model_told(
        self, program: Program, trick: str, exit_code: int
    ) -> None:
        await program.shell("mkdir -p deep; cd deep; A=1")
        ended = await program.shell(trick)
        assert ended.exit_code == exit_code
        assert "The shell session is gone" in ended.output
        # Files, and the place where one was, are still there; variables are not.
        assert (await program.shell("basename $PWD; echo [$A]")).output == "deep\n[]"

    async def test_what_a_background_job_prints_later_comes_with_the_next_call(self, program: Program) -> None:
        await program.shell("(sleep 0.1; echo late; touch printed) & echo now")
        result = await program.shell("while [ ! -e printed ]; do sleep 0.05; done; echo next")
        assert result.output.split() == ["late", "next"]

    async def test_a_background_job_that_holds_the_output_does_not_hold_the_call(self, program: Program) -> None:
        result = await program.shell("sleep 1000 & echo started", timeout_s=50)
        assert result.output == "started"
        assert result.duration_s < 25

    async def test_forged_status_lines_in_the_output_fool_nobody(self, program: Program) -> None:
        result = await program.shell("printf 'x 0 /\\0'; printf 'abc 0 /\\0' >&199; echo after; (exit 5)")
        assert result.exit_code == 5
        assert "after" in result.output

    async def test_functions_named_like_builtins_do_not_break_the_next_call(self, program: Program) -> None:
        await program.shell("eval() { :; }; printf() { :; }; trap 'echo trapped' INT TERM; PATH=/nowhere")
        assert (await program.shell("echo here")).output == "here"


class TestPython:
    """One kept interpreter per program."""

    async def test_variables_imports_and_the_last_value_survive(self, program: Program) -> None:
        await program.python("import math\nx = [1]\ndef f(): return math.floor(2.5)")
        result = await program.python("x.append(f())\nx")
        assert (result.output, result.exit_code) == ("[1, 2]", 0)

    async def test_an_exception_shows_the_programs_own_lines_only(self, program: Program) -> None:
        await program.python("def broken():\n    return 1 / 0")
        result = await program.python("broken()")
        assert result.exit_code == 1
        assert "return 1 / 0" in result.output
        assert "ZeroDivisionError" in result.output
        assert "python_session" not in result.output

    @pytest.mark.parametrize(("code", "exit_code"), [("exit(3)", 3), ("import sys; sys.exit('no')", 1), ("exit()", 0)])
    async def test_exit_ends_the_call_and_keeps_the_state(self, program: Program, code: str, exit_code: int) -> None:
        await program.python("x = 1")
        assert (await program.python(code)).exit_code == exit_code
        assert (await program.python("x")).output == "1"

    async def test_an_interpreter_that_dies_is_replaced_and_the_model_told(self, program: Program) -> None:
        await program.python("x = 1")
        died = await program.python("import os; os._exit(9)")
        assert died.exit_code == 9
        assert "The Python session is gone" in died.output
        assert "NameError" in (await program.python("x")).output

    async def test_print_and_errors_of_child_processes_are_caught(self, program: Program) -> None:
        result = await program.python(
            "import subprocess\nprint('a')\nsubprocess.run(['sh', '-c', 'echo b; echo c >&2'])\n1;"
        )
        assert result.output == "a\nb\n1\n[stderr]\nc"


class TestFiles:
    """File tools see what the program sees."""

    async def test_write_read_edit_list_and_search(self, program: Program) -> None:
        assert "12 bytes" in (await program.run("write_file", {"path": "a/b.txt", "content": "hello\nworld\n"})).output
        assert (await program.run("read_file", {"path": "a/b.txt"})).output == "hello\nworld"
        edited = await program.run("edit_file", {"path": "a/b.txt", "old_text": "hello", "new_text": "bye"})
        assert (edited.outcome, edited.exit_code) == (ToolOutcome.OK, 0)
        assert (await program.shell("cat a/b.txt")).output == "bye\nworld"
        assert (await program.run("list_files", {"path": "a", "depth": 2})).output == "b.txt 10"
        assert (await program.run("search_files", {"pattern": "w.rld"})).output == "a/b.txt:2:world"

    async def test_a_file_that_is_not_there_is_an_error_that_names_it(self, program: Program) -> None:
        result = await program.run("read_file", {"path": "nope.txt"})
        assert result.outcome is ToolOutcome.ERROR
        assert result.output == "No such file or directory: nope.txt"

    async def test_several_run_at_once(self, program: Program) -> None:
        results = await asyncio.gather(
            *(program.run("write_file", {"path": f"f{i}", "content": str(i)}) for i in range(12))
        )
        assert all(result.outcome is ToolOutcome.OK for result in results)
        assert (await program.shell("cat f*")).output == "0" + "110" + "11" + "23456789"


class TestDeadlines:
    """Whatever runs, its end comes."""

    async def test_a_timeout_keeps_the_output_so_far_and_kills_everything(self, program: Program) -> None:
        mark = f"3600.{os.getpid()}"
        result = await program.shell(
            f"echo before; trap '' INT TERM HUP; (setsid sleep {mark} &); sleep {mark} & "
            f"sh -c 'kill -STOP $$' & while :; do sleep {mark}; done",
            timeout_s=1,
        )
        assert result.outcome is ToolOutcome.TIMEOUT
        assert result.output.startswith("before\n[Stopped after 1 s")
        assert result.duration_s >= 1
        wait_for(lambda: not processes_with(mark), what="everything that the command started is gone")
        assert (await program.shell("echo works")).output == "works"

    async def test_python_that_never_ends_is_stopped(self, program: Program) -> None:
        result = await program.python("print('on')\nwhile True: pass", timeout_s=0.5)
        assert result.outcome is ToolOutcome.TIMEOUT
        assert "on" in result.output

    async def test_the_state_of_other_sessions_that_died_with_it_is_told_once(self, program: Program) -> None:
        await program.python("x = 1")
        await program.shell("sleep 1000", timeout_s=0.5)
        assert "This python session is new" in (await program.python("1")).output
        assert "This python session is new" not in (await program.python("1")).output

    async def test_a_cancelled_call_ends_and_says_so(self, program: Program) -> None:
        mark = f"3601.{os.getpid()}"
        running = await program.shell_running(f"sleep {mark}", call_id="long")
        assert await program.actor.cancel(program.id, "another") == 0
        assert await program.actor.cancel(program.id, "long") == 1
        assert (await running).outcome is ToolOutcome.CANCELLED
        wait_for(lambda: not processes_with(mark), what="the command is gone")

    async def test_a_caller_that_goes_away_stops_its_call(self, program: Program) -> None:
        mark = f"3602.{os.getpid()}"
        running = await program.shell_running(f"sleep {mark}")
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        # The next call of the session waits for the end of the last.
        assert (await program.shell("echo works")).output.startswith("works")
        wait_for(lambda: not processes_with(mark), what="the command is gone")


class TestCalls:
    """How calls are taken and told of."""

    async def test_a_call_starts_once_and_ends_once(self, program: Program) -> None:
        started, result = await program.events("shell", {"command": "cd / && true"}, call_id="c1")
        assert isinstance(started, ToolStarted)
        assert isinstance(result, ToolResult)
        assert (started.call_id, started.tool_key) == ("c1", "true") == (result.call_id, result.tool_key)

    async def test_calls_of_one_session_run_one_after_the_other(self, program: Program) -> None:
        commands = [f"echo begin{i}; sleep 0.1; echo end{i}" for i in range(3)]
        results = await asyncio.gather(*(program.shell(command) for command in commands))
        assert [result.output for result in results] == [f"begin{i}\nend{i}" for i in range(3)]

    @pytest.mark.parametrize(
        ("tool", "arguments", "told"),
        [
            ("shell", {}, "'command' is a required property"),
            ("shell", {"command": 3}, "3 is not of type 'string'"),
            ("shell", '{"command": "ls"', "not valid JSON"),
            ("shell", '["ls"]', "must be one JSON object"),
            ("shell", {"command": "ls", "extra": 1}, "'extra' was unexpected"),
            ("read_file", {"path": "x", "max_lines": 0}, "less than the minimum"),
            ("fly", {}, "there is no tool called 'fly'; there are: shell"),
        ],
    )
    async def test_wrong_arguments_are_a_result_and_start_nothing(
        self, program: Program, tool: str, arguments: dict[str, object] | str, told: str
    ) -> None:
        before = (await program.actor.status())["sandboxes_started"]
        (only,) = await program.events(tool, arguments)
        assert isinstance(only, ToolResult)
        assert only.outcome is ToolOutcome.ERROR
        assert told in only.output
        assert (await program.actor.status())["sandboxes_started"] == before

    async def test_two_calls_with_one_id_are_refused(self, program: Program) -> None:
        running = await program.shell_running("sleep 0.3; echo first", call_id="same")
        with pytest.raises(InvalidRequest):
            await program.shell("echo second", call_id="same")
        assert (await running).output == "first"

    @pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), float("inf")])
    async def test_a_timeout_that_is_none_is_refused(self, program: Program, timeout_s: float) -> None:
        with pytest.raises(InvalidRequest):
            await program.shell("true", timeout_s=timeout_s)


class TestRelease:
    """The end of a program."""

    async def test_release_ends_its_calls_and_keeps_its_files(self, program: Program) -> None:
        await program.shell("echo kept > file")
        running = await program.shell_running("sleep 1000")
        await program.actor.release(program.id, delete_workspace=False)
        assert (await running).outcome is ToolOutcome.CANCELLED
        assert (await program.shell("cat file")).output == "kept"

    async def test_release_removes_the_files_if_asked_and_only_that_programs(self, program: Program) -> None:
        other = Program(program.actor)
        await asyncio.gather(*(one.shell("mkdir -p a/b; echo kept > a/b/file") for one in (program, other)))
        await program.actor.release(program.id, delete_workspace=True)
        assert "No such file" in (await program.shell("cat a/b/file")).output
        assert (await other.shell("cat a/b/file")).output == "kept"

    async def test_releasing_a_program_that_never_ran_does_nothing(self, program: Program) -> None:
        await program.actor.release(program.id, delete_workspace=True)

"""A tool call's latency key names the thing whose duration it is."""

from __future__ import annotations

import json
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_program.ids import ToolKey
from tool_runtime.tool_key import KEY_CHARS_MAX, combine, parts, tool_key

CASES = [
    # What agents really type. The first block is the fault of keying by the first word.
    ("cd x && FOO=1 python -m pytest -q | tail", "pytest"),
    ("cd /testbed && pytest", "pytest"),
    ("cd /testbed && python -m pytest tests/test_io.py -x -q 2>&1 | tail -n 30", "pytest"),
    ("cd /testbed && git log --oneline | head -5", "git"),
    ("cd /repo; export PYTHONPATH=src; python setup.py build_ext --inplace", "python"),
    ("source .venv/bin/activate && pip install -e .", "pip"),
    (". venv/bin/activate\npip3 install numpy==1.26", "pip"),
    ("cd a && ls -la", "ls"),
    ("cd /only/this", "cd"),
    # Paths, versions, wrappers.
    ("/usr/bin/git status", "git"),
    ("python3.11 script.py", "python"),
    ("./manage.py test", "manage.py"),
    ("../build/run_tests --fast", "run_tests"),
    ("sudo -u bob apt-get install -y jq", "apt-get"),
    ("timeout 60 make -j4", "make"),
    ("timeout -k 5 60s make", "make"),
    ("env -u X A=1 B=2 cargo test", "cargo"),
    ("PYTHONPATH=. DEBUG=1 pytest -k 'a and b'", "pytest"),
    ("time nice -n 10 npm test", "npm"),
    ("nohup python server.py > log 2>&1 &", "python"),
    ("poetry run pytest", "pytest"),
    ("uv run --with pytest python -m pytest", "pytest"),
    ("conda run -n env python x.py", "python"),
    ("bash -c 'cd /x && make test'", "make"),
    ('bash -lc "pytest -q"', "pytest"),
    ("bash run.sh", "bash"),
    ("python -c 'import os; print(os.getcwd())'", "python"),
    ("python - <<'EOF'\nimport subprocess\nsubprocess.run(['ls'])\nEOF", "python"),
    ("python -m http.server 8000 &", "http.server"),
    # Chains: the heaviest, and of equals the last.
    ("git add -A && git commit -m 'x; y && z'", "git"),
    ("make && ./a.out", "a.out"),
    ("pytest; echo done", "pytest"),
    ("pytest && echo OK || echo FAILED", "pytest"),
    ("mkdir -p out && cp a out/ && tsc -p .", "tsc"),
    ("mkdir -p build", "mkdir"),
    ("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && git add -A && git diff --cached", "git"),
    ("false || true", "true"),
    # Pipelines: what feeds the filters.
    ("cat file.txt | grep foo | wc -l", "cat"),
    ("grep -rn 'def foo' . | head", "grep"),
    ("ls | wc -l", "ls"),
    ("find . -name '*.py' | xargs grep foo", "find"),
    ("find . -name '*.py' | xargs python -m black", "black"),
    ("yes | pip install x", "pip"),
    ("echo 'print(1)' | python", "python"),
    ("curl -s http://x/y.json | jq .a", "curl"),
    ("pytest |& tee log.txt", "pytest"),
    ("sed -n '1,80p' src/a.py", "sed"),
    # Compound commands, here-documents, comments, quotes.
    ("for f in *.py; do pytest $f; done", "pytest"),
    ("if [ -f x ]; then make; else echo no; fi", "make"),
    ("while read l; do echo $l; done < list", "echo"),
    ("(cd sub && go test ./...)", "go"),
    ("{ cd a; cargo build; }", "cargo"),
    ("! grep -q foo bar", "grep"),
    ("cat > a.py <<'EOF'\nimport pytest; pytest.main()\nEOF\npython a.py", "python"),
    ("cat <<-END > x\n\tgit push\n\tEND\nls", "ls"),
    ("cat << 'EOF' > x.py\nprint('make')\nEOF", "cat"),
    ("# run the tests\npytest  # all of them", "pytest"),
    ('git commit -m "fix: don\'t && run; pytest | now"', "git"),
    ("X=$(git rev-parse HEAD) make", "make"),
    ("diff <(sort a) <(sort b)", "diff"),
    ("ls \\\n  -la \\\n  /tmp", "ls"),
    # What wraps what.
    ("sudo env PATH=$PATH timeout 300 bash -c 'cd /srv && make install'", "make"),
    ("sudo -E -u www-data php artisan test", "php"),
    ("time (cd sub && npm test)", "npm"),
    ("npx jest --ci", "jest"),
    ("npx -p typescript tsc --noEmit", "tsc"),
    ("npm test", "npm"),
    ("npm run build 2>&1 | tail -20", "npm"),
    ("uv run -- python -m mypy src", "mypy"),
    ("uvx ruff check .", "ruff"),
    ("poetry run python -m flake8", "flake8"),
    ("poetry install", "poetry"),
    ("pdm run pytest", "pytest"),
    ("env -i bash -c 'make'", "make"),
    ("stdbuf -oL pytest", "pytest"),
    ("flock /var/lock/build make", "make"),
    ("nohup setsid python -u train.py &> log &", "python"),
    ("xargs -I{} sh -c 'make {}' < list", "make"),
    ("find . -name '*.c' -print0 | xargs -0 -n 1 -P 4 gcc -c", "gcc"),
    ("sh -xc 'pytest -q'", "pytest"),
    ("bash -c \"bash -c 'bash -c pytest'\"", "pytest"),
    ('eval "make all"', "make"),
    ("exec python app.py", "python"),
    ("python -X dev -Wall -m pytest", "pytest"),
    ("python -m unittest discover", "unittest"),
    ("python3 -m venv .venv && .venv/bin/pip install -r requirements.txt", "pip"),
    ("PYTHONPATH=/x /opt/conda/bin/python -m pytest", "pytest"),
    ("python manage.py test app.tests 2>&1 | tee out | grep -E 'FAIL|OK'", "python"),
    ("docker compose up -d", "docker"),
    ("git -C /repo diff", "git"),
    # Scripts of several lines, loops, cases, functions, traps, waiting.
    ("set -euo pipefail\ncd /w\n# build\nmake -j8\n", "make"),
    ("ls\r\npytest\r\n", "pytest"),
    ("pushd a >/dev/null; go build ./...; popd", "go"),
    ("cd x || exit 1; cmake --build build", "cmake"),
    ("for i in 1 2 3; do\n  python run.py $i\ndone", "python"),
    ("while ! curl -s localhost; do sleep 1; done", "curl"),
    ("sleep 5; curl -sf localhost:8000/healthz", "curl"),
    ("sleep 30", "sleep"),
    ("case $1 in a) make;; b|c) true;; *) ls;; esac", "make"),
    ("f() { make; }; f", "f"),
    ("trap 'rm x' EXIT; pytest", "pytest"),
    ("make test & wait", "make"),
    ("[ -d a ] && cargo test || true", "cargo"),
    ("test -f x && (cd y; yarn build) || echo no", "yarn"),
    ("make 2>&1 | tee build.log | tail -n 50; exit ${PIPESTATUS[0]}", "make"),
    ("cat <<EOF | python3\nprint(1)\nEOF", "python"),
    ("apply_patch <<'EOF'\n*** Begin Patch\nEOF", "apply_patch"),
    ("A=1", "shell"),
    ("", "shell"),
    ("'unterminated", "unterminated"),
    ("$(", "shell"),
]


@pytest.mark.parametrize(("command", "key"), CASES, ids=[repr(case[0])[:60] for case in CASES])
def test_a_shell_command_is_keyed_by_the_program_that_takes_the_time(command: str, key: str) -> None:
    assert tool_key("shell", {"command": command}) == key


def test_other_tools_are_keyed_by_their_name() -> None:
    assert tool_key("read_file", {"path": "x"}) == "read_file"
    assert tool_key("github__create_issue", None) == "github__create_issue"


def test_shells_of_other_agents_are_recognised() -> None:
    assert tool_key("execute_bash", {"command": "cd x && make"}) == "make"
    assert tool_key("bash", {"cmd": ["bash", "-lc", "cd x && pytest -q"]}) == "pytest"


def test_arguments_may_be_json_text_or_bare_command_text() -> None:
    assert tool_key("bash", json.dumps({"command": "cd x && pytest"})) == "pytest"
    assert tool_key("bash", "cd x && pytest") == "pytest"


def test_keys_are_safe_for_stores_and_labels() -> None:
    assert tool_key("shell", {"command": "$RUN_ME now"}) == "RUN_ME"
    assert tool_key("a b\n:c", None) == "a_b_c"
    assert len(tool_key("x" * 500, None)) == KEY_CHARS_MAX
    assert tool_key("", None) == "unknown"


def test_parallel_calls_combine_into_one_key_whatever_their_order() -> None:
    pytest_, git = ToolKey("pytest"), ToolKey("git")
    assert combine([pytest_, git]) == combine([git, pytest_]) == "git+pytest"
    assert combine([git, git]) == "git"
    assert combine([]) is None
    assert parts(ToolKey("git+pytest")) == ["git", "pytest"]


HOSTILE = {
    "open parentheses": "(" * 1_000_000,
    "open substitutions": "$(" * 500_000,
    "open quotes": "'\"" * 500_000,
    "backslashes": "\\" * 1_000_000,
    "here-documents": "<<E " * 250_000 + "\n",
    "wrappers": "env " * 250_000,
    "assignments": "A=1 " * 250_000,
    "nested shells": "bash -c '" * 100_000,
    "pipes": "|" * 1_000_000,
    "one word": "x" * 1_000_000,
    "cases": "case x in " + "a) b;; " * 150_000,
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_the_work_is_bounded_however_long_and_hostile_the_text(text: str) -> None:
    """Counted in function calls, Python's and C's: no more than a few for each character that is looked at."""
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    sys.setprofile(count)
    try:
        key = tool_key("shell", {"command": text})
    finally:
        sys.setprofile(None)
    assert 1 <= len(key) <= KEY_CHARS_MAX
    assert calls < 20_000 * 40


@given(st.text(max_size=300))
def test_no_text_makes_it_fail(command: str) -> None:
    key = tool_key("shell", {"command": command})
    assert 1 <= len(key) <= KEY_CHARS_MAX


@given(
    st.recursive(
        st.none() | st.integers() | st.text(max_size=20),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_no_argument_shape_makes_it_fail(value: object) -> None:
    assert tool_key("bash", {"command": value})  # type: ignore[dict-item]
    assert tool_key("bash", json.dumps(value))

"""Public trace formats, each from a small file in that format."""

import json

import pytest

from agent_program.errors import InvalidRequest
from benchmarks.replay.importers import detect_format, import_trace
from benchmarks.replay.trace import USER_WAIT, Parent, Program, Turn, save_trace
from benchmarks.replay.trace import Trace as ReplayTrace


def lines(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def mini_swe(path, *calls):
    """`calls`: (prompt tokens, completion tokens, created, command)."""
    messages = [{"role": "system", "content": "be good"}, {"role": "user", "content": "do it"}]
    for prompt, completion, created, command in calls:
        usage = {"prompt_tokens": prompt, "completion_tokens": completion}
        messages.append(
            {
                "role": "assistant",
                "content": f"I run:\n```bash\n{command}\n```",
                "extra": {"response": {"usage": usage, "created": created}},
            }
        )
        messages.append({"role": "user", "content": "output"})
    path.write_text(json.dumps({"instance_id": path.name.split(".")[0], "messages": messages}))
    return path


def test_mini_swe_agent_trajectories(tmp_path):
    mini_swe(tmp_path / "b.traj.json", (50, 5, 0, "ls"))
    mini_swe(
        tmp_path / "a.traj.json",
        (100, 10, 1000, "cd /testbed && pytest -q"),
        (140, 20, 1007, "cat x"),
        (90, 5, 1009, "ls"),
    )
    trace = import_trace(tmp_path)
    first, second, third = trace.programs[0].turns
    assert [program.program_id for program in trace.programs] == ["a", "b"]
    assert (first.tool, first.tool_s) == ("pytest", 7.0)
    # The second prompt continues the first turn's 110 tokens; the third is shorter than its past: the context was cut.
    assert (second.prefix_tokens, second.new_input_tokens) == (110, 30)
    assert third.prefix_tokens == 0
    assert (third.tool, third.tool_s) == (None, None)


def claude(role, at_s, *, content, message_id=None, usage=None):
    message = {"role": role, "content": content}
    if message_id:
        message |= {"id": message_id, "usage": usage}
    return {"timestamp": f"2026-01-01T00:00:{at_s:06.3f}Z", "message": message}


def test_claude_code_sessions(tmp_path):
    usage = {"input_tokens": 4, "cache_creation_input_tokens": 96, "cache_read_input_tokens": 900, "output_tokens": 1}
    bash = {"type": "tool_use", "id": "t", "name": "Bash", "input": {"command": "git status"}}
    read = {"type": "tool_use", "id": "u", "name": "Read", "input": {"file_path": "x"}}
    result = [{"type": "tool_result", "tool_use_id": "t"}]
    path = lines(
        tmp_path / "session.jsonl",
        {"type": "summary"},
        claude("assistant", 1.0, content=[{"type": "text", "text": "…"}], message_id="m1", usage=usage),
        # The same message again, now with its tool calls and its final count.
        claude("assistant", 1.5, content=[bash, read], message_id="m1", usage=usage | {"output_tokens": 40}),
        claude("user", 2.0, content=result),
        claude("user", 4.0, content=result),
        claude("assistant", 9.0, content=[], message_id="m2", usage=usage | {"input_tokens": 104}),
        claude("user", 10.0, content="and now?"),
        claude("assistant", 12.0, content=[], message_id="m3", usage=usage | {"input_tokens": 204}),
    )
    first, second, third = import_trace(path).programs[0].turns
    assert (first.input_tokens, first.output_tokens) == (1000, 40)
    # Both calls ran; the wait ends with the last result, 2.5 s after the turn.
    assert (set(first.tool.split("+")), first.tool_s) == ({"git", "Read"}, 2.5)
    assert second.prefix_tokens == 1040
    assert (second.tool, second.tool_s) == (USER_WAIT, 1.0)
    assert third.tool is None


def test_weka_traces_with_sub_agents(tmp_path):
    def request(at_s, inputs, outputs, hashes, **fields):
        return {"t": at_s, "type": "s", "in": inputs, "out": outputs, "hash_ids": hashes, **fields}

    document = {
        "id": "w",
        "block_size": 64,
        "tool_tokens": 100,
        "system_tokens": 28,
        "requests": [
            request(0.0, 200, 10, [1, 2, 3], stop="tool_use", api_time=2.0),
            {"type": "subagent", "requests": [request(3.0, 70, 5, [1], stop="end_turn")]},
            request(9.0, 300, 10, [1, 2, 3, 4], stop="end_turn", think_time=4.5),
            request(20.0, 150, 10, [1, 9], stop="end_turn", think_time=1.0),
        ],
    }
    path = tmp_path / "w.json"
    path.write_text(json.dumps(document))
    lead, sub = import_trace(path).programs
    assert [turn.prefix_tokens for turn in lead.turns] == [0, 210, 64]
    assert [turn.tool for turn in lead.turns] == ["tool_result", USER_WAIT, None]
    assert [turn.tool_s for turn in lead.turns] == [4.5, 1.0, None]
    assert sub.parent == Parent(program_id="w", turn=0)
    # Both begin with the tools and the system prompt, under one name.
    assert lead.shared_prefix == sub.shared_prefix
    assert lead.shared_prefix_tokens == 128


def test_mooncake_requests_become_sessions(tmp_path):
    def request(at_ms, inputs, outputs, hashes):
        return {"timestamp": at_ms, "input_length": inputs, "output_length": outputs, "hash_ids": hashes}

    path = lines(
        tmp_path / "mooncake.jsonl",
        request(0, 1000, 50, [0, 1]),
        request(500, 700, 20, [7, 8]),
        request(60_000, 1600, 40, [0, 1, 2, 3]),
    )
    one, two = import_trace(path).programs
    assert (one.arrival_s, two.arrival_s) == (0.0, 0.5)
    assert (one.turns[0].tool, one.turns[0].tool_s) == (USER_WAIT, 60.0)
    assert one.turns[1].prefix_tokens == 1050


def test_tracelab_rounds(tmp_path):
    path = tmp_path / "lab.csv"
    path.write_text(
        "id,input_len,output_len,arrival_time,round_idx,tool_wait_after_ms,prefix_len\n"
        "0,30,5,1500.0,1,0.0,115\n0,100,15,1500.0,0,2500.0,0\n"
    )
    (program,) = import_trace(path).programs
    assert program.arrival_s == 1.5
    assert [(turn.input_tokens, turn.prefix_tokens) for turn in program.turns] == [(100, 0), (145, 115)]
    assert program.turns[0].tool_s == 2.5


def journaled(program_id, created_at, *turns):
    """A line of `continuum programs export`; `turns`: (started, finished, prompt, output, tool key)."""
    return {
        "format": "continuum.program/1",
        "id": program_id,
        "model": "small",
        "created_at": created_at,
        "max_turns": 8,
        "turns": [
            {
                "turn": number,
                "started_at": started,
                "finished_at": finished,
                "prompt_tokens": prompt,
                "output_tokens": output,
                "tool_key": tool,
                "added_later": None,
            }
            for number, (started, finished, prompt, output, tool) in enumerate(turns, start=1)
        ],
    }


def test_the_platforms_own_journal(tmp_path):
    path = lines(
        tmp_path / "programs.jsonl",
        journaled("prog_b", 105.0, (105.0, 106.0, 50, 5, None)),
        journaled(
            "prog_a",
            107.5,
            (107.6, 109.0, 100, 10, "pytest"),
            (112.5, 113.0, 160, 20, "git"),
            (114.0, 115, 90, 5, "ls"),
        ),
    )
    assert detect_format(path) == "journal"
    b, a = import_trace(path).programs
    assert (b.arrival_s, a.arrival_s, a.kind) == (0.0, 2.5, "small")
    first, second, third = a.turns
    # The wait is from the end of one turn to the start of the next; 160 tokens continue the 110 before them.
    assert (first.tool, first.tool_s) == ("pytest", 3.5)
    assert (second.prefix_tokens, second.new_input_tokens) == (110, 50)
    assert third.prefix_tokens == 0
    assert (third.tool, third.tool_s) == (None, None)


def test_a_journal_of_another_major_version_is_refused(tmp_path):
    line = journaled("prog_a", 0.0, (0.0, 1.0, 50, 5, None)) | {"format": "continuum.program/2"}
    with pytest.raises(
        InvalidRequest, match=r"p.jsonl line 1 .* 'continuum.program/2', where continuum.program/1 is read"
    ):
        import_trace(lines(tmp_path / "p.jsonl", line))


def test_a_trajectory_with_tool_calls_names_its_command(tmp_path):
    path = mini_swe(tmp_path / "a.traj.json", (100, 10, 0, "ls"), (140, 20, 2, "ls"))
    document = json.loads(path.read_text())
    call = {"function": {"name": "bash", "arguments": json.dumps({"command": "git diff"})}}
    document["messages"][2] |= {"content": None, "tool_calls": [call]}
    path.write_text(json.dumps(document))
    assert import_trace(path).programs[0].turns[0].tool == "git"


def test_the_replays_own_format_is_recognised(tmp_path):
    turn = Turn(input_tokens=5, prefix_tokens=0, output_tokens=1, tool=None, tool_s=None)
    save_trace(ReplayTrace(name="n", programs=(Program(program_id="p", turns=(turn,)),)), tmp_path / "n.jsonl")
    assert detect_format(tmp_path / "n.jsonl") == "native"
    assert import_trace(tmp_path / "n.jsonl").programs[0].program_id == "p"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("x.jsonl", '{"a": 1}\n', "cannot tell the format"),
        ("x.jsonl", "not json\n", "cannot tell the format"),
        ("x.json", '{"a": 1}', "is not of a weka trace: no 'requests'"),
        ("x.traj.json", '{"messages": []}', "holds no program"),
    ],
)
def test_a_file_of_no_known_format_is_refused(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(InvalidRequest, match=message):
        import_trace(tmp_path / name)


MOONCAKE = '{"timestamp": 0, "input_length": 10, "output_length": 1, "hash_ids": [1]}\n'


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("x.csv", "id,input_len\n1,2\n", "x.csv line 2 is not of a tracelab trace: no 'prefix_len'"),
        ("x.jsonl", MOONCAKE + "\n" + MOONCAKE[:-9] + "\n", "x.jsonl line 3 is not of a mooncake trace"),
        ("x.jsonl", MOONCAKE + '{"timestamp": 1}\n', "x.jsonl line 2 is not of a mooncake trace: no 'hash_ids'"),
        (
            "x.jsonl",
            '{"type": "a"}\n{"message": "none"}\n{"message": {"role"',
            "x.jsonl line 3 is not of a claude",
        ),
        (
            "x.jsonl",
            '{"message": {"role": "user"}, "timestamp": "noon"}\n',
            "line 1 .* claude-code trace: Invalid isoformat",
        ),
        ("x.jsonl", '{"format": "continuum.program/1", "created_at": 1, "id": "p"}\n', "line 1 .* no 'turns'"),
        ("x.json", '{"requests": [{"in": 5}, {"out": 5}]}', "x.json request 2 of x is not of a weka trace: no 'in'"),
        ("x.json", "[1]", "x.json is not of a weka trace: not a JSON object"),
        (
            "x.traj.json",
            '{"messages": [{"role": "assistant", "extra": {"response": {"usage": {"prompt_tokens": "many"}}}}]}',
            "x.traj.json message 1 is not of a mini-swe-agent trace",
        ),
        (
            "x.traj.json",
            '{"messages": [{"role": "assistant", "extra": {"response": {"usage": '
            '{"prompt_tokens": -5, "completion_tokens": 1}}}}]}',
            "message 1 .* -5 input",
        ),
    ],
)
def test_an_error_names_the_line_the_request_or_the_message(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(InvalidRequest, match=message):
        import_trace(tmp_path / name)


def test_a_missing_file_or_unknown_format_is_refused(tmp_path):
    with pytest.raises(InvalidRequest, match="no trace at"):
        import_trace(tmp_path / "none")
    (tmp_path / "x.csv").write_text("a\n")
    with pytest.raises(InvalidRequest, match="unknown trace format"):
        import_trace(tmp_path / "x.csv", format_name="punch-cards")

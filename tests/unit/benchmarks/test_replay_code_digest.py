"""What a stored result depends on: the code that a run reaches, and no other."""

import ast

from benchmarks.replay import code_digest
from benchmarks.replay.code_digest import reachable_modules


def test_a_run_reaches_the_scheduler_and_its_policies_and_the_simulation():
    reached = reachable_modules("benchmarks.replay.experiment")
    assert {
        "benchmarks.replay.experiment",
        "benchmarks.replay.simulation",
        "benchmarks.summary",
        "engine_replicas.config",
        "engine_replicas.vllm_scheduler",
        "engine_replicas.retention.policy",
        "tool_runtime.latency",
    } <= reached


def test_reports_command_lines_and_the_platform_are_not_part_of_it():
    reached = reachable_modules("benchmarks.replay.experiment")
    outside = {"benchmarks.replay.cli", "benchmarks.replay.plots", "benchmarks.replay.importers", "benchmarks.compare"}
    assert not outside & reached
    assert not any(name.startswith("deployments") for name in reached)


def test_comments_do_not_make_results_new_ones_and_code_does(monkeypatch):
    def digest_of(source):
        monkeypatch.setattr(code_digest, "_tree", lambda _: ast.parse(source))
        monkeypatch.setattr(code_digest, "reachable_modules", lambda _: {"one"})
        return code_digest.code_digest.__wrapped__()

    assert digest_of("x = 1  # one\n") == digest_of("x  =  1\n")
    assert digest_of("x = 1\n") != digest_of("x = 2\n")

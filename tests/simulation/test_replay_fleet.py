"""Several replicas behind the production router's own placement, replicas that die, and replicas that are slow."""

import json
import os
import subprocess
import sys

import pytest
from vllm.v1.core.kv_cache_manager import KVCacheManager

from agent_program.errors import InvalidRequest
from benchmarks.replay.clock import VirtualClock
from benchmarks.replay.experiment import Policy
from benchmarks.replay.faults import ReplicaLoss, SlowReplica
from benchmarks.replay.records import Cause
from benchmarks.replay.routing import NowhereToGo, ReplayRouter
from benchmarks.replay.trace import Parent, Program, Trace, Turn
from benchmarks.replay.vllm_engine import ReplayEngine
from benchmarks.replay.workload import ArrivalKind, Arrivals
from continuum_router.config import RouterSettings
from continuum_router.placement import Fleet
from continuum_router.program_router import ProgramRouter
from engine_replicas.config import SchedulingPreset
from engine_replicas.vllm_scheduler import RetainingScheduler
from support.replays import agents, replay

CROWD = agents(20)


def homes(program):
    return [turn.replica for turn in program.turns]


def figures(result):
    return json.dumps(result.to_dict(with_rows=True), sort_keys=True)


# --- placement ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["stock", "continuum"])
def test_a_program_stays_where_its_first_turn_went_and_programs_spread(policy):
    result = replay(policy, CROWD, replicas=3)
    assert all(len(set(homes(program))) == 1 for program in result.run.programs)
    assert {homes(program)[0] for program in result.run.programs} == {0, 1, 2}
    summary = result.to_dict()
    assert summary["moves"] == 0
    # One placement a program is new; every later turn, and all news of it, goes where it is bound.
    assert summary["placements"]["new"] == 20
    assert set(summary["placements"]) == {"new", "bound"}


def test_sub_agents_run_where_their_parent_is():
    lead = (
        Turn(input_tokens=1_000, prefix_tokens=0, output_tokens=20, tool="task", tool_s=0.1),
        Turn(input_tokens=1_200, prefix_tokens=1_000, output_tokens=20, tool=None, tool_s=None),
    )
    sub = (Turn(input_tokens=800, prefix_tokens=0, output_tokens=20, tool=None, tool_s=None),)
    programs = []
    for index in range(6):
        programs.append(Program(program_id=f"lead-{index}", turns=lead))
        programs += [
            Program(program_id=f"sub-{index}-{child}", turns=sub, parent=Parent(program_id=f"lead-{index}", turn=0))
            for child in range(2)
        ]
    result = replay("continuum", Trace(name="t", programs=tuple(programs)), replicas=3)
    by_id = {program.program_id: program for program in result.run.programs}
    for index in range(6):
        home = homes(by_id[f"lead-{index}"])[0]
        assert {*homes(by_id[f"sub-{index}-0"]), *homes(by_id[f"sub-{index}-1"])} == {home}


def test_more_replicas_end_a_crowd_earlier():
    one, three = (replay("continuum", CROWD, replicas=count).to_dict() for count in (1, 3))
    assert three["completion_s"]["mean"] < 0.9 * one["completion_s"]["mean"]


@pytest.mark.parametrize("policy", [*(preset.value for preset in SchedulingPreset), "clairvoyant"])
def test_several_replicas_and_faults_still_give_the_same_bytes(policy):
    faults = {"losses": (ReplicaLoss(replica=1, at_s=8.0),), "slow": (SlowReplica(replica=0, factor=2.0, from_s=3.0),)}
    assert figures(replay(policy, CROWD, replicas=3, **faults)) == figures(replay(policy, CROWD, replicas=3, **faults))


@pytest.mark.parametrize(
    "arrivals", [Arrivals(rate_per_s=2.0), Arrivals(kind=ArrivalKind.CLOSED, concurrency=8)], ids=["open", "closed"]
)
def test_jumps_change_little_over_several_replicas(arrivals):
    jumped, stepped = (
        replay("continuum", CROWD, replicas=2, arrivals=arrivals, jump=jump).to_dict() for jump in (True, False)
    )
    assert jumped["scheduler_calls"] < stepped["scheduler_calls"]
    assert jumped["completion_s"]["mean"] == pytest.approx(stepped["completion_s"]["mean"], rel=0.02)


_DIGEST = """
import hashlib, json
from benchmarks.replay.faults import ReplicaLoss
from support.replays import agents, replay
digest = hashlib.sha256()
for policy in ("continuum", "adaptive", "clairvoyant"):
    result = replay(policy, agents(12), replicas=3, losses=(ReplicaLoss(replica=1, at_s=5.0),))
    digest.update(json.dumps(result.to_dict(with_rows=True), sort_keys=True).encode())
print(digest.hexdigest())
"""


def test_another_process_gives_the_same_bytes_though_it_hashes_strings_differently():
    def start(hash_seed):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        return subprocess.Popen([sys.executable, "-c", _DIGEST], env=environment, stdout=subprocess.PIPE, text=True)

    digests = set()
    for process in [start("1"), start("2")]:
        told, _ = process.communicate(timeout=300)
        assert process.returncode == 0
        digests.add(told.splitlines()[-1])
    assert len(digests) == 1


def test_every_replica_runs_the_classes_that_the_engine_runs(monkeypatch):
    engines, build = [], ReplayEngine.__init__

    def listen(engine, **arguments):
        build(engine, **arguments)
        engines.append(engine)

    monkeypatch.setattr(ReplayEngine, "__init__", listen)
    stats = replay("continuum", agents(2), replicas=3).to_dict(with_rows=True)["scheduler"]
    assert [type(engine.scheduler) for engine in engines] == [RetainingScheduler] * 3
    assert [type(engine.scheduler.kv_cache_manager) for engine in engines] == [KVCacheManager] * 3
    assert [(one["retention"], one["ordering"]) for one in stats] == [("continuum", "program_fcfs")] * 3


def test_the_router_is_productions():
    made, _ = router([Reports()])
    assert type(made._router) is ProgramRouter
    assert type(made._router.fleet) is Fleet


def test_the_routers_settings_are_the_cells():
    # Where waiting programs weigh nothing and turns are all that counts, placement differs from the default's.
    light = {"weights": {"program_turns": 0.0, "kv_full_turns": 0.0}}
    default, changed = (replay("continuum", CROWD, replicas=3, router=router) for router in ({}, light))
    assert [homes(program) for program in default.run.programs] != [homes(program) for program in changed.run.programs]
    with pytest.raises(InvalidRequest, match="settings of the router"):
        replay("continuum", agents(1), router={"no_such": 1})


class Reports:
    """A replica that reports what it is told to."""

    def __init__(self, waiting=0):
        self.waiting, self.is_lost, self.asked = waiting, False, 0

    def report(self):
        self.asked += 1
        return {"waiting": self.waiting, "running": 0, "total_blocks": 100, "free_blocks": 100, "retained_blocks": 0}


def router(replicas, **settings):
    clock = VirtualClock()
    made = ReplayRouter(replicas, clock=clock, settings=RouterSettings(**settings))
    made.hear_reports()
    return made, clock


def test_reports_come_once_a_period_and_sent_turns_count_in_between():
    replicas = [Reports(), Reports(waiting=2)]
    made, clock = router(replicas)
    for name in ("a", "b"):
        assert made.place(name) == 0
        made.turn_sent(0)
    # Two turns and two bound programs weigh more than two waiting turns, though no report has said so.
    assert made.place("c") == 1
    clock.move_to(0.4)
    made.hear_reports()
    assert [one.asked for one in replicas] == [1, 1]
    clock.move_to(0.7)
    made.hear_reports()
    clock.move_to(0.9)
    made.hear_reports()
    assert [one.asked for one in replicas] == [2, 2]


def test_a_program_of_a_lost_replica_is_placed_anew_and_one_with_no_replica_nowhere():
    replicas = [Reports(), Reports()]
    made, _ = router(replicas)
    home = made.place("a")
    made.lose(home)
    assert made.place("a") == 1 - home
    assert made.reasons["replica_lost"] == 1
    made.lose(1 - home)
    with pytest.raises(NowhereToGo):
        made.place("a")


# --- a replica dies ----------------------------------------------------------------------------------------------------


LOSS = (ReplicaLoss(replica=0, at_s=6.0),)


@pytest.mark.parametrize("policy", ["stock", "continuum", "static:600"])
def test_programs_of_a_dead_replica_end_elsewhere_with_every_turn(policy):
    result = replay(policy, CROWD, replicas=2, losses=LOSS)
    assert [len(program.turns) for program in result.run.programs] == [6] * 20
    for program in result.run.programs:
        assert program.end_s is not None
        assert {turn.replica for turn in program.turns if turn.end_s > 6.0} <= {1}
        assert sum(program.seconds.values()) == pytest.approx(program.completion_s)
        assert min(program.seconds.values()) >= -1e-9
    summary = result.to_dict()
    assert summary["by_replica"][0]["lost_at_s"] == 6.0
    assert summary["replays"] > 0
    assert summary["seconds_by_cause"]["lost"] > 0


def test_only_the_turns_inside_a_dead_replica_run_again():
    result = replay("continuum", CROWD, replicas=2, losses=LOSS)
    for program in result.run.programs:
        for turn in program.turns:
            was_inside = turn.ready_s < 6.0 < turn.end_s and turn.replays == 1
            assert turn.replays == int(was_inside)
            assert turn.replays == 0 or program.seconds[Cause.LOST] > 0


def test_the_kv_of_a_dead_replica_is_computed_again():
    one, other = (replay("static:600", agents(4), replicas=2, losses=losses) for losses in ((), LOSS))
    assert one.to_dict()["recomputed_tokens"] < 500 < other.to_dict()["recomputed_tokens"]
    moved = [program for program in other.run.programs if len(set(homes(program))) > 1]
    assert moved
    assert other.to_dict()["moves"] == len(moved)


def test_a_tool_wait_goes_on_while_its_replica_dies():
    turns = (
        Turn(input_tokens=1_000, prefix_tokens=0, output_tokens=10, tool="bash", tool_s=20.0),
        Turn(input_tokens=1_100, prefix_tokens=1_010, output_tokens=10, tool=None, tool_s=None),
    )
    trace = Trace(name="t", programs=(Program(program_id="p", turns=turns),))
    calm = replay("continuum", trace, replicas=2)
    dead = homes(calm.run.programs[0])[0]
    (program,) = replay("continuum", trace, replicas=2, losses=(ReplicaLoss(replica=dead, at_s=10.0),)).run.programs
    assert program.seconds[Cause.TOOL] == pytest.approx(20.0)
    assert homes(program) == [dead, 1 - dead]
    assert [turn.replays for turn in program.turns] == [0, 0]
    assert program.turns[1].reused_tokens == 0


def test_a_client_saw_its_first_token_before_the_replica_died():
    turns = (Turn(input_tokens=1_000, prefix_tokens=0, output_tokens=2_000, tool=None, tool_s=None),)
    trace = Trace(name="t", programs=(Program(program_id="p", turns=turns),))
    (calm,) = replay("stock", trace, replicas=2).run.programs
    loss = ReplicaLoss(replica=calm.turns[0].replica, at_s=calm.turns[0].first_token_s + 5.0)
    (program,) = replay("stock", trace, replicas=2, losses=(loss,)).run.programs
    assert program.first_token_wait_s == pytest.approx(calm.first_token_wait_s)
    assert program.completion_s == pytest.approx(calm.completion_s + program.seconds[Cause.LOST])


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        ({"losses": (ReplicaLoss(replica=2, at_s=1.0),)}, "no replica 2"),
        ({"losses": (ReplicaLoss(replica=0, at_s=-1.0),)}, "finite time"),
        ({"losses": (ReplicaLoss(replica=0, at_s=1.0), ReplicaLoss(replica=0, at_s=2.0))}, "lost once"),
        ({"losses": (ReplicaLoss(replica=0, at_s=1.0), ReplicaLoss(replica=1, at_s=2.0))}, "every replica lost"),
        ({"slow": (SlowReplica(replica=0, factor=0.0),)}, "factor above 0"),
    ],
)
def test_faults_that_cannot_happen_are_refused(faults, message):
    with pytest.raises(InvalidRequest, match=message):
        replay("vllm", agents(2), replicas=2, **faults)


# --- a slow replica ----------------------------------------------------------------------------------------------------


def test_a_slow_replica_takes_its_factor_longer_from_its_moment_on():
    (calm,) = replay("stock", agents(1)).run.programs
    (slow,) = replay("stock", agents(1), slow=(SlowReplica(replica=0, factor=3.0),)).run.programs
    tools = calm.seconds[Cause.TOOL]
    assert slow.completion_s - tools == pytest.approx(3.0 * (calm.completion_s - tools), rel=0.01)
    (late,) = replay("stock", agents(1), slow=(SlowReplica(replica=0, factor=3.0, from_s=1e6),)).run.programs
    assert late.completion_s == calm.completion_s


def test_the_router_gives_a_slow_replica_less_to_do():
    result = replay("continuum", agents(40), replicas=2, slow=(SlowReplica(replica=0, factor=4.0),)).to_dict()
    slow, healthy = result["by_replica"]
    assert slow["slow_factor"] == 4.0
    assert slow["turns"] < healthy["turns"]


# --- what the future is worth ------------------------------------------------------------------------------------------


def test_halves_of_the_future_can_be_known_alone():
    whole, order, retention = (
        replay(name, agents(14)).to_dict() for name in ("clairvoyant", "clairvoyant_order", "clairvoyant_retention")
    )
    assert len({one["completion_s"]["mean"] for one in (whole, order, retention)}) == 3


def test_settings_may_follow_a_policys_name():
    assert Policy.named("continuum+ordering=fcfs+ttl_max_s=60").scheduling == {
        "preset": "continuum",
        "ordering": "fcfs",
        "ttl_max_s": "60",
    }
    for wrong in ("continuum+ordering", "continuum+no_such=1", "magic"):
        with pytest.raises(InvalidRequest, match="unknown policy"):
            Policy.named(wrong)

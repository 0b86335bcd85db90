"""`continuum programs show ID --explain` for people: where the program is, what became of its KV, and why.

Input is the answer of `GET /v1/programs/{id}/explain`. The scheduler's vocabulary (`engine_replicas/retention`) is put into
sentences here; a word that is not known here is shown as it is, so that a newer server is never hidden by an older client.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.text import Text

from deployments.cli_output import counts, seconds, state_and_why

Json = Mapping[str, Any]

_WHY_NOT = {
    "prefix_caching_off": "the engine does not find KV again (prefix caching is off)",
    "paused": "the engine was paused",
    "not_worth_it": "keeping it was not worth the memory",
    "over_cap": "retained KV had reached its cap (all programs', the tenant's or the program's)",
    "nothing_to_retain": "the context does not fill one KV block",
}
_LEASE_ENDS = {
    "next_turn_scheduled": "reused, the next turn found its KV",
    "deadline_passed": "expired, its deadline passed",
    "never_armed": "expired, nobody said in time which tool runs",
    "queued_too_long": "expired, its next turn was queued for longer than KV is held for one",
    "running_turn_needs_blocks": "reclaimed, a running turn needed the memory",
    "nothing_runs": "reclaimed, the turn at the head of the queue did not fit",
    "outbid": "reclaimed, a waiting turn brings more than it was worth",
    "over_cap": "reclaimed, the cap left no room beside a newer lease that is worth more",
    "last_turn": "released, that was the program's last turn",
    "not_worth_it": "released, with the tool known it was not worth the memory",
    "program_over": "released, the program is over",
    "superseded": "released, a newer turn left more behind",
    "cache_reset": "released, the engine's cache was reset",
    "paused": "released, the engine was paused",
}
_DECISIONS = {
    "end_of_turn": "the policy frees KV at the end of every turn",
    "static": "a fixed time",
    "cold_start": "too few tool times seen yet: the default time",
    "least_waste": "as long as keeping wastes less than computing again",
    "priced": "kept until somebody brings more than it is worth",
    "reload_is_cheap": "loading it from a lower tier costs next to nothing",
    "global_history": "from the times of all tools",
    "tool_history": "from this tool's times",
}
#: Inputs of a decision that are worth a word, with the word.
_INPUTS = {
    "benefit_s": "a hit would save",
    "queueing_delay_s": "queueing delay",
    "prefill_reload_s": "recompute",
    "eta": "eta",
    "return_probability": "chance of return in time",
    "samples": "tool times seen",
}


def explanation(found: Json) -> list[Text]:
    """The account, one line each."""
    return list(_lines(found))


def _lines(found: Json) -> Iterator[Text]:
    program, scheduler = found.get("program"), found.get("scheduler")
    if program is not None:
        yield Text.assemble((f"program {found['id']}  ", "bold"), state_and_why(program))
        yield Text(f"  {program['turns']} turns; leases: {counts(program['leases'])}")
    else:
        yield Text.assemble((f"program {found['id']}  ", "bold"), "run by its client")
    if scheduler is None:
        yield Text("  no replica knows it: it has had no turn yet, or every scheduler has forgotten it", style="dim")
    else:
        yield from _replica(scheduler, is_current=True)
    for earlier in found.get("earlier_replicas", ()):
        yield from _replica(earlier, is_current=False)


def _replica(scheduler: Json, *, is_current: bool) -> Iterator[Text]:
    head = "was" if scheduler.get("is_over") or not is_current else "is"
    line = f"{head} on replica {scheduler['replica']}, first seen there {seconds(scheduler.get('age_s'))} ago"
    yield Text(line, style="bold" if is_current else "")
    known = f"  {scheduler.get('turns_finished', 0)} turns finished, {scheduler.get('live_turns', 0)} in the engine"
    yield Text(f"{known}; leases there: {counts(scheduler.get('lease_outcomes', {}))}")
    leases = scheduler.get("leases", ())
    yield from (Text(f"  now: {_lease(lease)}", style="green") for lease in leases)
    if not leases and not scheduler.get("is_over") and is_current:
        yield Text("  now: no KV of it is retained")
    yield from _decisions(scheduler.get("decisions", ()))


def _lease(lease: Json) -> str:
    branch = "" if lease.get("branch") in (None, "0") else f" of branch {lease['branch']}"
    waits = "its next turn is queued" if lease.get("next_turn_queued") else f"for {lease.get('tool') or 'a tool'}"
    left = lease.get("deadline_in_s", 0.0)
    until = f"{seconds(left)} left" if left >= 0 else f"{seconds(-left)} beyond its deadline"
    held = f"held for {seconds(lease.get('held_s'))}, {until} of {seconds(lease.get('ttl_s'))}"
    return (
        f"a lease{branch} keeps {lease['tokens']} tokens ({lease['blocks']} blocks), {lease['state']}, {waits}; {held}"
    )


def _decisions(decisions: Sequence[Json]) -> Iterator[Text]:
    """Oldest first, as they were taken."""
    for decision in decisions:
        age = f"{seconds(decision.get('age_s'))} ago"
        yield Text.assemble((f"  {age:>12}  ", "dim"), _sentence(decision))


def _sentence(decision: Json) -> str:
    match decision.get("event"):
        case "turn_finished":
            tokens = decision.get("context_tokens")
            if decision.get("lease") is None:
                why = str(decision.get("why_not"))
                return f"turn ended with {tokens} tokens: KV dropped, {_WHY_NOT.get(why, why)}{_inputs(decision)}"
            tool = f" for {decision['tool']}" if decision.get("tool") else ""
            state = f"{decision['lease']} lease of {seconds(decision.get('ttl_s'))}{tool}"
            return f"turn ended with {tokens} tokens: KV kept, {state}{_inputs(decision)}"
        case "armed":
            tool = decision.get("tool") or "no tool"
            if not decision.get("ttl_s"):
                return f"lease given up for {tool}{_inputs(decision)}"
            return f"lease armed for {tool}: kept for up to {seconds(decision['ttl_s'])}{_inputs(decision)}"
        case "tools_finished":
            return (
                f"{decision.get('tool')} finished after {seconds(decision.get('elapsed_s'))}: the next turn is expected"
            )
        case "lease_ended":
            why = str(decision.get("reason"))
            return f"lease ended after {seconds(decision.get('held_s'))}: {_LEASE_ENDS.get(why, why.replace('_', ' '))}"
        case "turn_scheduled":
            reused, context = decision.get("reused_tokens", 0), decision.get("context_tokens", 0)
            had = "with" if decision.get("had_lease") else "without"
            return (
                f"turn waited {seconds(decision.get('waited_s'))} ({had} a lease): {reused} of {context} tokens reused"
            )
        case other:
            rest = {key: value for key, value in decision.items() if key not in ("age_s", "event")}
            return f"{other}: {', '.join(f'{key} {_number(value)}' for key, value in rest.items())}"


def _inputs(decision: Json) -> str:
    """Why, in numbers: the policy's reason and what it looked at."""
    reason = decision.get("decision")
    parts = [] if reason is None else [_DECISIONS.get(reason, str(reason).replace("_", " "))]
    for key, word in _INPUTS.items():
        if (value := decision.get(key)) is not None:
            parts.append(f"{word} {seconds(value) if key.endswith('_s') else _number(value)}")
    return f" ({'; '.join(parts)})" if parts else ""


def _number(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)

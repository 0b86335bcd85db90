"""Who may do what: nobody beyond this machine without keys, nobody at all without one where there are, and tenants apart."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from deployments.access import ApiKeySettings, digest, is_local, new_key
from deployments.cli import app as command_line
from deployments.cli_support import ExitCode
from deployments.local_platform import ListenOn, PlatformStartError, local_platform
from deployments.memory_clients import ScriptedEngine, answer
from deployments.settings import HttpSettings, PlatformSettings
from support.api import CLOSED, OPENED, ApiBench, error_of

PROGRAM: dict[str, Any] = {"input": "Go.", "program_id": "p"}
KEYS = {name: new_key() for name in ("alice", "bob", "reader", "root")}
SETTINGS = [
    {"name": "alice", "sha256": digest(KEYS["alice"]), "tenant": "acme"},
    {"name": "bob", "sha256": digest(KEYS["bob"]), "tenant": "globex"},
    {"name": "reader", "sha256": digest(KEYS["reader"]), "tenant": "acme", "scopes": ["read"]},
    {"name": "root", "sha256": digest(KEYS["root"]), "scopes": ["admin"]},
]


def guarded(turns: Any = ()) -> ApiBench:
    return ApiBench(turns, api_keys=[ApiKeySettings.model_validate(key) for key in SETTINGS])


@asynccontextmanager
async def calling(
    bench: ApiBench, key: str | None = None, address: str = "127.0.0.1"
) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(bench.app, raise_app_exceptions=False, client=(address, 9))
    headers = {"authorization": f"Bearer {KEYS.get(key, key)}"} if key else {}
    async with httpx.AsyncClient(transport=transport, base_url="http://api", headers=headers) as client:
        yield client


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        (None, True),
        ("10.0.0.1", False),
        ("0.0.0.0", False),
        ("::", False),
        ("::ffff:10.0.0.1", False),
        ("proxy", False),
    ],
)
def test_what_is_this_machine(address: str | None, local: bool) -> None:
    assert is_local(address) is local


async def test_without_keys_only_this_machine_is_answered() -> None:
    bench = ApiBench()
    async with calling(bench, address="10.0.0.9") as stranger:
        for response in (await stranger.post("/v1/programs", json=PROGRAM), await stranger.get("/v1/models")):
            assert (response.status_code, error_of(response)["code"]) == (403, "forbidden")
        assert (await stranger.get("/healthz")).status_code == 200, "probes come from elsewhere"
    async with calling(bench) as local:
        assert (await local.get("/v1/programs")).json()["data"] == []
    async with calling(ApiBench(open_without_keys=True), address="10.0.0.9") as guest:
        assert (await guest.post("/v1/programs", json=PROGRAM)).status_code == 202


@pytest.mark.parametrize("key", [None, "ck_guessed", digest(KEYS["root"])])
async def test_with_keys_everybody_needs_one(key: str | None) -> None:
    async with calling(guarded(), key) as client:
        response = await client.post("/v1/programs", content=b"not even read")
        assert (response.status_code, error_of(response)["code"]) == (401, "invalid_api_key")
        assert (await client.get("/readyz")).status_code == 200


async def test_a_key_allows_what_its_scopes_say() -> None:
    bench = guarded()
    async with calling(bench, "reader") as reader, calling(bench, "alice") as alice:
        refused = await reader.post("/v1/programs", json=PROGRAM)
        assert (refused.status_code, error_of(refused)["code"]) == (403, "forbidden")
        assert "'reader' does not have the scope 'submit'" in error_of(refused)["message"]
        assert (await alice.post("/v1/programs", json=PROGRAM)).status_code == 202
        assert (await reader.get("/v1/programs/p")).json()["tenant_id"] == "acme"


async def test_another_tenants_program_is_no_program() -> None:
    bench = guarded()
    async with calling(bench, "alice") as alice, calling(bench, "bob") as bob, calling(bench, "root") as root:
        await alice.post("/v1/programs", json=PROGRAM)
        bench.explained("globex/p", r1={"is_known": False})
        for method, path in [
            ("GET", "/v1/programs/p"),
            ("GET", "/v1/programs/p/events"),
            ("GET", "/v1/programs/p/explain"),
            ("POST", "/v1/programs/p/cancel"),
            ("DELETE", "/v1/programs/p"),
        ]:
            response = await bob.request(method, path)
            assert (response.status_code, error_of(response)["code"]) == (404, "program_not_found"), path
        outputs = {"tool_outputs": [{"call_id": "c", "output": "x"}]}
        assert (await bob.post("/v1/programs/p/tool_outputs", json=outputs)).status_code == 404
        going_on = {"previous_program_id": "p", "input": "x"}
        assert (await bob.post("/v1/programs", json=going_on)).status_code == 404
        await bob.post("/v1/programs", json={**PROGRAM, "program_id": "q"})
        listed = [[one["id"] for one in (await who.get("/v1/programs")).json()["data"]] for who in (alice, bob, root)]
        assert listed == [["p"], ["q"], ["q", "p"]]
        assert (await root.post("/v1/programs/p/cancel")).json()["state"] == "cancelled"


async def test_one_idempotency_key_of_two_tenants_is_two() -> None:
    bench = guarded()
    headers = {"Idempotency-Key": "once"}
    ids = []
    for name in ("alice", "bob"):
        async with calling(bench, name) as client:
            ids.append((await client.post("/v1/programs", json={"input": "Go."}, headers=headers)).json()["id"])
    assert len(set(ids)) == 2


async def test_tenants_meet_neither_in_the_cache_nor_under_one_program_id() -> None:
    turn = [OPENED, json.dumps({"choices": []}), CLOSED]
    bench = guarded([turn, turn, turn])
    chat = {"messages": [{"role": "user", "content": "Hi."}], "program_id": "mine", "cache_salt": "own"}
    for name in ("alice", "bob", "root"):
        async with calling(bench, name) as client:
            response = await client.post("/v1/chat/completions", json=chat)
            assert response.headers["x-continuum-program"] == "mine"
            await client.post("/v1/programs/mine/tool_events", json={"kind": "started", "tool": "x"})
    ids = [hints.program_id for hints in bench.engine.hints if hints is not None]
    assert ids == ["acme/mine", "globex/mine", "default/mine"]
    assert [hints.tenant_id for hints in bench.engine.hints if hints is not None] == ["acme", "globex", "default"]
    assert [event.program_id for event in bench.engine.events] == ids
    assert [body.get("cache_salt") for body in bench.engine.bodies] == ["tenant acme/own", "tenant globex/own", "own"]


async def test_a_tenants_programs_run_under_its_name_and_salt() -> None:
    bench, engine = guarded(), ScriptedEngine([answer("done")])
    async with calling(bench, "alice") as alice:
        await alice.post("/v1/programs", json=PROGRAM)
        await bench.run_one(engine)
        await alice.post("/v1/programs/p/tool_events", json={"kind": "started", "tool": "x"})
    assert (engine.bodies[0]["cache_salt"], engine.hints[0].tenant_id) == ("tenant acme", "acme")
    assert bench.engine.events[0].program_id == "p", "a program that the platform runs has one name"


# Settings and the command line


@pytest.mark.parametrize(
    "keys",
    [
        [{**SETTINGS[0], "sha256": KEYS["alice"]}],
        [{**SETTINGS[0], "scopes": []}],
        [{**SETTINGS[0], "scopes": ["all"]}],
        [{**SETTINGS[0], "tenant": "a/b"}],
        [SETTINGS[0], {**SETTINGS[1], "name": "alice"}],
        [SETTINGS[0], {**SETTINGS[1], "sha256": SETTINGS[0]["sha256"]}],
    ],
)
def test_wrong_keys_stop_the_start(keys: list[dict[str, Any]]) -> None:
    with pytest.raises(ValidationError):
        HttpSettings.model_validate({"api_keys": keys})


def test_a_platform_without_keys_is_not_opened_to_a_network_by_accident() -> None:
    for host in ("0.0.0.0", "::", "192.0.2.1"):
        with (
            pytest.raises(PlatformStartError, match=r"no API keys.*http\.open_without_keys"),
            local_platform(PlatformSettings(), ListenOn(host=host, port=0), on_stage=lambda _: None),
        ):
            raise AssertionError("it must not start")


def test_a_new_key_fits_the_settings_that_come_with_it() -> None:
    made = CliRunner().invoke(command_line, ["keys", "new", "ci", "--scope", "submit", "--tenant", "acme", "--json"])
    document = json.loads(made.stdout)
    entry = ApiKeySettings.model_validate(document["settings"])
    assert entry.sha256 == digest(document["key"])
    assert (entry.name, entry.tenant, entry.scopes) == ("ci", "acme", ("submit",))
    assert document["key"] not in json.dumps(document["settings"])
    assert CliRunner().invoke(command_line, ["keys", "new", "ci", "--tenant", "A B"]).exit_code == ExitCode.USAGE

"""A program's files over HTTP: in pieces, within bounds, for whoever may see the program."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest

from deployments.access import ApiKeySettings, digest, new_key
from deployments.workspace_api import PIECE_BYTES
from support.api import ApiBench, error_of

SUBMISSION = {"input": "Go.", "program_id": "p"}
FILES = "/v1/programs/p/workspace"


async def test_files_go_in_and_come_out_as_they_were() -> None:
    bench = ApiBench()
    async with bench.client() as client:
        await client.post("/v1/programs", json=SUBMISSION)
        put = await client.put(FILES, content=b"an archive")
        assert put.json() == {"object": "workspace", "program_id": "p", "entries": 1, "bytes": 10}
        got = await client.get(FILES)
    assert (got.content, got.headers["content-type"]) == (b"an archive", "application/x-tar")
    assert got.headers["content-disposition"] == 'attachment; filename="p.tar"'
    assert bench.workspaces.readings_ended == 1


async def test_files_may_be_there_before_their_program() -> None:
    bench = ApiBench()
    async with bench.client() as client:
        assert (await client.put(FILES, content=b"an archive")).status_code == 200
        assert (await client.get(FILES)).content == b"an archive"
        kept = (await client.post(f"{FILES}/snapshots")).json()["id"]
        await client.put(FILES, content=b"another")
        assert (await client.post(f"{FILES}/restore", json={"snapshot_id": kept})).status_code == 200
        await client.post("/v1/programs", json=SUBMISSION)
        assert (await client.get(FILES)).content == b"an archive"


async def test_without_a_program_and_without_files_the_program_is_what_is_missing() -> None:
    bench = ApiBench()
    async with bench.client() as client:
        for response in (await client.get(FILES), await client.post(f"{FILES}/snapshots")):
            assert (response.status_code, error_of(response)["code"]) == (404, "program_not_found")
            assert "no program 'p', and no files" in error_of(response)["message"]


async def test_files_before_a_program_are_there_for_their_tenant_only() -> None:
    keys = {name: new_key() for name in ("acme", "globex")}
    settings = [ApiKeySettings(name=name, sha256=digest(key), tenant=name) for name, key in keys.items()]
    bench = ApiBench(api_keys=settings)
    async with bench.client() as client:
        alice, bob = ({"authorization": f"Bearer {key}"} for key in keys.values())
        await client.put(FILES, content=b"secret", headers=alice)
        assert (await client.get(FILES, headers=bob)).status_code == 404
        assert (await client.post(f"{FILES}/snapshots", headers=bob)).status_code == 404
        # The id is nobody's yet: what the other tenant puts under it is its own.
        await client.put(FILES, content=b"other", headers=bob)
        assert (await client.get(FILES, headers=alice)).content == b"secret"
        # Once it is a program's, it is that tenant's alone.
        await client.post("/v1/programs", json=SUBMISSION, headers=alice)
        assert (await client.get(FILES, headers=bob)).status_code == 404
        assert (await client.get(FILES, headers=alice)).content == b"secret"


async def test_an_archive_passes_through_in_pieces() -> None:
    bench = ApiBench(archive_bytes_max=10 * PIECE_BYTES)
    async with bench.client() as client:
        response = await client.put(FILES, content=b"x" * (2 * PIECE_BYTES + 5))
    assert response.json()["bytes"] == 2 * PIECE_BYTES + 5
    assert max(bench.workspaces.piece_sizes) <= PIECE_BYTES


async def test_an_archive_that_is_too_large_is_refused_whether_or_not_it_says_so() -> None:
    bench = ApiBench(archive_bytes_max=2000)

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(5):
            yield b"x" * 1000

    async with bench.client() as client:
        for response in (await client.put(FILES, content=b"x" * 2001), await client.put(FILES, content=pieces())):
            assert (response.status_code, error_of(response)["code"]) == (413, "request_too_large")
    assert bench.workspaces.files == {}


async def test_an_upload_that_falls_silent_is_given_up() -> None:
    bench = ApiBench(body_read_timeout_s=0.05)

    async def stalls() -> AsyncIterator[bytes]:
        yield b"an arch"
        await asyncio.sleep(30)
        yield b"ive"

    async with bench.client() as client:
        response = await client.put(FILES, content=stalls())
    assert (response.status_code, error_of(response)["code"]) == (400, "invalid_request")
    assert bench.workspaces.files == {}


async def test_a_refused_archive_and_missing_files_are_errors_of_the_clients() -> None:
    bench = ApiBench()
    async with bench.client() as client:
        await client.post("/v1/programs", json=SUBMISSION)
        refused = await client.put(FILES, content=b"not a tar")
        empty = await client.get(FILES)
        nobody = await client.get("/v1/programs/nobody/workspace")
    assert (refused.status_code, error_of(refused)["code"]) == (422, "archive_refused")
    assert (empty.status_code, error_of(empty)["code"]) == (404, "workspace_not_found")
    assert (nobody.status_code, error_of(nobody)["code"]) == (404, "program_not_found")
    assert bench.workspaces.readings_ended == 2


async def test_a_reading_that_fails_is_broken_off_and_not_ended() -> None:
    bench = ApiBench()
    bench.workspaces.breaks_off = True
    async with bench.client() as client:
        await client.post("/v1/programs", json=SUBMISSION)
        await client.put(FILES, content=b"an archive")
        transport = httpx.ASGITransport(bench.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://api") as strict:
            with pytest.raises(RuntimeError, match="response already started"):
                await strict.get(FILES)
    assert bench.workspaces.readings_ended == 1


async def test_a_snapshot_puts_the_files_back() -> None:
    bench = ApiBench()
    async with bench.client() as client:
        await client.post("/v1/programs", json=SUBMISSION)
        await client.put(FILES, content=b"before")
        kept = await client.post(f"{FILES}/snapshots")
        assert kept.status_code == 201
        await client.put(FILES, content=b"after")
        back = await client.post(f"{FILES}/restore", json={"snapshot_id": kept.json()["id"]})
        assert (back.status_code, (await client.get(FILES)).content) == (200, b"before")
        unknown = await client.post(f"{FILES}/restore", json={"snapshot_id": "f" * 32})
        assert (unknown.status_code, error_of(unknown)["code"]) == (404, "snapshot_not_found")
        for body in ({}, {"snapshot_id": 7}, {"snapshot_id": ""}, {"snapshot_id": "x", "more": 1}, []):
            assert (await client.post(f"{FILES}/restore", json=body)).status_code == 400


async def test_another_tenants_files_are_not_there() -> None:
    keys = {name: new_key() for name in ("acme", "globex")}
    settings = [ApiKeySettings(name=name, sha256=digest(key), tenant=name) for name, key in keys.items()]
    bench = ApiBench(api_keys=settings)
    async with bench.client() as client:
        alice, bob = ({"authorization": f"Bearer {key}"} for key in keys.values())
        await client.post("/v1/programs", json=SUBMISSION, headers=alice)
        await client.put(FILES, content=b"secret", headers=alice)
        assert (await client.get(FILES, headers=bob)).status_code == 404
        assert (await client.put(FILES, content=b"x", headers=bob)).status_code == 404
        assert (await client.get(FILES, headers=alice)).content == b"secret"
    assert list(bench.workspaces.files) == [("acme", "p")]

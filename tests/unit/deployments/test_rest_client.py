"""The REST client: what it asks, what it makes of answers, and how a broken stream goes on."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from deployments.rest_client import (
    RECONNECTS_MAX,
    ClientError,
    RequestRefused,
    RestClient,
    ServerEvent,
    ServerUnreachable,
    parse_events,
)
from support.tiny_platform import TinyPlatform, program_object, running

STEPS = [(str(number), "turn.started", {"turn": number}) for number in range(1, 5)] + [("5", "program.ended", {})]


@pytest.fixture
def platform() -> TinyPlatform:
    return TinyPlatform()


@pytest.fixture
def client(platform: TinyPlatform) -> Iterator[RestClient]:
    with running(platform) as url, RestClient(url, sleep=lambda _: None) as client:
        yield client


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_a_submitted_program_comes_back_with_its_id(platform: TinyPlatform, client: RestClient) -> None:
    assert client.submit({"input": "hello"})["id"] == "prog_1"
    assert platform.submitted == [{"input": "hello"}]


def test_a_key_is_sent_as_a_bearer_token(platform: TinyPlatform) -> None:
    with running(platform) as url, RestClient(url, api_key="k-1") as client:
        client.tools()
    assert platform.authorizations == ["Bearer k-1"]


def test_an_unknown_program_is_a_refusal_with_the_servers_words(client: RestClient) -> None:
    with pytest.raises(RequestRefused, match="no program nobody") as refused:
        client.program("nobody")
    assert (refused.value.status, refused.value.code) == (404, "program_not_found")


def test_a_refusal_carries_when_to_try_again(platform: TinyPlatform, client: RestClient) -> None:
    platform.refusal = (429, {"retry-after": "7"}, '{"error": {"message": "too many", "code": "overloaded"}}')
    with pytest.raises(RequestRefused, match="too many") as refused:
        client.programs()
    assert refused.value.retry_after_s == 7.0


@pytest.mark.parametrize("body", ["<html>bad gateway</html>", "[]", '{"error": "plain"}', '{"error": {}}'])
def test_a_refusal_in_another_shape_keeps_its_text(platform: TinyPlatform, client: RestClient, body: str) -> None:
    platform.refusal = (502, {}, body)
    with pytest.raises(RequestRefused) as refused:
        client.programs()
    assert (refused.value.status, refused.value.code, str(refused.value)) == (502, None, body)


@pytest.mark.parametrize("body", ["not json", "[1]"])
def test_an_answer_that_is_no_json_object_is_an_error(platform: TinyPlatform, client: RestClient, body: str) -> None:
    platform.refusal = (200, {}, body)
    with pytest.raises(ClientError, match="not"):
        client.programs()


def test_where_nothing_listens_the_server_is_unreachable() -> None:
    with RestClient(f"http://127.0.0.1:{closed_port()}") as client:
        with pytest.raises(ServerUnreachable, match="no answer from"):
            client.models()
        assert not client.is_ready()


def test_a_server_that_answers_readyz_is_ready(client: RestClient) -> None:
    assert client.is_ready()


def test_events_come_in_order_with_their_ids(platform: TinyPlatform, client: RestClient) -> None:
    platform.events["p"] = STEPS
    assert list(client.events("p")) == [ServerEvent(id=i, name=n, data=d) for i, n, d in STEPS]


def test_events_can_begin_after_one(platform: TinyPlatform, client: RestClient) -> None:
    platform.events["p"] = STEPS
    assert [event.id for event in client.events("p", after="3")] == ["4", "5"]


@pytest.mark.parametrize("is_polite", [True, False])
def test_a_broken_stream_goes_on_after_the_last_event_and_repeats_none(
    platform: TinyPlatform, client: RestClient, is_polite: bool
) -> None:
    platform.events["p"], platform.break_after_events, platform.breaks_politely = STEPS, 2, is_polite
    assert [event.id for event in client.events("p")] == ["1", "2", "3", "4", "5"]
    assert platform.last_event_ids == [None, "2", "4"]


@pytest.mark.parametrize("is_polite", [True, False])
def test_a_stream_that_brings_nothing_any_more_is_given_up(
    platform: TinyPlatform, client: RestClient, is_polite: bool
) -> None:
    platform.programs["p"] = program_object("p", state="running")
    platform.events["p"], platform.break_after_events, platform.breaks_politely = STEPS, 0, is_polite
    with pytest.raises(ServerUnreachable):
        list(client.events("p"))
    assert len(platform.last_event_ids) == 1 + RECONNECTS_MAX


def test_after_its_last_event_an_ended_program_has_none(platform: TinyPlatform, client: RestClient) -> None:
    platform.programs["p"], platform.events["p"] = program_object("p"), STEPS
    assert list(client.events("p", after="5")) == []


def test_the_stream_of_an_unknown_program_is_refused(platform: TinyPlatform, client: RestClient) -> None:
    platform.refusal = (404, {}, '{"error": {"message": "no such program", "code": "program_not_found"}}')
    with pytest.raises(RequestRefused, match="no such program"):
        list(client.events("p"))


def test_data_of_several_lines_is_one_event_and_comments_are_none() -> None:
    lines = [": heartbeat", "", "id: 1", "event: x", 'data: {"a":', "data: 1}", "", "event: no-data", ""]
    assert list(parse_events(lines)) == [ServerEvent(id="1", name="x", data={"a": 1})]


def test_an_event_keeps_the_last_id_where_it_has_none() -> None:
    lines = ["id: 1", "data: {}", "", "data: {}", ""]
    assert [event.id for event in parse_events(lines)] == ["1", "1"]


def test_an_event_that_is_not_json_is_an_error() -> None:
    with pytest.raises(ClientError, match="not JSON"):
        list(parse_events(["data: nonsense", ""]))


def test_a_listing_is_filtered_by_the_server(platform: TinyPlatform, client: RestClient) -> None:
    platform.programs = {"a": program_object("a"), "b": program_object("b", state="failed")}
    assert [one["id"] for one in client.programs(state="failed")["data"]] == ["b"]

"""The wire between host and sandbox: what a hostile sandbox sends is a record, or an error."""

from __future__ import annotations

import json
import pickle
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tool_runtime.inside.frames import Decoder, FrameError, encode

NAMES = st.text(st.characters(min_codepoint=1, max_codepoint=127), max_size=20)


@given(st.lists(st.dictionaries(NAMES, st.binary(max_size=100), max_size=5), max_size=5), st.integers(1, 50))
def test_records_arrive_as_they_were_sent_however_the_stream_is_cut(
    records: list[dict[str, bytes]], piece: int
) -> None:
    stream = b"".join(encode(record) for record in records)
    decoder = Decoder()
    arrived = [record for at in range(0, len(stream), piece) for record in decoder.feed(stream[at : at + piece])]
    assert arrived == records


def test_texts_and_numbers_travel_as_bytes() -> None:
    assert Decoder().feed(encode({"a": "ü", "b": 3, "c": b"\0"})) == [{"a": "ü".encode(), "b": b"3", "c": b"\0"}]


@given(st.binary(max_size=200))
def test_nonsense_is_refused_or_waits_for_more(data: bytes) -> None:
    try:
        records = Decoder(1000).feed(data)
    except FrameError:
        return
    assert all(isinstance(value, bytes) for record in records for value in record.values())


@pytest.mark.parametrize(
    "data",
    [
        struct.pack(">I", 2**31),
        struct.pack(">I", 3) + b"\xff\x00\x00",
        struct.pack(">I", 6) + b"\x01a" + struct.pack(">I", 99),
        struct.pack(">I", 6) + b"\x01\xff" + struct.pack(">I", 0),
    ],
    ids=["huge", "name cut off", "value cut off", "name not text"],
)
def test_a_frame_that_is_none_is_an_error(data: bytes) -> None:
    with pytest.raises(FrameError):
        Decoder(1000).feed(data)


def test_pickles_and_json_are_data_and_nothing_more() -> None:
    payload = pickle.dumps({"x": 1}) + json.dumps({"ev": "done"}).encode()
    assert Decoder().feed(encode({"data": payload})) == [{"data": payload}]


def test_a_frame_that_is_too_large_is_not_sent() -> None:
    with pytest.raises(FrameError):
        encode({"data": b"x" * (21 * 1024 * 1024)})

"""Tiers below the GPU: what host memory and disk hold, and how long it takes to bring it back. Pure.

Every block that a turn fills is stored below as well (write-through), so a block that the GPU gives up is only gone when no
tier has it. Each tier is a least-recently-used list of block hashes; what a tier pushes out moves to the next one, and out
of the last. Loads of one replica share one link and run in order of their start:

    done = max(now, when the link is free) + 30 µs + bytes of each tier / that tier's rate

Stores use the link's other direction and are not charged.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from agent_program.errors import InvalidRequest

LOAD_LATENCY_S = 30e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class Tier:
    """One place below the GPU, for all GPUs of a replica together."""

    name: str
    capacity_bytes: float
    #: What loads from it reach.
    bytes_per_s: float

    def __post_init__(self) -> None:
        if self.capacity_bytes <= 0 or self.bytes_per_s <= 0:
            raise InvalidRequest(f"tier {self.name} needs a capacity and a rate above 0", param="offload")


class TieredStore:
    """Which blocks each tier holds."""

    def __init__(self, tiers: Sequence[Tier], block_bytes: float) -> None:
        self.tiers = tuple(tiers)
        self._block_bytes = block_bytes
        self._capacity = [max(1, int(tier.capacity_bytes // block_bytes)) for tier in tiers]
        self._blocks: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in tiers]

    def __len__(self) -> int:
        return sum(len(blocks) for blocks in self._blocks)

    def store(self, hashes: Iterable[bytes]) -> None:
        """Put blocks into the first tier, as its most recently used; those that it has already are refreshed."""
        for block in hashes:
            for below in self._blocks[1:]:
                below.pop(block, None)
            self._blocks[0][block] = None
            self._blocks[0].move_to_end(block)
        self._push_down()

    def run_length(self, hashes: Sequence[bytes]) -> int:
        """How many leading blocks of `hashes` some tier holds."""
        for index, block in enumerate(hashes):
            if not any(block in blocks for blocks in self._blocks):
                return index
        return len(hashes)

    def seconds_to_load(self, hashes: Iterable[bytes]) -> float:
        """Time on the link for these blocks, each from the tier that holds it."""
        seconds = LOAD_LATENCY_S
        for block in hashes:
            for tier, blocks in zip(self.tiers, self._blocks, strict=True):
                if block in blocks:
                    seconds += self._block_bytes / tier.bytes_per_s
                    break
        return seconds

    def drop(self, hashes: Iterable[bytes]) -> None:
        """Forget blocks, wherever they are."""
        for block in hashes:
            for blocks in self._blocks:
                blocks.pop(block, None)

    def _push_down(self) -> None:
        for index, (blocks, capacity) in enumerate(zip(self._blocks, self._capacity, strict=True)):
            while len(blocks) > capacity:
                block, _ = blocks.popitem(last=False)
                if index + 1 < len(self._blocks):
                    self._blocks[index + 1][block] = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """A load under way."""

    request_id: str
    tokens: int
    started_s: float
    done_s: float


class Link:
    """The one way from the tiers to the GPU."""

    def __init__(self) -> None:
        self._free_s = 0.0
        self._loads: list[Load] = []

    def start(self, request_id: str, *, tokens: int, seconds: float, now_s: float) -> Load:
        """Queue a load that needs `seconds` on the link."""
        self._free_s = max(now_s, self._free_s) + seconds
        load = Load(request_id=request_id, tokens=tokens, started_s=now_s, done_s=self._free_s)
        self._loads.append(load)
        return load

    @property
    def next_done_s(self) -> float | None:
        """When the next load is done; None with nothing under way."""
        return self._loads[0].done_s if self._loads else None

    def take_done(self, now_s: float) -> list[Load]:
        """The loads that are done by now; each is returned once."""
        done = [load for load in self._loads if load.done_s <= now_s]
        self._loads = self._loads[len(done) :]
        return done

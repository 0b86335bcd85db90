"""The controller that the settings ask for: alone, or with a shadow that looks on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from engine_replicas.config import SchedulingSettings
from engine_replicas.policies import named_policies
from engine_replicas.retention.controller import RetentionController
from engine_replicas.retention.policy import Estimates
from engine_replicas.retention.shadow import Shadow
from engine_replicas.retention.shadowed_controller import ShadowedController


def new_controller(
    settings: SchedulingSettings,
    estimates: Estimates,
    *,
    new_estimates: Callable[[], Estimates],
    blocks_total: int,
    block_tokens: int,
    free_blocks: Callable[[], int],
    **arguments: Any,
) -> tuple[RetentionController, tuple[Estimates, ...]]:
    """The controller, and all estimates whose cost fits are to be fed from the engine's steps and loads.

    Args:
        settings: with or without a `shadow`.
        estimates: those of the policy that acts.
        new_estimates: makes some that know nothing yet.
        blocks_total: KV blocks of the engine.
        block_tokens: tokens in a block.
        free_blocks: how many blocks nobody holds now.
        arguments: the others of `RetentionController`.
    """
    arguments |= {"settings": settings, "estimates": estimates, "blocks_total": blocks_total}
    of_shadow = settings.of_shadow()
    if of_shadow is None:
        return RetentionController(**arguments), (estimates,)
    # Looking at a fit may renew it, so a shadow fits for itself; the rest is only looked at.
    seen = replace(new_estimates(), tools=estimates.tools, queueing_delay=estimates.queueing_delay, eta=estimates.eta)
    deciding = named_policies(of_shadow, seen)
    shadow = Shadow(
        settings=of_shadow,
        policy=deciding.retention,
        reclaiming=deciding.reclaiming,
        estimates=seen,
        blocks_total=blocks_total,
        block_tokens=block_tokens,
    )
    return ShadowedController(shadow, free_blocks=free_blocks, **arguments), (estimates, seen)

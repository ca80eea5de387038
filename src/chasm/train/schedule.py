"""Which slices a step takes and how far it goes: of the seed and the step alone, so that a resumed run is the same."""

import math
from functools import lru_cache

import torch


def learning_rate(step: int, steps: int, warmup: int, peak: float, final: float) -> float:
    """Linear warm-up to `peak`, then a cosine that ends at `final` with the last step."""
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(steps - 1 - warmup, 1)
    return final + (peak - final) * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))


def steps_per_epoch(n: int, batch: int) -> int:
    """The incomplete last batch is dropped; fewer slices than one batch are repeated in it."""
    return max(n // batch, 1)


def rows_of_step(step: int, n: int, batch: int, seed: int) -> list[int]:
    """The slices of a step: a fresh permutation per epoch."""
    epoch, place = divmod(step, steps_per_epoch(n, batch))
    order = _order(epoch, n, seed)
    return [order[i % n] for i in range(place * batch, (place + 1) * batch)]


@lru_cache(maxsize=2)
def _order(epoch: int, n: int, seed: int) -> list[int]:
    order: list[int] = torch.randperm(n, generator=torch.Generator().manual_seed((seed << 20) + epoch)).tolist()
    return order


def flips_of_step(step: int, batch: int, seed: int) -> list[int]:
    """Which of its slices a step mirrors: for each one 0, 1 (left to right), 2 (top to bottom) or 3 (both)."""
    generator = torch.Generator().manual_seed((1 << 61) + (seed << 28) + step)
    flips: list[int] = torch.randint(4, (batch,), generator=generator).tolist()
    return flips

"""The slices and the step size of each step. Both depend on seed and step only, so that resuming changes nothing."""

import math
from functools import lru_cache

import torch


def learning_rate(step: int, steps: int, warmup: int, peak: float, final: float) -> float:
    """Return the step size: linear warm-up to `peak`, then a cosine that ends at `final` with the last step.

    Args:
        step: number of the step, from 0.
        steps: steps of the whole run.
        warmup: steps of the warm-up.
        peak: largest step size.
        final: step size of the last step.

    >>> [round(learning_rate(step, 5, 2, 1.0, 0.0), 3) for step in range(5)]
    [0.5, 1.0, 1.0, 0.5, 0.0]
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(steps - 1 - warmup, 1)
    return final + (peak - final) * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))


def steps_per_epoch(n: int, batch: int) -> int:
    """Return the number of steps that see every slice once.

    The incomplete last batch is dropped. If there are fewer slices than one batch, they are repeated to fill it.
    """
    return max(n // batch, 1)


def rows_of_step(step: int, n: int, batch: int, seed: int) -> list[int]:
    """Return the numbers of the slices of a step. Each epoch has its own permutation.

    Args:
        step: number of the step, from 0.
        n: number of slices.
        batch: slices per step.
        seed: seed of the run.
    """
    epoch, place = divmod(step, steps_per_epoch(n, batch))
    order = _order(epoch, n, seed)
    return [order[i % n] for i in range(place * batch, (place + 1) * batch)]


@lru_cache(maxsize=2)
def _order(epoch: int, n: int, seed: int) -> list[int]:
    order: list[int] = torch.randperm(n, generator=torch.Generator().manual_seed((seed << 20) + epoch)).tolist()
    return order


def seeds_of_step(step: int, batch: int, seed: int) -> list[int]:
    """Return a seed for each slice of a step, for what the task draws.

    Args:
        step: number of the step, from 0.
        batch: slices per step.
        seed: seed of the run.
    """
    generator = torch.Generator().manual_seed((1 << 62) + (seed << 28) + step)
    seeds: list[int] = torch.randint(2**31, (batch,), generator=generator).tolist()
    return seeds

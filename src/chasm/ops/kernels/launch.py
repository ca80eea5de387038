"""Launching Triton kernels: on the right device, with blocks that fit there.

Block sizes stand beside each kernel, chosen on an H200. They depend on the card through three properties only: its
multiprocessors, whether a block may have as much shared memory as on Hopper, and whether it is a Blackwell.
"""

from functools import cache
from math import gcd
from typing import Any

import torch
from torch import Tensor

HOPPER_SHARED_MEMORY = 227 * 1024  # bytes


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Run a kernel on the device of its first argument, a tensor."""
    with torch.cuda.device_of(args[0]):
        kernel[grid](*args, **options)


def multiprocessors(x: Tensor) -> int:
    """Return how many multiprocessors the card of x has; in the interpreter as many as an H200."""
    return _multiprocessors(x.device) if x.is_cuda else 132


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def is_large_card(x: Tensor) -> bool:
    """Return True if a block may have as much shared memory as on Hopper, and in the interpreter. GeForce has less."""
    return not x.is_cuda or has_large_blocks(x.device)


def has_large_blocks(device: torch.device) -> bool:
    """Return True if a block on this CUDA device may have as much shared memory as on Hopper."""
    return _shared_memory(device) >= HOPPER_SHARED_MEMORY


def is_blackwell(device: torch.device) -> bool:
    """Return True for a CUDA device of compute capability 10.x (B200).

    A block may have as much shared memory there as on Hopper, but Triton 3.6 takes a quarter more of it for products,
    and every running sum of a product takes tensor memory, which is small.
    """
    return device.type == "cuda" and _capability(device)[0] == 10


is_blackwell._dynamo_marked_constant = True  # type: ignore[attr-defined]  # to the compiler it is a constant


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@cache
def _shared_memory(device: torch.device) -> int:
    from triton.runtime import driver

    index = torch.cuda.current_device() if device.index is None else device.index
    return int(driver.active.utils.get_device_properties(index)["max_shared_mem"])


has_large_blocks._dynamo_marked_constant = True  # type: ignore[attr-defined]  # to the compiler it is a constant


def cdiv(a: int, b: int) -> int:
    """Return a / b, rounded up. `triton.cdiv` takes microseconds, which add up over the kernels of a step."""
    return -(-a // b)


def power_of_2(n: int, least: int = 1) -> int:
    """Return the smallest power of two that is at least n and at least `least`."""
    return max(least, 1 << (n - 1).bit_length())


def alignment(n: int) -> int:
    """Return the largest power of two, up to 16, that divides n.

    Kernels take n as a number of units of this size, so that the compiler knows how rows are aligned.
    """
    return gcd(n, 16)

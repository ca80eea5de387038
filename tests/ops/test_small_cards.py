"""The kernels that run on every card fit one with 99 KB of shared memory for a block: compiled for it, not run.

In a process of its own, which believes to have such a card: triton keeps what it compiled.
"""

import json
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import pytest
import torch

CARDS = {86: 101376, 120: 101376}  # compute capability -> bytes; GeForce RTX 30 and 50


@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
@pytest.mark.parametrize("capability", CARDS)
def test_blocks_fit(capability: int) -> None:
    done = subprocess.run([sys.executable, __file__, str(capability)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert {"_pairs_kernel", "_product_kernel", "_weight_kernel", "_scale_kernel"} <= {name for name, _, _ in found}
    assert [f for f in found if f[2] > CARDS[capability]] == []


def compile_for(capability: int) -> list[tuple[str, str, int]]:
    """Kernel, what it was compiled for, bytes it takes."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    class Card:
        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", capability, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

    found, what, run = [], "", JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        found.append((self.fn.__name__, what, kernel.metadata.shared))

    driver.set_active(Card())
    JITFunction.run = compile_only
    from chasm.ops.kernels import products, small, spectrum

    for module in (products, small):
        module.roomy = lambda x: False
    for C in (96, 192, 1024):
        what = f"{C} channels"
        U, g = torch.zeros(1, C, C, dtype=torch.float64), torch.zeros(1, C, C)
        pair, nodes = torch.zeros(2, 1, C, C).half(), torch.zeros(2, 1, C, 4, C).half()
        _, largest = small.skew_part(U, g)
        small.product(g, g, torch.zeros(1, C, C))
        small.pairs(pair, g, largest)
        small.pairs(pair, pair.mT, factor=0.5, both=True)
        small.pairs(pair, nodes.permute(0, 3, 1, 2, 4))
        small.pairs(nodes.flatten(3), torch.zeros(2, 1, 4 * C, C).half(), largest, triangle=True)
    for C in (64, 96, 512):
        for dtype in (torch.float32, torch.bfloat16):
            what = f"{C} channels of {dtype}"
            x = torch.zeros(8, C, 64, 64, dtype=dtype)
            products.product(torch.zeros(C, C, dtype=dtype), x, torch.zeros(C), x)
            products.gram_and_sum(x, x)
    spectrum.scale_both(torch.zeros(2, 3, 40), torch.zeros(2, 3, 40), torch.zeros(3, 5), 4)
    return found


if __name__ == "__main__":
    print(json.dumps(compile_for(int(sys.argv[1]))))

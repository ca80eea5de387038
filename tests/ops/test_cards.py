"""The kernels compile for cards of several generations and fit their memory: compiled for them, not run.

In a process of its own for each, which believes to have such a card: triton keeps what it compiled.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import pytest
import torch

# compute capability -> bytes of shared memory for a block: GeForce RTX 30 (as 40 and 50); H100 and H200; B200
CARDS = {86: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
TENSOR_MEMORY = 512  # columns that the sums of a block may take on a B200; other cards have no such memory
LARGEST = {  # those that take most
    86: {"_product_kernel", "_pairs_kernel", "_pass_in_blocks_kernel", "_gradient_kernel", "_weight_kernel"},
    90: {"_pass_kernel", "_pass_in_blocks_kernel", "_gradient_kernel", "_walk_kernel", "_both_kernel"},
    100: {"_product_kernel", "_pairs_kernel", "_pass_kernel", "_pass_in_blocks_kernel", "_gradient_kernel"},
}


@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
@pytest.mark.parametrize("capability", CARDS)
def test_blocks_fit(capability: int) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, __file__, str(capability)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert {name for name, *_ in found} >= LARGEST[capability]
    assert [f for f in found if f[2] > CARDS[capability] or f[3] > TENSOR_MEMORY] == []


def compile_for(capability: int) -> list[tuple[str, str, int, int]]:
    """Kernel, what it was compiled for, bytes of shared memory and columns of tensor memory that it takes."""
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
        found.append((self.fn.__name__, what, kernel.metadata.shared, kernel.metadata.tmem_size or 0))

    driver.set_active(Card())
    JITFunction.run = compile_only
    from chasm import ops
    from chasm.backbones.hifi.kernels import depthwise_triton, norm_triton
    from chasm.ops import basis
    from chasm.ops.forms.base import Passes
    from chasm.ops.forms.triton import Triton
    from chasm.ops.kernels import basis as basis_kernels
    from chasm.ops.kernels import circulant, layout_triton, local_triton, mixing, products, spectrum
    from chasm.ops.selective_scan import kernels as scan
    from chasm.ops.selective_scan.reference import ScanInputs

    for module in (basis_kernels, circulant, products):
        module.is_large_card = lambda x: capability >= 90
    for module in (basis_kernels, mixing):
        module.is_blackwell = lambda device: capability == 100
    basis._has_kernels = lambda theta: True
    C = 96 if capability == 90 else 192  # by kernels that hold a whole matrix, and by others
    what = f"basis, {C} channels"
    theta = torch.zeros(1, C * (C - 1) // 2)
    _, kept = basis.forward(theta)
    basis.backward(torch.zeros(1, C, C), theta, kept)
    what, pair = "basis, 1024 channels", torch.zeros(2, 1, 1024, 1024, dtype=torch.float16)
    basis_kernels.product_of_pairs(pair, pair, both=True)
    for channels, n, dims in ((C, 250, (2, 3)), (16, 600, (3,))):
        what = f"triton, {channels} channels, length {n}"
        x = torch.zeros(2, channels, n, n, dtype=torch.bfloat16)
        gains, bases = [torch.ones(n // 2 + 1, channels)] * len(dims), [torch.eye(channels)] * len(dims)
        form, passes = Triton(), Passes(dims, gains, bases)
        constants = form.prepare(x.shape, passes, x.dtype, True)
        y, kept = form.forward(x, dims, constants, True, True)
        form.backward(y, kept, passes, constants, True, x, True)
    what = "products of float32"
    for channels in (72, 96, 112, 128) if capability >= 90 else ():  # by matrices that stay in shared memory
        x, gains = torch.zeros(2, channels, 4096), torch.zeros(channels, 33)
        mixing.product(torch.eye(channels), x, gains)
        mixing.product(torch.eye(channels), x, bias=gains[:, 0], add=x)
    what = f"layers, {C} channels of float32"
    x = torch.zeros(2, C, 64, 64)
    weights = torch.zeros(C, 1, 3, 3), torch.zeros(C), torch.zeros(C, C, 1, 1)
    local_triton.forward(x, x, *weights, torch.zeros(C))
    local_triton.backward(x, x, *weights)
    spectrum.scale_both(torch.zeros(2, 3, 40), torch.zeros(2, 3, 40), torch.zeros(3, 5), 4)
    layout_triton.copied(torch.zeros(2, 96, 64, 64), True)
    what = "HiFi-Mamba"
    x, weight = torch.zeros(2, 64, 240, dtype=torch.bfloat16), torch.zeros(240)
    _, statistics = norm_triton.forward(x, weight, weight, 1e-5)
    norm_triton.backward(x, x, weight, weight, statistics)
    x, taps = torch.zeros(2, 64, 64, 240, dtype=torch.bfloat16), torch.zeros(240, 1, 3, 3)
    depthwise_triton.convolve(x, taps, weight)
    depthwise_triton.weight_gradients(x, x)
    u, b = torch.zeros(1, 96, 128, dtype=torch.bfloat16), torch.zeros(1, 16, 128)
    inputs = ScanInputs(u, u, torch.zeros(96, 16), b, b, weight[:96], weight[:96], True)
    y, states = scan.forward(inputs)
    scan.backward(y, states, inputs)
    if capability == 90:  # others take "triton" in its place
        what, x = "fused", torch.zeros(2, 96, 2, 256, dtype=torch.bfloat16)
        operators = [ops.AxisOperator(3, torch.eye(96), torch.ones(129, 96))]
        ops.run(x, [ops.Chain("fused", x.dtype, operators)])
    return found


if __name__ == "__main__":
    print(json.dumps(compile_for(int(sys.argv[1]))))

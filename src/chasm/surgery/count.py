"""Count the cost of a model: parameters, multiply-adds of one forward pass, memory kept for the backward pass.

>>> import torch, chasm
>>> cost = chasm.count(torch.nn.Conv2d(8, 8, 3, padding=1), torch.randn(1, 8, 16, 16))
>>> cost.params, cost.total  # 8*8*9 + 8 and 16*16 * 8*8*9
(584, 147456)

Conventions. A multiply-add (MAC) is one real multiplication with its addition; a bias, norm, activation, real
elementwise product, resampling or copy counts nothing, and neither does an operator without a formula.

conv                output positions * weight numel (input positions when transposed); padding is not deducted
matmul              rows * columns * inner length of every matrix product (linear, einsum, matmul)
  complex           of conv and matmul: 4 for every complex multiply-add
complex product     elementwise: 4 for complex * complex, 2 for complex * real
fft                 n-point complex: n/2 log2(n) butterflies of one complex multiply-add each = 2 n log2(n);
                    real, either way: half of that, n log2(n). Over several axes: the real one first, then the
                    others on its n//2 + 1 bins. Nominal where n is no power of two.
matrix exponential  of torch: (5 + s) n^3, a Taylor polynomial of degree 18 in five products, then
                    s = max(0, ceil(log2(|A|_1 / t))) squarings, t = 3.01 (float64: 1.09); of chasm: its products
interpolation       of gain tables and stored filters to the bins of the input: its matrix products
attention           L S (E + E_v) for each head of scaled_dot_product_attention (causality is not deducted);
                    attention written out as products is matmul
scan                9 D N + D for each token of a selective scan with D channels and N states
other               operators that another package registered with torch.utils.flop_counter.register_flop_formula

merged bases        products of the bases of two passes of CHASM
gain transform      from CHASM's gains over frequency to kernels over positions

``total`` adds up all kinds, of one call with the batch it is given. Matrix exponential, interpolation, merged bases
and gain transform are work on the weights: once per call whatever the batch, in evaluation once for all calls.
``inference`` leaves them out. Which kinds there are otherwise follows the form that runs: a GPU and a CPU take
different products for the same operator.

``paper`` is what the paper's FLOPs table seems to add up [reading]: conv, matmul and scan, with a complex
multiply-add counted once. Of CHASM it counts the products of the paper's equations, whatever form and device.

``saved_bytes`` is the memory autograd keeps for the backward pass when the forward pass ends: distinct
storages, whole even where only a view is saved, less the parameters and buffers of the model. The input
counts if a layer saves it. Tensors that a custom function keeps as attributes of its context are not seen.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from chasm.common.cost import WEIGHT_KINDS, Tally, measuring
from chasm.surgery.param_groups import listed_parameters

aten = torch.ops.aten
_FUSED_ATTENTION = (
    "flash_attention",
    "flash_attention_for_cpu",
    "efficient_attention",
    "cudnn_attention",
    "fused_attention_overrideable",
)


@dataclass(frozen=True)
class Cost:
    """What a model costs, by the conventions above (`help(chasm.surgery.count)`).

    Attributes:
        params: parameters, a complex one counted once.
        params_real: parameters, a complex one counted as two.
        macs: multiply-adds by kind.
        paper: multiply-adds as the paper seems to count them, the same for every form and device.
        saved_bytes: memory kept for the backward pass.
    """

    params: int
    params_real: int
    macs: dict[str, int]
    paper: int
    saved_bytes: int

    @property
    def total(self) -> int:
        """Multiply-adds of all kinds, of one forward call."""
        return sum(self.macs.values())

    @property
    def inference(self) -> int:
        """Multiply-adds of a call in evaluation, where work on the weights is done once and kept."""
        return sum(n for kind, n in self.macs.items() if kind not in WEIGHT_KINDS)

    def __str__(self) -> str:
        kinds = ", ".join(f"{kind} {n / 1e6:.2f}M" for kind, n in Counter(self.macs).most_common())
        return (
            f"parameters {self.params:,} (complex as two: {self.params_real:,}); "
            f"multiply-adds {self.total / 1e6:.2f}M ({kinds or 'none'}), "
            f"{self.inference / 1e6:.2f}M once the weights are prepared, "
            f"{self.paper / 1e6:.2f}M by the paper's convention; "
            f"saved for backward {self.saved_bytes / 2**20:.2f} MiB"
        )


def count(model: nn.Module, *inputs: Any, **named_inputs: Any) -> Cost:
    """Count what a forward pass costs, in the mode (train or eval) that the model is in.

    One forward pass is run. Buffers, such as running statistics, and the random state are left as they were. A model
    and inputs on the "meta" device need no memory.

    Args:
        model: the network.
        *inputs: its positional arguments.
        **named_inputs: its named arguments.

    Returns:
        Parameters, multiply-adds by kind, and memory kept for the backward pass.

    Example:
        >>> cost = count(nn.Linear(8, 4), torch.zeros(2, 8))
        >>> cost.params, cost.macs
        (36, {'matmul': 64})
    """
    model = getattr(model, "_orig_mod", model)  # a compiled model runs eagerly here, and warns about it
    tally = Tally()
    own = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
    saved: dict[int, torch.UntypedStorage] = {}  # key: address, which is not used again while the storage is held

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage._cdata not in own:
            saved[storage._cdata] = storage
        return t

    buffers = [(b, b.detach().clone()) for b in model.buffers()]
    try:
        with (
            torch.random.fork_rng(sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})),
            torch.enable_grad(),
            torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t),
            measuring(tally),
            _eager_attention(tally),
            FlopCounterMode(display=False, custom_mapping=_formulas(tally)),
        ):
            model(*inputs, **named_inputs)
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
    once, twice = count_parameters(model)
    return Cost(once, twice, dict(tally.macs), tally.paper, sum(s.nbytes() for s in saved.values()))


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """Count the parameters of a model. A shared parameter counts once.

    Complex parameters are those of a complex dtype, and real pairs that a module names in `complex_parameters`.

    Returns:
        The number with a complex parameter counted once, and with it counted as two.

    Example:
        >>> count_parameters(nn.Linear(8, 4))
        (36, 36)
    """
    pairs = {id(p) for p in listed_parameters(model, "complex_parameters")}
    once = twice = 0
    for p in model.parameters():
        numbers = p.numel() // 2 if id(p) in pairs else p.numel()
        once += numbers
        twice += 2 * numbers if id(p) in pairs or p.is_complex() else numbers
    return once, twice


@contextmanager
def _eager_attention(tally: Tally) -> Iterator[None]:
    """Run transformer layers without the fused fast path, and count the products of attention as attention."""
    fast_path, sdpa = torch.backends.mha.get_fastpath_enabled(), F.scaled_dot_product_attention

    def named(*args: Any, **kwargs: Any) -> Tensor:
        with tally.section("attention", None):
            return sdpa(*args, **kwargs)

    torch.backends.mha.set_fastpath_enabled(False)
    F.scaled_dot_product_attention = named
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
        F.scaled_dot_product_attention = sdpa


def _fft_macs(n: int) -> float:
    """Return the multiply-adds of an n-point complex transform."""
    return 2 * n * math.log2(n) if n > 1 else 0.0


def _formulas(tally: Tally) -> dict[Any, Callable[..., int]]:
    """Return the function of each operator that adds its cost to the tally, from its arguments and result."""

    def product(kind: str, macs: int, out: Tensor) -> None:
        tally.add(kind, 4 * macs if out.is_complex() else macs, paper=macs)

    def matmul(a: Tensor, b: Tensor, *_: Any, out_val: Tensor, **__: Any) -> None:
        product("matmul", out_val.numel() * a.shape[-1], out_val)

    def add_matmul(_: Tensor, a: Tensor, b: Tensor, *__: Any, out_val: Tensor, **___: Any) -> None:
        matmul(a, b, out_val=out_val)

    def conv(x: Tensor, w: Tensor, *rest: Any, out_val: Tensor, **_: Any) -> None:
        transposed = rest[4]  # after bias, stride, padding, dilation
        positions = math.prod((x if transposed else out_val).shape[2:])
        product("conv", x.shape[0] * positions * w.numel(), out_val)

    def mul(a: Any, b: Any, *_: Any, out_val: Tensor, **__: Any) -> None:
        if out_val.is_complex() and isinstance(a, Tensor) and isinstance(b, Tensor) and a.ndim and b.ndim:
            tally.add("complex product", (4 if a.is_complex() and b.is_complex() else 2) * out_val.numel())

    def attention(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> None:  # (B, heads, L or S, E or E_v)
        tally.add("attention", math.prod(q.shape[:-1]) * k.shape[-2] * (q.shape[-1] + v.shape[-1]))

    def c2c(x: Tensor, dims: list[int], *_: Any, **__: Any) -> None:
        tally.add("fft", round(sum(x.numel() // x.shape[d] * _fft_macs(x.shape[d]) for d in dims)))

    def r2c(x: Tensor, dims: list[int], *_: Any, out_val: Tensor, **__: Any) -> None:
        *others, last = dims
        n = x.shape[last]
        tally.add("fft", round(x.numel() // n * _fft_macs(n) / 2))
        half = x.narrow(last, 0, n // 2 + 1)  # the rest is its mirror image, even where it is written out
        c2c(half, others)

    def c2r(x: Tensor, dims: list[int], _: Any, n: int, **__: Any) -> None:
        *others, last = dims
        c2c(x, others)
        tally.add("fft", round(x.numel() // x.shape[last] * _fft_macs(n) / 2))

    def matrix_exp(A: Tensor, **_: Any) -> None:
        norm = 0.0 if A.is_meta or not A.numel() else A.detach().abs().sum(-2).max().item()
        scale = norm / (1.09 if A.dtype in (torch.float64, torch.complex128) else 3.01)
        squarings = math.ceil(math.log2(scale)) if scale > 1 else 0
        n = A.shape[-1]
        tally.add("matrix exponential", (5 + squarings) * A.numel() * n * (4 if A.is_complex() else 1))

    def booked(formula: Callable[..., None]) -> Callable[..., int]:
        def call(*args: Any, **kwargs: Any) -> int:
            formula(*args, **kwargs)
            return 0

        call._get_raw = True  # type: ignore[attr-defined]  # tensors, not their shapes: the dtype matters
        return call

    def other(formula: Callable[..., int]) -> Callable[..., None]:
        return lambda *args, **kwargs: tally.add("other", formula(*args, **kwargs) // 2)

    formulas: dict[Any, Callable[..., None]] = {
        **dict.fromkeys((aten.mm, aten.bmm, aten.mv, aten.dot, aten.vdot), matmul),
        **dict.fromkeys((aten.addmm, aten.baddbmm, aten.addmv), add_matmul),
        **dict.fromkeys((aten.convolution, aten._convolution), conv),
        **dict.fromkeys((aten.mul, aten.mul_), mul),
        **{getattr(aten, f"_scaled_dot_product_{name}"): attention for name in _FUSED_ATTENTION},
        aten._fft_c2c: c2c,
        aten._fft_r2c: r2c,
        aten._fft_c2r: c2r,
        aten.linalg_matrix_exp: matrix_exp,
    }
    others = {op: other(formula) for op, formula in flop_registry.items() if op not in formulas}
    return {op: booked(formula) for op, formula in (others | formulas).items()}

"""The layers around the core, Y = X + P(gelu(L(Z))): L a depthwise 3x3 with zeros around, P a 1x1, both with bias.

Forward and backward without autograd, for the operator in `block`. Kernels run on a GPU; on a CPU the core hands over Z
channels last, which torch's depthwise convolution is fastest in, and P writes NCHW again.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import conv2d, gelu

from chasm.common.cost import counted_as
from chasm.ops.kernels import IS_INTERPRETED, has_triton
from chasm.ops.kernels.layout import contiguous

KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_KERNEL_POSITIONS = 2**22  # of an image: offsets inside a tile are 32 bits wide


def obstacle(z: Tensor, dtype: torch.dtype | None = None) -> str | None:
    """Return why the kernels cannot run on z, or on z in another dtype; None if they can."""
    dtype = z.dtype if dtype is None else dtype
    if z.ndim != 4:
        return f"it needs features (B, C, H, W), got {z.ndim} axes"
    if dtype not in KERNEL_DTYPES:
        return f"it needs bfloat16, float16 or float32, got {dtype}"
    if z.shape[2] * z.shape[3] > MAX_KERNEL_POSITIONS:
        return f"it needs images of at most {MAX_KERNEL_POSITIONS} positions, got {z.shape[2]}x{z.shape[3]}"
    if not z.is_cuda and not IS_INTERPRETED:
        return f"it needs a CUDA tensor, got one on {z.device.type}"
    return None if has_triton() else "triton cannot be imported"


def forward(z: Tensor, x: Tensor | None, parameters: Sequence[Tensor], save: bool) -> tuple[Tensor, list[Tensor]]:
    """Return Y, and with `save` what the backward needs.

    Args:
        z: (B, C, H, W) in the dtype to compute in.
        x: like z, of any real dtype, or None to leave it out.
        parameters: weights (C, 1, 3, 3) and (C, C, 1, 1), each followed by its bias (C,).
        save: whether a backward follows.
    """
    with counted_as("conv", macs=z.numel() * (9 + z.shape[1])):
        if z.is_cuda or IS_INTERPRETED:
            from chasm.ops.kernels import local_triton  # imports triton, which is not installed everywhere

            z = contiguous(z)
            return local_triton.forward(z, None if x is None else contiguous(x), *parameters), [z] if save else []
        return _forward_on_cpu(z, x, save, *parameters)


def backward(g: Tensor, saved: Sequence[Tensor], parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients of z and of all parameters.

    Args:
        g: gradient of Y, contiguous and in z's dtype.
        saved: from `forward`.
        parameters: as in `forward`.
    """
    if len(saved) > 1:
        return _backward_on_cpu(g, *saved, *parameters[:3])
    from chasm.ops.kernels import local_triton

    gz, *d_parameters = local_triton.backward(g, saved[0], *parameters[:3])
    return [gz, *(d.to(p.dtype) for d, p in zip(d_parameters, parameters, strict=True))]


def count_saved(z: Tensor) -> int:
    """Return how many tensors `forward` saves."""
    return 1 if z.is_cuda or IS_INTERPRETED else 3


def _forward_on_cpu(
    z: Tensor, x: Tensor | None, save: bool, dw_weight: Tensor, dw_bias: Tensor, pw_weight: Tensor, pw_bias: Tensor
) -> tuple[Tensor, list[Tensor]]:
    # What torch's compiler makes of the two, where no backward follows.
    fused = None if save or z.dtype != torch.float32 else getattr(torch.ops.mkldnn, "_convolution_pointwise", None)
    if fused is None or not torch.backends.mkldnn.enabled:
        u = conv2d(z, dw_weight, dw_bias, padding=1, groups=z.shape[1])
        a = gelu(u)
    else:
        u = a = fused(z, dw_weight, dw_bias, [1, 1], [1, 1], [1, 1], z.shape[1], "gelu", [], "none")
    # As a convolution and a sum this would take more passes over memory, and changes of layout.
    y = pw_bias[:, None, None].expand(z.shape).contiguous() if x is None else x + pw_bias[:, None, None]
    B, C, flat = *z.shape[:2], y.view(*z.shape[:2], -1)
    torch.baddbmm(flat, pw_weight.view(C, C).expand(B, -1, -1), a.flatten(2), out=flat)
    return y, [z, u, a] if save else []


def _backward_on_cpu(
    g: Tensor, z: Tensor, u: Tensor, a: Tensor, dw_weight: Tensor, dw_bias: Tensor, pw_weight: Tensor
) -> list[Tensor]:
    B, C, H, W = z.shape
    flat, ones = g.view(B, C, -1), [1, 1]
    # As (B, H, W, C) first: with a batch of one, torch would not take any other view for channels last.
    h = torch.bmm(flat.mT, pw_weight.view(C, C).expand(B, -1, -1)).view(B, H, W, C).permute(0, 3, 1, 2)
    gz, d_depthwise, d_bias = torch.ops.aten.convolution_backward(
        torch.ops.aten.gelu_backward(h, u), z, dw_weight, [C], ones, ones, ones, False, [0, 0], C, [True, True, True]
    )
    # z is channels last, and so is the stride of its one channel in the gradient: DDP would warn about that.
    d_depthwise = d_depthwise.flatten(1).view(dw_weight.shape)
    d_pointwise = torch.bmm(flat, a.flatten(2).mT).sum(0).view(pw_weight.shape)
    return [gz, d_depthwise, d_bias, d_pointwise, g.sum((0, 2, 3))]

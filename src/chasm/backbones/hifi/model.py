"""HiFi-Mamba (Chen et al., 2025) and HiFi-MambaV2 (Fang et al., 2025) for accelerated MRI.

    X = LN(patch conv z);  per group: blocks, X <- X + slot(LN X), X <- X + embed(SiLU(DC(image(X))))
    y = DC(image(LN X))
    DC(im): K = F(S im);  K <- measured where the mask is set;  sum_coils conj(S) F^-1(K)

`hifi-mamba` is the host of the CHASM paper: binomial low-pass, expansion 5, pooled gate, 6 groups of 2 blocks
at width 96 and patch 2. `hifi-mamba-v1` has Haar, expansion 6, the full gate and no dropout; `hifi-mamba-v2`
the mixture of experts with its balance loss and 11 taps along the sequence. Architecture facts are read from
the authors' code.

Readings: which of the variants the paper means, and width 96 (they give 24.79 G multiply-adds at 256 x 256,
the paper's Baseline 24.64 G); one slot per group before data consistency, seeing all channels
(`slot_per="block"` puts one after every gate instead); the LayerNorm in front of it, which the host also has
in front of its own token mixer (docs/readings.md says what happens without); linear growth of the drop-path
rate; the balance loss averaged over the groups and their data-consistency layers, which count as zero.

Parameters: 1,527,900. The authors' modules have 6,816 more, all unused: a LayerNorm (192) and the delta rows
of one projection (288) in each of 12 blocks, and the re-embedding after the last data consistency (1,056).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from chasm.backbones.base import Backbone, Size, make_slots, padded_size, register_backbone
from chasm.backbones.hifi.blocks import BlockOptions, HiFiBlock
from chasm.backbones.hifi.experts import MoEBlock
from chasm.backbones.hifi.layers import ChannelNorm, Filters, low_pass_filters
from chasm.backbones.hifi.patches import PatchEmbed, ToImage
from chasm.backbones.measurement import Measurement


class Group(nn.Module):
    """Blocks, then data consistency on the image of the features: maps (B, C, h, w) to the same shape.

    Args:
        blocks: the blocks, in order.
        width: channels C of the features.
        patch: pixels of a feature, along each axis.
    """

    def __init__(self, blocks: Sequence[HiFiBlock], width: int, patch: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.to_image = ToImage(width, patch)
        self.embed = PatchEmbed(width, patch)
        self.slot_norm = ChannelNorm(width, elementwise_affine=False)

    def in_slot(self, slot: nn.Module, x: Tensor) -> Tensor:
        """Return x + slot(LayerNorm(x)), channels last in memory. The norm is over channels, without parameters."""
        return x + slot(self.slot_norm(x)).contiguous(memory_format=torch.channels_last)

    def consistency(self, x: Tensor, measurement: Measurement) -> Tensor:
        """Return features of the image of x, with the measured k-space put in."""
        return self.embed(F.silu(measurement.enforce(self.to_image(x, measurement.size))))

    def forward(
        self,
        x: Tensor,
        filters: Filters,
        measurement: Measurement,
        slots: Sequence[nn.Module | None],
        recompute: bool,
    ) -> tuple[Tensor, Tensor]:
        """Return the features, and the mean balance loss of the blocks.

        Args:
            x: features (B, C, h, w).
            filters: low-pass filters of the blocks.
            measurement: the measurement of the scanner.
            slots: one entry per block, applied to the output of the block, and a last one before data consistency.
            recompute: compute blocks and data consistency again in the backward pass. Slots are not recomputed, because
                what mixers share during a step (`chasm.batched_bases`) may be gone by then.
        """
        call: Any = partial(checkpoint, use_reentrant=False) if recompute else lambda f, *inputs: f(*inputs)
        *inside, last = slots
        balance = []
        block: Any
        for block, slot in zip(self.blocks, inside, strict=True):
            if slot is None:
                x, loss = call(block, x, filters)
            else:
                y, loss = call(block, x, filters, False)
                x = x + block.drop_path(self.in_slot(slot, y))
            balance.append(loss)
        x = x if last is None else self.in_slot(last, x)
        return x + call(self.consistency, x, measurement), torch.stack(balance).mean()


@register_backbone("hifi-mamba")
class HiFiMamba(Backbone):
    """HiFi-Mamba as in the CHASM paper. Call model(x, mask=mask) with the zero-filled image x (B, 2, H, W).

    Options left None take the value of the variant.

    Args:
        mixer: a name of `chasm.list_mixers()`, for the slots. None and "identity" leave them empty.
        mixer_options: options of the mixer.
        in_channels: 2.
        out_channels: 2.
        size: image size the mixers are made for.
        width: channels of the features.
        patch: pixels of a feature, along each axis.
        groups: number of groups, each followed by data consistency.
        blocks: blocks of a group.
        state: size of the state of the scan.
        expansion: channels inside an inverted bottleneck, relative to its width.
        kernel: taps along the token sequence.
        lowpass: "binomial" or "haar".
        gate: "pooled" (one gate for the map) or "full" (one for each position).
        dropout: rate on the output of the SSM.
        drop_path: rate at which training drops the last block; it grows linearly from 0 at the first.
        slot_per: "group" for one slot before data consistency, "block" for one after every gate.
        checkpoint: recompute blocks and data consistency in the backward pass: same gradients, less memory.
    """

    defaults: ClassVar[BlockOptions] = BlockOptions()
    block: ClassVar[type[HiFiBlock]] = HiFiBlock
    balance_weight: ClassVar[float] = 0.0

    def __init__(
        self,
        mixer: str | None = "identity",
        mixer_options: Mapping[str, Any] | None = None,
        in_channels: int = 2,
        out_channels: int = 2,
        size: Size = (256, 256),
        *,
        width: int = 96,
        patch: int = 2,
        groups: int = 6,
        blocks: int = 2,
        state: int = 16,
        expansion: int | None = None,
        kernel: int | None = None,
        lowpass: str | None = None,
        gate: str | None = None,
        dropout: float | None = None,
        drop_path: float | None = None,
        slot_per: str = "group",
        checkpoint: bool = False,
    ) -> None:
        super().__init__(in_channels, out_channels)
        self._require_complex_images()
        if slot_per not in ("group", "block"):
            raise ValueError(f"slot_per is 'group' or 'block', got {slot_per!r}")
        options_of_call = {
            "expansion": expansion,
            "kernel": kernel,
            "lowpass": lowpass,
            "gate": gate,
            "dropout": dropout,
            "drop_path": drop_path,
        }
        changed: dict[str, Any] = {name: value for name, value in options_of_call.items() if value is not None}
        options = replace(self.defaults, width=width, state=state, **changed)
        self.lowpass = options.lowpass
        self.blocks_per_group, self.slot_per, self.checkpoint = blocks, slot_per, checkpoint
        self.embed = PatchEmbed(width, patch)

        def block(i: int) -> HiFiBlock:
            return self.block(options, options.drop_path * i / max(1, groups * blocks - 1))

        self.groups = nn.ModuleList(
            Group([block(g * blocks + i) for i in range(blocks)], width, patch) for g in range(groups)
        )
        self.norm = ChannelNorm(width)
        self.head = ToImage(width, patch)

        H, W = padded_size(size, self.embed.multiple, self.embed.smallest)
        count = groups if slot_per == "group" else groups * blocks
        places = {i: (width, (H // patch, W // patch)) for i in range(count)}
        self.slots = make_slots(mixer, mixer_options, places)

    def slots_of(self, g: int) -> list[nn.Module | None]:
        """Return the slots of group g: one entry per block and a last one for its end, None where a place is empty."""
        slots, d = list(self.slots.values()), self.blocks_per_group
        if not slots:
            return [None] * (d + 1)
        return [*slots[g * d : (g + 1) * d], None] if self.slot_per == "block" else [*[None] * d, slots[g]]

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile blocks and norms in place: all blocks share one graph, and mixers keep their own kernels."""
        blocks = [module for module in self.modules() if isinstance(module, HiFiBlock)]
        compiled_with_a_block = {module for block in blocks for module in block.modules()}
        norms = [module for module in self.modules() if isinstance(module, ChannelNorm)]
        for module in [*blocks, *(norm for norm in norms if norm not in compiled_with_a_block)]:
            module.compile(*args, **kwargs)

    def run(
        self, x: Tensor, mask: Tensor | None, maps: Tensor | None, measured: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        measurement = self.measurement.of(x, mask, maps, measured)
        x = self.embed(x)
        filters = low_pass_filters(self.lowpass, x)
        balance = []
        for g, group in enumerate(self.groups):
            x, loss = group(x, filters, measurement, self.slots_of(g), self.checkpoint and torch.is_grad_enabled())
            balance.append(loss)
        image = measurement.enforce(self.head(self.norm(x), measurement.size))
        # Half: every group is followed by a data-consistency layer whose balance loss is zero.
        return image, self.balance_weight * torch.stack(balance).mean() / 2


@register_backbone("hifi-mamba-v1")
class HiFiMambaV1(HiFiMamba):
    """HiFi-Mamba as first published: Haar low-pass, expansion 6, the full gate, no dropout. Options as `HiFiMamba`."""

    defaults = BlockOptions(expansion=6, lowpass="haar", gate="full", dropout=0.0, drop_path=0.0)


@register_backbone("hifi-mamba-v2")
class HiFiMambaV2(HiFiMamba):
    """HiFi-MambaV2: a mixture of experts with its balance loss, 11 taps along the sequence. Options as `HiFiMamba`."""

    defaults = BlockOptions(kernel=11)
    block = MoEBlock
    balance_weight = 1e-3

"""
Swap CHASM into a vision transformer
====================================

:func:`chasm.swap` puts a mixer in place of modules of a network that you did not write. Here the
network is a small vision transformer, built as torchvision builds its own: an attention, then an
MLP, each behind a norm.
"""

import matplotlib.pyplot as plt
import torch
from torch import nn

import chasm


class EncoderBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.self_attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        y = self.ln_1(tokens)
        tokens = tokens + self.self_attention(y, y, y, need_weights=False)[0]
        return tokens + self.mlp(self.ln_2(tokens))


class VisionTransformer(nn.Module):
    def __init__(self, image: int = 64, patch: int = 4, width: int = 48, depth: int = 4) -> None:
        super().__init__()
        self.conv_proj = nn.Conv2d(3, width, patch, stride=patch)
        self.position = nn.Parameter(torch.zeros(1, (image // patch) ** 2, width))
        self.layers = nn.ModuleList(EncoderBlock(width, heads=4) for _ in range(depth))
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.conv_proj(x).flatten(2).transpose(1, 2) + self.position  # (B, 256, width)
        for layer in self.layers:
            tokens = layer(tokens)
        return self.head(tokens.mean(1))


# %%
# The pattern names the modules to replace: here the attention of the first two layers. One pass of
# the example through the network shows how many channels they have and on which grid the tokens
# lie.

vit = VisionTransformer()
images = torch.randn(2, 3, 64, 64)
mixed = chasm.swap(vit, "layers.[01].self_attention", "chasm", example=images)
print(mixed.layers[0].self_attention)
print(mixed(images).shape)

# %%
# ``vit`` itself is unchanged. The block adds the input around its attention, so the mixer comes
# without its own identity path (``host_residual=True``, the default): there is exactly one.
#
# What did that cost? :func:`chasm.count` counts multiply-adds with the FFTs and the attention
# products.

for name, model in (("attention everywhere", vit), ("CHASM in two layers", mixed)):
    cost = chasm.count(model, images[:1])
    print(f"{name:22} {cost.params:8,} parameters {cost.total / 1e6:7.1f} million multiply-adds")

# %%
# The difference grows with the image: attention compares every token with every other one. The picture
# shows one layer on grids from 8 x 8 to 64 x 64.

sides = (8, 16, 32, 64)
costs = {"attention": [], "CHASM": []}
for side in sides:
    tokens = torch.randn(1, side * side, 48)
    layer = chasm.swap(vit.layers[0], "self_attention", "chasm", example=tokens, size=side)
    costs["attention"].append(chasm.count(vit.layers[0], tokens).total / 1e6)
    costs["CHASM"].append(chasm.count(layer, tokens).total / 1e6)
figure, axis = plt.subplots(figsize=(6, 3.5), layout="constrained")
for name, values in costs.items():
    axis.plot([side * side for side in sides], values, "o-", label=name)
axis.set(xlabel="tokens", ylabel="million multiply-adds of one layer", xscale="log", yscale="log")
axis.legend()
plt.show()

# %%
# Any other mixer is one word away, and a type selects as well as a name does.

gfnet = chasm.swap(vit, nn.MultiheadAttention, "gfnet", example=images)
print(sum(type(module).__name__ == "GFNet" for module in gfnet.modules()), "attentions became GFNet")

# %%
# A mistake gives an error of one line that says what to do.

try:
    chasm.swap(vit, "layers.*.attention", "chasm", example=images)
except ValueError as error:
    print(error)

"""The forms a chain of axis passes is computed in, one file each. `reference` beside this folder is their oracle.

Every form has three functions, none of which records a gradient:

    prepare(shape, dims, gains, bases, dtype, trains) -> constants, a list of tensors
    forward(x, dims, constants, keep, before_local) -> y, and with `keep` a list of what the backward needs
    backward(g, kept, dims, gains, bases, constants, needs_x, add, symmetric) -> gradients of x, gains and bases

x is a contiguous (B, C, *spatial); `dims` names the axes in the order of the passes; `gains` are (K, C) for each of
them, and `bases` (C, C) for each, or none at all for the identity; `trains` says whether gradients of both will be
wanted. `before_local`: the depthwise convolution follows, so y may have the memory format it is fastest in. `add` is a
map to add to the gradient of x, `symmetric` whether all gains are real.
"""

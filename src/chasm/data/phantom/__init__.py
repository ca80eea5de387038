"""Drawn brains: `head` draws slices of one subject, from the curves of `sulci` and the geometry of `shapes`."""

from chasm.data.phantom.head import (
    CONTRASTS,
    HIGHEST,
    LOWEST,
    SIGNAL,
    TISSUES,
    Head,
    as_scanned,
    draw,
    signal_table,
)

__all__ = ["CONTRASTS", "HIGHEST", "LOWEST", "SIGNAL", "TISSUES", "Head", "as_scanned", "draw", "signal_table"]

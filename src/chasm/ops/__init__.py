"""Stateless functions: bases, gains, axis passes and the form they run in. `reference` is the oracle."""

from chasm.ops.basis import orthogonal_basis, skew
from chasm.ops.block import Chain, prepare, run
from chasm.ops.dispatch import FORMS, GPU_FORMS, Choice, can_be_kept, choose_form
from chasm.ops.gains import UNIT_GAIN, complex_gains, positive_gains, signed_gains, table_at
from chasm.ops.operators import AxisOperator, AxisSource

__all__ = [
    "FORMS",
    "GPU_FORMS",
    "UNIT_GAIN",
    "AxisOperator",
    "AxisSource",
    "Chain",
    "Choice",
    "can_be_kept",
    "choose_form",
    "complex_gains",
    "orthogonal_basis",
    "positive_gains",
    "prepare",
    "run",
    "signed_gains",
    "skew",
    "table_at",
]

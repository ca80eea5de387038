"""Stateless functions: bases, gains and axis passes. `reference` is the oracle."""

from chasm.ops.axis import FORMS, GPU_FORMS, AxisOperator, Choice, Prepared, choose_form, prepare, run, run_beside
from chasm.ops.basis import orthogonal_basis, skew
from chasm.ops.gains import UNIT_GAIN, complex_gains, positive_gains, signed_gains, table_at

__all__ = [
    "FORMS",
    "GPU_FORMS",
    "UNIT_GAIN",
    "AxisOperator",
    "Choice",
    "Prepared",
    "choose_form",
    "complex_gains",
    "orthogonal_basis",
    "positive_gains",
    "prepare",
    "run",
    "run_beside",
    "signed_gains",
    "skew",
    "table_at",
]

"""Reconstruct scans with a trained run, or with a method that needs no training.

settings.py what the user may choose, and the run or method
inputs.py   opens files and folders
columns.py  tells which columns of k-space were measured
likeness.py compares a scan with the training data of a run
coils.py    makes or reads coil sensitivities
ensemble.py several runs as one
measurement.py  what was measured of one slice
uncertainty.py  says how far a slice may be off
slices.py   runs the model on one slice
trust.py    says what can be known of the result without ground truth
outputs.py  decides the names of the files
volumes.py  writes them
dicom.py    writes them as a DICOM series
page.py     makes a page to look at them
cases.py    reconstructs and writes one case
run.py      puts these together
enlarge.py  enlarges photographs with a super-resolution run
"""

from chasm.reconstruct.enlarge import Enlarged, enlarge_each, is_enlarger
from chasm.reconstruct.run import Outcome, Volume, as_json, reconstruct, reconstruct_each
from chasm.reconstruct.settings import Settings

__all__ = [
    "Enlarged",
    "Outcome",
    "Settings",
    "Volume",
    "as_json",
    "enlarge_each",
    "is_enlarger",
    "reconstruct",
    "reconstruct_each",
]

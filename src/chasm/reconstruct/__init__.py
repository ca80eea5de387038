"""Reconstruct scans with a trained run, or with a method that needs no training.

settings.py holds what the user may choose, and loads the run or method
inputs.py   opens files and folders
columns.py  tells which columns of k-space were measured
likeness.py compares a scan with the training data of a run
coils.py    makes or reads coil sensitivities
ensemble.py combines several runs into one
measurement.py  holds what was measured of one slice
uncertainty.py  estimates the error of a slice
slices.py   runs the model on one slice
trust.py    says what is known about the result without ground truth
outputs.py  decides the names of the files
volumes.py  writes volumes
dicom.py    writes volumes as a DICOM series
page.py     makes a page to look at the result
cases.py    reconstructs and writes one case
run.py      puts these files together
enlarge.py  enlarges photographs with a super-resolution run
"""

from chasm.reconstruct.enlarge import Enlarged, enlarge_each, is_enlarger
from chasm.reconstruct.run import Outcome, WrittenVolume, as_json, reconstruct, reconstruct_each
from chasm.reconstruct.settings import Settings

__all__ = [
    "Enlarged",
    "Outcome",
    "Settings",
    "WrittenVolume",
    "as_json",
    "enlarge_each",
    "is_enlarger",
    "reconstruct",
    "reconstruct_each",
]

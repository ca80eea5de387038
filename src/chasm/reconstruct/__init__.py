"""Reconstruct scans with a trained run.

inputs.py   opens files and folders
columns.py  tells which columns of k-space were measured
slices.py   runs the model on one slice
outputs.py  decides the names of the files
volumes.py  writes them
run.py      puts these together
"""

from chasm.reconstruct.run import Outcome, Volume, as_json, reconstruct, reconstruct_each

__all__ = ["Outcome", "Volume", "as_json", "reconstruct", "reconstruct_each"]

"""Reconstruct scans with a trained run: `inputs` opens files, `run` reconstructs them, `outputs` writes volumes."""

from chasm.reconstruct.run import Outcome, Volume, as_json, reconstruct, reconstruct_each

__all__ = ["Outcome", "Volume", "as_json", "reconstruct", "reconstruct_each"]

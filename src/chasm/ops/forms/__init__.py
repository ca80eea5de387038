"""The forms that a chain of axis passes is computed in, one file each. `ops.reference` is their oracle."""

"""Bridges to other libraries, each imported by its own name: `from chasm.interop import deepinv`."""

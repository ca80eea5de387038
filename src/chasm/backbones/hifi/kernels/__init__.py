"""Triton kernels that only this host uses, each beside the plain form it must match."""

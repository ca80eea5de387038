"""Changes to an existing network: swap mixers in, fold them, write ONNX, count its cost.

swap.py          put a mixer in place of some of its modules
fold.py          replace its CHASM mixers by constants
harmonise.py     give an untied CHASM mixer the best shared basis
onnx.py          write it as a checked ONNX file
count.py         count its parameters, multiply-adds and memory
resize.py        fit weights of CHASM mixers with other numbers of bins
param_groups.py  group its parameters for an optimiser
probe.py         run it on an example and note what its modules see

The functions are public as `chasm.swap`, `chasm.fold`, `chasm.harmonise`, `chasm.export_onnx`, `chasm.count`,
`chasm.resize_tables` and `chasm.param_groups`.
"""

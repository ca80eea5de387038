"""What all tests share. Two test processes share the machine: one thread each, for them and for what they start."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

pytest_plugins = ["kernel_fixtures"]

torch.set_num_threads(1)
torch.backends.cudnn.allow_tf32 = False  # where there is a GPU, what is compared with is float32

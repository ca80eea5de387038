"""Training turns a recipe into a run folder: `train`, `evaluate`, `load_run`."""

from chasm.train.config import RunConfig as RunConfig
from chasm.train.config import load_recipe as load_recipe
from chasm.train.evaluation import evaluate as evaluate
from chasm.train.loop import train as train
from chasm.train.nonfinite import NonFiniteError as NonFiniteError
from chasm.train.run import Run as Run
from chasm.train.run import load_run as load_run

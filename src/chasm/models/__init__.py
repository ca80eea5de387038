"""Trained models by name: those that come with the package, local folders, and repositories of the Hugging Face Hub.

A model is a folder with a config, weights as safetensors, and a record with the SHA-256 of every file. Nothing in it
is code, and nothing is unpickled.
"""

from chasm.models.folders import GRAPH as GRAPH
from chasm.models.folders import MODEL_FILES as MODEL_FILES
from chasm.models.folders import RECORD as RECORD
from chasm.models.folders import check_model as check_model
from chasm.models.folders import find_model as find_model
from chasm.models.folders import list_models as list_models
from chasm.models.folders import read_card as read_card
from chasm.models.folders import shipped_models as shipped_models
from chasm.models.pretrained import Pretrained as Pretrained

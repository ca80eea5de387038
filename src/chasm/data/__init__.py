"""Datasets in their real formats: `open_dataset(name, path, split=...)` gives slices, split by case."""

from chasm.data.base import DATASETS as DATASETS
from chasm.data.base import SPLITS as SPLITS
from chasm.data.base import Batch as Batch
from chasm.data.base import Case as Case
from chasm.data.base import DataError as DataError
from chasm.data.base import Facts as Facts
from chasm.data.base import Slice as Slice
from chasm.data.base import SliceDataset as SliceDataset
from chasm.data.base import collate as collate
from chasm.data.base import list_datasets as list_datasets
from chasm.data.base import open_dataset as open_dataset
from chasm.data.base import register_dataset as register_dataset
from chasm.data.resident import Resident as Resident

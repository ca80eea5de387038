"""Datasets in their real formats: `open_dataset(name, path, split=...)` gives slices, split by case."""

from chasm.data.base import (
    DATASETS,
    FileDataset,
    KSpaceDataset,
    SliceDataset,
    list_datasets,
    open_dataset,
    register_dataset,
)
from chasm.data.brats import BraTS
from chasm.data.cc359 import CC359
from chasm.data.embedded import Embedded
from chasm.data.fastmri import FastMRI
from chasm.data.folder import Folder
from chasm.data.images import Images
from chasm.data.kspace import KSpace, read_scans, write_scan
from chasm.data.proxy import Proxy
from chasm.data.records import SPLITS, Batch, Case, CaseFacts, DataError, Geometry, RawSlice, Slice, collate, fault
from chasm.data.resident import Resident
from chasm.data.scan import KSpaceScan
from chasm.data.volumes import Volumes

__all__ = [
    "CC359",
    "DATASETS",
    "SPLITS",
    "Batch",
    "BraTS",
    "Case",
    "CaseFacts",
    "DataError",
    "Embedded",
    "FastMRI",
    "FileDataset",
    "Folder",
    "Geometry",
    "Images",
    "KSpace",
    "KSpaceDataset",
    "KSpaceScan",
    "Proxy",
    "RawSlice",
    "Resident",
    "Slice",
    "SliceDataset",
    "Volumes",
    "collate",
    "fault",
    "list_datasets",
    "open_dataset",
    "read_scans",
    "register_dataset",
    "write_scan",
]

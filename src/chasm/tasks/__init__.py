"""Tasks define what a batch is, its loss and its metrics. Importing this package registers them by name."""

from chasm.tasks.base import TASKS as TASKS
from chasm.tasks.base import Task as Task
from chasm.tasks.base import TaskBatch as TaskBatch
from chasm.tasks.base import create_task as create_task
from chasm.tasks.base import register_task as register_task
from chasm.tasks.meter import Meter as Meter
from chasm.tasks.meter import Stat as Stat
from chasm.tasks.meter import Summary as Summary
from chasm.tasks.meter import aggregate as aggregate
from chasm.tasks.protocols import PROTOCOLS as PROTOCOLS
from chasm.tasks.protocols import get_protocol as get_protocol
from chasm.tasks.reconstruction import Reconstruction as Reconstruction
from chasm.tasks.segmentation import Segmentation as Segmentation
from chasm.tasks.superres import SuperResolution as SuperResolution
from chasm.tasks.volume import VolumeReconstruction as VolumeReconstruction

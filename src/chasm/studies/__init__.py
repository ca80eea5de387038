"""Experiments as data: the paper's tables and ablations as grids of runs, their execution, statistics and results.

>>> from chasm.studies import make_plan
>>> plan = make_plan("basis", scale="tiny")
>>> len(plan.runs), plan.runs[0].key
(5, 'cc359-x8.hifi-mamba.chasm-identity.m30.s0')
"""

from chasm.studies.catalogue import STUDIES as STUDIES
from chasm.studies.catalogue import Grid as Grid
from chasm.studies.catalogue import Study as Study
from chasm.studies.catalogue import get_study as get_study
from chasm.studies.catalogue import list_studies as list_studies
from chasm.studies.catalogue import register_study as register_study
from chasm.studies.factors import Arm as Arm
from chasm.studies.factors import Dataset as Dataset
from chasm.studies.factors import Host as Host
from chasm.studies.factors import Setting as Setting
from chasm.studies.plan import Plan as Plan
from chasm.studies.plan import load_plan as load_plan
from chasm.studies.plan import make_plan as make_plan
from chasm.studies.results import collect as collect

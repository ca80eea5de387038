"""Drawn brains: `head` draws slices of one subject, from the curves of `sulci` and the geometry of `shapes`."""

from chasm.data.phantom.head import CONTRASTS as CONTRASTS
from chasm.data.phantom.head import HIGHEST as HIGHEST
from chasm.data.phantom.head import LOWEST as LOWEST
from chasm.data.phantom.head import SIGNAL as SIGNAL
from chasm.data.phantom.head import TISSUES as TISSUES
from chasm.data.phantom.head import Head as Head
from chasm.data.phantom.head import as_scanned as as_scanned
from chasm.data.phantom.head import draw as draw
from chasm.data.phantom.head import signal_table as signal_table

"""A finished run as a model that others can use: its folder, its record and its card."""

from chasm.publish.card import write_run_card as write_run_card
from chasm.publish.pack import pack as pack

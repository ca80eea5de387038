"""Check the lengths in a file of Siemens raw data before twixtools reads it.

twixtools trusts every length and every index: a readout of length 0 keeps it busy for ever, an index in the protocol
makes a list as long as it says, and where a file was cut it repeats the last readout.
"""

import ctypes
import re
import struct
from pathlib import Path
from typing import IO

from chasm.data.records import fault

MAX_HEADER_BYTES = 16 * 2**20  # header of one measurement; 0.1 to 5 MiB are usual
MAX_MEASUREMENTS = 64
_ENTRY = struct.Struct("<IIQQ128x")  # number, file, offset, length, names
_CHANNEL_BYTES = 32  # header of one channel, in files since VD
# No protocol of a scanner has such a long index, or words or gaps that take twixtools' patterns minutes.
_TRAP = re.compile(rb"\[[0-9]{5,}\]|[^\s\0]{2048}| {2048}")


def require_sound_lengths(file: Path) -> None:
    """Raise a DataError if a length in the file points out of it, or nowhere, or its protocol is a trap."""
    with open(file, "rb") as stream:
        size = stream.seek(0, 2)
        stream.seek(0)
        first, count = struct.unpack("<II", stream.read(8))
        is_vd = first < 10000 and count <= MAX_MEASUREMENTS
        places = [(0, size)]
        if is_vd:
            places = [_ENTRY.unpack(stream.read(_ENTRY.size))[2:] for _ in range(count)]
        for start, length in places:
            end = start + length if length else size
            if not 0 <= start < end <= size:
                problem = f"bytes {start} to {end} of {size}: the file is damaged or not complete"
                raise fault(file, "measurement", problem)
            first_readout = _end_of_header(stream, file, start, end)
            if length or len(places) == 1:  # one of several without a length is taken as empty
                _check_readouts(stream, file, first_readout, end, is_vd)


def _end_of_header(stream: IO[bytes], file: Path, start: int, end: int) -> int:
    stream.seek(start)
    length = int.from_bytes(stream.read(4), "little")
    if not 8 <= length <= min(end - start, MAX_HEADER_BYTES):
        raise fault(file, "header", f"{length} bytes: no Siemens raw data, or damaged")
    if _TRAP.search(stream.read(length - 4)):
        raise fault(file, "header", "an index or a word that no protocol of a scanner has: the file is damaged")
    return start + length


def _check_readouts(stream: IO[bytes], file: Path, place: int, end: int, is_vd: bool) -> None:
    from twixtools import mdh_def

    kind = mdh_def.Scan_header if is_vd else mdh_def.VB17_header
    header_bytes = ctypes.sizeof(kind)
    own, of_channel = (header_bytes, _CHANNEL_BYTES) if is_vd else (0, header_bytes)
    while place + 128 < end:  # the rule by which twixtools goes on
        stream.seek(place)
        raw = stream.read(header_bytes)
        length = 0
        if len(raw) == header_bytes:
            head = kind.from_buffer_copy(raw)
            if mdh_def.is_flag_set(head, "ACQEND"):
                return
            length = own + head.UsedChannels * (of_channel + 8 * head.SamplesInScan)
            if mdh_def.is_flag_set(head, "SYNCDATA"):
                length = int(mdh_def.get_dma_len(head))
        if length < header_bytes or place + length > end:
            problem = f"a readout takes bytes {place} to {place + length}, and the measurement ends at {end}"
            raise fault(file, "data", f"{problem}: the file is damaged or not complete")
        place += length

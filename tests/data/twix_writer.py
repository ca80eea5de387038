"""Siemens raw data as small as twixtools reads it."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import twixtools
from twixtools.mdb import Mdb_local
from twixtools.mdh_def import Channel_header

PROTOCOL = {
    "sKSpace.lBaseResolution": 16,
    "sKSpace.lPhaseEncodingLines": 12,
    "sKSpace.lPartitions": 1,
    "sKSpace.ucDimension": 2,
    "sKSpace.ucTrajectory": 1,
    "sSliceArray.asSlice[0].dReadoutFOV": 160.0,
    "sSliceArray.asSlice[0].dPhaseFOV": 120.0,
    "sSliceArray.asSlice[0].dThickness": 4.0,
    "sRXSPEC.alDwellTime[0]": 10000,  # ns
}


def readout(data: np.ndarray, *flags: str, coils: list[int] | None = None, **counters: int) -> Mdb_local:
    """A readout (coils, samples) with flags and counters, the zero frequency in its middle."""
    mdb = Mdb_local(data)
    channels = []
    for coil in coils or range(len(data)):
        channel = Channel_header()
        channel.ChannelId = coil
        channels.append(channel)
    mdb.channel_hdr = channels
    for flag in flags:
        mdb.add_flag(flag)
    mdb.mdh.CenterCol, mdb.mdh.CenterLin = data.shape[1] // 2, 6
    mdb.mdh.SliceData.Quaternion[0] = 1.0
    for name, value in counters.items():
        setattr(mdb.mdh.Counter, name, value)
    return mdb


def measurement(readouts: list[Mdb_local], name: str = "gre", **protocol: Any) -> dict[str, Any]:
    """One measurement of a file; keywords change the protocol, with __ for a dot."""
    entries = (
        PROTOCOL | {key.replace("__", "."): value for key, value in protocol.items()} | {"tProtocolName": f'"{name}"'}
    )
    lines = "".join(f"{key} = {value}\n" for key, value in entries.items())
    text = f"### ASCCONV BEGIN ###\n{lines}\n### ASCCONV END ###".encode()
    body = b"MeasYaps\0" + len(text).to_bytes(4, "little") + text
    body += bytes(-(8 + len(body)) % 32)
    header = (8 + len(body)).to_bytes(4, "little") + (1).to_bytes(4, "little") + body
    return {"mdb": readouts, "hdr_str": np.frombuffer(header, "S1")}


def write_twix(file: Path, *measurements: dict[str, Any]) -> Path:
    """Write measurements into a .dat file."""
    twixtools.write_twix([copy.deepcopy(m) for m in measurements], str(file))
    return file

"""How the page reads arrays: in node."""

import json
import subprocess
from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch
from app_pages import brain
from programs import needs

from chasm.app.site import STATIC
from chasm.mri import fft2c
from chasm.mri.phase import smooth_phase

pytestmark = [pytest.mark.interop, needs("node")]
PROGRAM = f"""
import {{readFileSync}} from 'node:fs';
const {{readScan}} = await import('{STATIC.as_uri()}/readers.js');
const local = async () => {{ throw new Error('sent to chasm'); }};  // the local page has it
const read = (path) => readScan([new File([readFileSync(path)], path)], local).then(() => '', ({{message}}) => message);
console.log(JSON.stringify(await Promise.all(JSON.parse(readFileSync(0)).map(read))));
"""


def test_arrays_of_kspace_are_refused_and_complex_images_are_not(tmp_path: Path) -> None:
    images = torch.from_numpy(brain(3)) * smooth_phase((48, 48), 1)
    columns = torch.arange(48) % 4 == 0
    stacks = {"images": images, "kspace": fft2c(images), "undersampled": fft2c(images) * columns}
    for name, values in stacks.items():
        np.save(tmp_path / f"{name}.npy", values.numpy())
        nibabel.save(nibabel.Nifti1Image(values.numpy().T, np.eye(4)), tmp_path / f"{name}.nii")
    files = sorted(map(str, tmp_path.iterdir()))
    command = ["node", "--input-type=module", "-e", PROGRAM]
    done = subprocess.run(command, input=json.dumps(files), capture_output=True, text=True, timeout=60, check=True)
    for file, message in zip(files, json.loads(done.stdout), strict=True):
        assert message == "" if "images" in file else "looks like k-space" in message

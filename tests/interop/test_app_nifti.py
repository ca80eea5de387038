"""How the page cuts NIfTI volumes, and where it says that slices lie: run in node, compared with Python."""

import json
import subprocess
from itertools import permutations, product
from pathlib import Path

import nibabel
import numpy as np
import pytest
from programs import needs

from chasm.app.site import STATIC
from chasm.data.nifti import PLANES, open_nifti

pytestmark = [pytest.mark.interop, needs("node")]
PROGRAM = f"""
import {{readFileSync, writeFileSync}} from 'node:fs';
const {{readNifti}} = await import('{STATIC.as_uri()}/nifti.js');
const {{nifti}} = await import('{STATIC.as_uri()}/writers.js');
const answers = [];
for (const path of JSON.parse(readFileSync(0))) {{
  const content = readFileSync(path);
  const first = await readNifti([new File([content], path)], {{head: content}});
  for (const plane of first.planes) {{
    const scan = first.cut(plane), slices = Array.from({{length: scan.count}}, (_, i) => scan.slice(i).channels[0].re);
    writeFileSync(`${{path}}-${{plane}}.nii`, Buffer.from(await nifti(slices, scan.H, scan.W, scan).arrayBuffer()));
    answers.push({{path, plane, acquired: first.plane, H: scan.H, W: scan.W, slices: slices.map((s) => [...s])}});
  }}
}}
console.log(JSON.stringify(answers));
"""


def volumes(folder: Path) -> list[Path]:
    """Files of every orientation, some oblique, some with a qform or nothing, with the coarsest voxels on each axis."""
    rng, files = np.random.default_rng(0), []
    for i, (order, signs) in enumerate(zip(permutations(range(3)), list(product((1, -1), repeat=3))[1:], strict=False)):
        affine = np.zeros((4, 4))
        affine[list(order), range(3)] = np.array(signs) * np.roll((0.9, 1.1, 4.0), i)
        affine[:3, :3] += 0.1 * rng.standard_normal((3, 3))
        affine[:, 3] = (*rng.standard_normal(3), 1)
        image = nibabel.Nifti1Image(rng.random((4, 5, 6)).astype(np.float32), None)
        image.header.set_zooms(np.linalg.norm(affine[:3, :3], axis=0))
        if i % 3 == 0:
            image.set_sform(affine, code=1)
        elif i % 3 == 1:
            image.set_qform(affine, code=1, strip_shears=True)
        files.append(folder / f"{i}.nii{'.gz' if i % 2 else ''}")
        nibabel.save(image, files[-1])
    return files


def test_slices_and_their_places_are_those_of_python(tmp_path: Path) -> None:
    files = [str(file) for file in volumes(tmp_path)]
    command = ["node", "--input-type=module", "-e", PROGRAM]
    done = subprocess.run(command, input=json.dumps(files), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
    answers = json.loads(done.stdout)
    assert len(answers) == len(files) * len(PLANES)
    for answer in answers:
        file, plane = Path(answer["path"]), answer["plane"]
        assert answer["acquired"] == open_nifti(file).plane
        wanted = open_nifti(file, plane)
        assert (len(answer["slices"]), answer["H"], answer["W"]) == wanted.shape
        np.testing.assert_allclose(np.reshape(answer["slices"], wanted.shape), wanted.read(), atol=1e-6)
        saved = nibabel.load(f"{file}-{plane}.nii")
        np.testing.assert_allclose(saved.affine, wanted.geometry.affine, atol=1e-4)
        np.testing.assert_allclose(open_nifti(Path(f"{file}-{plane}.nii"), plane).read(), wanted.read(), atol=1e-6)

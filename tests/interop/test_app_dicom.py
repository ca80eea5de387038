"""How the page orders the slices of a DICOM series, and where it says that they lie: in node, compared with Python."""

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
from programs import needs

from chasm.app.site import STATIC, VENDOR
from chasm.data.dicom import geometry_of_frames, read_header, read_pixels, split_volumes

sys.path.insert(0, str(Path(__file__).parents[1] / "data"))
from writers import write_dicom

pytestmark = [pytest.mark.interop, needs("node")]
PROGRAM = f"""
import {{readFileSync, writeFileSync}} from 'node:fs';
import {{createRequire}} from 'node:module';
const [folder, paths] = JSON.parse(readFileSync(0));
globalThis.dicomParser = createRequire('file:///')(`${{folder}}/parser.cjs`);
const {{readDicom}} = await import('{STATIC.as_uri()}/dicom.js');
const {{nifti}} = await import('{STATIC.as_uri()}/writers.js');
const files = paths.map((path) => new File([readFileSync(path)], path));
const scan = await readDicom(files, {{hasServer: false}});
const slices = Array.from({{length: scan.count}}, (_, i) => scan.slice(i).channels[0].re);
writeFileSync(`${{folder}}/saved.nii`, Buffer.from(await nifti(slices, scan.H, scan.W, scan).arrayBuffer()));
console.log(JSON.stringify({{...scan, slices: slices.map((s) => [...s])}}));
"""
H, W = 5, 4
OBLIQUE = [0.8, 0.6, 0.0, 0.0, 0.0, -1.0]
SPACING = {"PixelSpacing": [0.9, 0.7], "SliceThickness": 3.0, "SeriesInstanceUID": "1.2.3"}


def write_series(folder: Path, places: list[list[float]], **more: Any) -> list[str]:
    rng, files = np.random.default_rng(0), []
    for i, place in enumerate(places):
        facts = {"ImagePositionPatient": place, "ImageOrientationPatient": OBLIQUE, **SPACING, **more}
        write_dicom(folder / f"{i}.dcm", rng.integers(0, 900, (H, W)), number=len(places) - i, slope=0.5, **facts)
        files.append(str(folder / f"{i}.dcm"))
    return [*files[1:], files[0]]  # in another order than that of the slices


def read_in_node(folder: Path, files: list[str]) -> dict[str, Any]:
    (folder / "parser.cjs").write_bytes(gzip.decompress((VENDOR / "dicomParser.min.js.gz").read_bytes()))
    command = ["node", "--input-type=module", "-e", PROGRAM]
    given = json.dumps([str(folder), files])
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def along(steps: list[float]) -> list[list[float]]:
    """Places on the normal of the slices, which is (-0.6, 0.8, 0) in the other direction."""
    return [[-10 - 0.6 * s, 20 + 0.8 * s, 30] for s in steps]


@pytest.mark.parametrize("steps", [[0, 4, 8, 12], [0, 8, 4, 12], [5]])
@pytest.mark.parametrize("kind", ["MONOCHROME1", "MONOCHROME2"])
def test_slices_and_their_places_are_those_of_python(steps: list[float], kind: str, tmp_path: Path) -> None:
    files = write_series(tmp_path, along(steps), PhotometricInterpretation=kind)
    answer = read_in_node(tmp_path, files)
    frames = split_volumes(frame for file in files for frame in read_header(Path(file)).frames)[""]
    want, geometry = np.stack([read_pixels(frame.file)[0] for frame in frames]), geometry_of_frames(frames)
    assert geometry is not None
    np.testing.assert_allclose(np.reshape(answer["slices"], want.shape), want)
    saved = nibabel.load(tmp_path / "saved.nii")
    np.testing.assert_allclose(saved.affine, geometry.affine, atol=1e-4)
    assert saved.header["sform_code"] == geometry.code == 1
    np.testing.assert_allclose(np.asarray(saved.dataobj), np.flip(want, 1).transpose(2, 1, 0))


def test_where_slices_without_one_grid_lie_is_not_made_up(tmp_path: Path) -> None:
    for name, steps in (("gap", [0, 4, 8, 16, 20]), ("twice", [0, 0, 4, 4])):
        folder = tmp_path / name
        answer = read_in_node(folder, write_series(folder, along(steps)))
        assert "not evenly spaced" in answer["note"]
        assert "affine" not in answer
    folder = tmp_path / "nowhere"
    answer = read_in_node(folder, write_series(folder, along([0, 4]), ImageOrientationPatient=None))
    assert "no place" in answer["note"]
    saved = nibabel.load(folder / "saved.nii")
    assert saved.header["sform_code"] == 2
    np.testing.assert_allclose(saved.header.get_zooms(), (0.7, 0.9, 3.0), atol=1e-6)

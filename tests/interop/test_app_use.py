"""How a person uses the page of `chasm app`: keys only, a phone, light and dark, saved files, a tab that is closed."""

from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import torch
import torch.nn.functional as F
from app_pages import IN_A_BROWSER, MESSAGE, RESULT, SIZE, assert_same, brain, expected
from app_pages import play as play
from app_pages import runs as runs
from app_pages import served as served
from PIL import Image

from chasm.train import Run

pytestmark = IN_A_BROWSER

# Text whose contrast with the ground behind it is below 4.5, as WCAG 2 asks for: there must be none.
FAINT = """(() => {
  const light = (c) => { const [r, g, b] = 
    c.map((v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const numbers = (text) => text.match(/[\\d.]+/g).map(Number);
  const ground = (e) => { for (; e; e = e.parentElement) { const c = numbers(getComputedStyle(e).backgroundColor);
    if (c.length < 4 || c[3] > 0) return c.slice(0, 3); } return [255, 255, 255]; };
  return [...document.body.querySelectorAll('*')].filter((e) => e.checkVisibility() &&
    !/SCRIPT|OPTION/.test(e.tagName) && [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim())
  ).map((e) => {
    const [a, b] = [light(numbers(getComputedStyle(e).color).slice(0, 3)), light(ground(e))].sort((x, y) => y - x);
    return [(a + 0.05) / (b + 0.05), e.textContent.trim().slice(0, 40)]; }).filter(([ratio]) => ratio < 4.5);
})()"""
SMALL = """[...document.querySelectorAll('button, select, input')].filter((e) => e.checkVisibility()).map((e) => {
  const {width, height} = e.getBoundingClientRect();
  return [e.id || e.textContent, Math.round(width), Math.round(height)];
}).filter(([, width, height]) => Math.min(width, height) < LEAST)"""
UNLIKE = "document.getElementById('unlike').hidden ? '' : document.getElementById('unlike').textContent"
FOCUS = "[document.activeElement.id, getComputedStyle(document.activeElement).outlineStyle]"


def test_the_page_is_readable_in_light_and_dark_and_fits_a_phone(play: Any) -> None:
    steps: list[dict[str, Any]] = []
    for size, touch, least in (([1280, 900], False, 24), ([390, 844], True, 44)):
        steps.append({"size": size, "touch": touch, "wait": 2500})  # the browser loads the page again for a phone
        steps += [{"click": "#card-button"}, {"click": "#example", "wait": 2500}]
        steps += [{"read": "chasm.state.result === null", "as": f"no picture {size[0]}"}]
        for theme in ("light", "dark"):
            name = f"{theme} {size[0]}"
            steps += [{"theme": theme, "wait": 700, "shot": name.replace(" ", "-")}]
            steps += [{"read": FAINT, "as": f"faint {name}"}]
        steps += [{"read": SMALL.replace("LEAST", str(least)), "as": f"small {size[0]}"}]
        steps += [{"read": "document.documentElement.scrollWidth - innerWidth", "as": f"over {size[0]}"}]
    read = play(steps)
    methods = read.pop("methods")
    assert methods == {"GET"}
    assert {key: value for key, value in read.items() if value} == {}  # nothing faint, small or too wide


def test_everything_can_be_reached_by_keys(play: Any) -> None:
    order = ["model", "card-button", "theme", "keys-button", "choose", "example"]
    steps: list[dict[str, Any]] = []
    for i in range(len(order)):
        steps += [{"press": "Tab", "wait": 50}, {"read": FOCUS, "as": f"tab {i}"}]
    steps += [{"press": "Enter", "wait": 2500}, {"read": RESULT, "as": "result"}]
    for key in ("+", "]", "0"):
        steps += [{"press": key, "wait": 100}, {"read": "Number(document.getElementById('wipe').value)", "as": key}]
    steps += [{"click": "#keys-button", "wait": 100}, {"read": "document.getElementById('keys').open", "as": "open"}]
    steps += [{"press": "Escape", "wait": 100}, {"read": "document.getElementById('keys').open", "as": "closed"}]
    read = play(steps)
    assert [read[f"tab {i}"] for i in range(len(order))] == [[name, "solid"] for name in order]
    assert len(read["result"]["output"]) == SIZE * SIZE
    assert read["]"] == 0.55
    assert read["0"] == 0.5
    assert read["open"]
    assert not read["closed"]


def test_saved_files_hold_the_numbers_of_python(play: Any, runs: dict[str, Run], tmp_path: Path) -> None:
    volume, affine = brain(3), np.diag([0.5, 0.5, 3.0, 1.0])
    nibabel.save(nibabel.Nifti1Image(volume[:, ::-1].transpose(2, 1, 0), affine), tmp_path / "head.nii.gz")
    steps: list[dict[str, Any]] = [{"drop": [str(tmp_path / "head.nii.gz")], "wait": 2000}]
    steps += [{"save": "#save-png", "as": "head-2.png"}, {"save": "#save-nifti", "as": "head-reconstructed.nii"}]
    play([*steps, {"wait": 500}])
    want = [expected(runs["scans"], image)[0] for image in volume]
    pixels = np.asarray(Image.open(tmp_path / "head-2.png").convert("L")).astype(float)
    assert np.abs(pixels - np.clip(want[1] * 255, 0, 255)).max() <= 1
    saved = nibabel.load(tmp_path / "head-reconstructed.nii")
    np.testing.assert_allclose(saved.affine, affine, atol=1e-6)
    for i, image in enumerate(want):
        got = np.asarray(saved.dataobj)[:, :, i].T[::-1]
        np.testing.assert_allclose(got, image * volume[i].max(), atol=1e-4 * max(volume[i].max(), 1))


def test_a_tab_that_is_closed_at_work_leaves_the_next_one_alone(
    play: Any, runs: dict[str, Run], tmp_path: Path
) -> None:
    np.save(tmp_path / "good.npy", brain()[0])
    drop = {"drop": [str(tmp_path / "good.npy")]}
    steps = [{**drop, "wait": 10, "hanging": True}, {"reopen": True, "wait": 1000}, {**drop, "wait": 1500}]
    read = play([*steps, {"read": RESULT, "as": "result"}, {"read": MESSAGE, "as": "message"}])
    assert read["message"] == ""
    assert_same(read["result"], expected(runs["scans"], brain()[0]))


def test_slices_have_the_shape_and_the_sides_that_the_file_says(play: Any, tmp_path: Path) -> None:
    """Voxels of 3 mm from front to back; and few slices, of which other planes are too small to be offered."""
    affine = np.array([[-1.0, 0, 0, 0], [0, 0, 3, 0], [0, 1, 0, 0], [0, 0, 0, 1]])
    volume = np.random.default_rng(0).random((40, 44, 36)).astype(np.float32)
    nibabel.save(nibabel.Nifti1Image(volume, affine), tmp_path / "volume.nii")
    nibabel.save(nibabel.Nifti1Image(volume[:, :, :5], affine), tmp_path / "thin.nii")
    np.save(tmp_path / "array.npy", volume)
    planes = "[...document.getElementById('plane').options].map((option) => option.value)"
    steps: list[dict[str, Any]] = [{"drop": [str(tmp_path / "volume.nii")], "wait": 1000}]
    for plane in ("coronal", "axial", "sagittal"):
        steps += [{"set": ["#plane", plane], "wait": 1000}]
        steps += [{"read": "[chasm.views.aspect, Object.values(chasm.views.edges).join('')]", "as": plane}]
    for file in ("thin.nii", "array.npy"):
        steps += [{"drop": [str(tmp_path / file)], "wait": 1000}, {"read": planes, "as": file}]
    read = play([*steps, {"read": "[chasm.views.aspect, chasm.views.edges]", "as": "unknown"}])
    assert read["coronal"] == [1, "LRSI"]
    assert read["axial"] == [3, "LRAP"]
    assert read["sagittal"] == [1 / 3, "PASI"]
    assert read["thin.nii"] == ["coronal"]
    assert read["array.npy"] == []
    assert read["unknown"] == [1, None]


def test_a_volume_is_never_of_two_settings(play: Any, tmp_path: Path) -> None:
    nibabel.save(nibabel.Nifti1Image(brain(3).transpose(2, 1, 0), np.eye(4)), tmp_path / "head.nii")
    change = """(async () => {
      const mask = document.getElementById('acceleration');
      document.getElementById('save-nifti').click();
      mask.value = '8';
      mask.onchange();
      await new Promise((done) => setTimeout(done, 1500));
    })()"""
    hidden = "document.getElementById('volume').hidden"
    steps = [{"drop": [str(tmp_path / "head.nii")], "wait": 1000}, {"read": change, "as": "nothing"}]
    steps += [{"read": MESSAGE, "as": "message", "wait": 0}, {"click": "#volume-button", "wait": 1500}]
    steps += [
        {"read": hidden, "as": "shown"},
        {"set": ["#acceleration", "4"], "wait": 1000},
        {"read": hidden, "as": "old"},
    ]
    read = play(steps)
    assert read["message"] == "Stopped after 1 of 3 slices, because the file or a setting was changed."
    assert not read["shown"]
    assert read["old"]


def test_what_is_computed_can_be_stopped(play: Any, runs: dict[str, Run], tmp_path: Path) -> None:
    volume = brain(3)
    nibabel.save(nibabel.Nifti1Image(volume[:, ::-1].transpose(2, 1, 0), np.eye(4)), tmp_path / "head.nii")
    stop = """(async () => {
      const [start, stop, status] = ['volume-button', 'stop', 'status'].map((id) => document.getElementById(id));
      const seen = [], see = () => seen.push([!stop.hidden, start.disabled, status.textContent.slice(0, 7)]);
      const pause = () => new Promise((done) => setTimeout(done));
      start.click();
      await pause();
      see();
      stop.click();
      await pause();
      see();
      return seen;
    })()"""
    often = """(async () => {
      const before = chasm.network.next;
      for (let i = 0; i < 10; i++) document.getElementById('kind').dispatchEvent(new Event('change'));
      await new Promise((done) => setTimeout(done, 1500));
      return chasm.network.next - before;
    })()"""
    steps: list[dict[str, Any]] = [{"drop": [str(tmp_path / "head.nii")], "wait": 1000}, {"read": stop, "as": "seen"}]
    steps += [{"read": MESSAGE, "as": "message"}, {"press": "ArrowRight", "wait": 2000}, {"read": RESULT, "as": "next"}]
    read = play([*steps, {"read": often, "as": "runs"}])
    assert read["seen"] == [[True, True, "Slice 1"], [False, False, "Stopped"]]
    assert read["message"] == ""
    assert_same(read["next"], expected(runs["scans"], volume[2]))
    assert read["runs"] <= 2  # the network does not run for settings that were changed meanwhile


def test_stopping_holds_for_a_change_that_waits_and_a_model_that_is_left(play: Any, tmp_path: Path) -> None:
    """A mask is chosen while the network runs, which then waits for it; and a model for photographs."""
    np.save(tmp_path / "brain.npy", brain()[0])
    stop = """(async () => {
      const [kind, acceleration, stop] = ['kind', 'acceleration', 'stop'].map((id) => document.getElementById(id));
      const pause = (ms) => new Promise((done) => setTimeout(done, ms));
      kind.disabled = true;  // as a scan that has its own lines leaves it
      chasm.network.worker.onmessage = null;  // a network that takes long
      acceleration.onchange();
      await pause(0);
      const begun = chasm.network.next;
      kind.onchange();
      await pause(0);
      stop.click();
      await pause(1500);
      const status = document.getElementById('status').textContent;
      return [chasm.network.next - begun, status, chasm.state.result, kind.disabled];
    })()"""
    leave = """(async () => {
      const [kind, model] = ['kind', 'model'].map((id) => document.getElementById(id));
      kind.onchange();
      await new Promise((done) => setTimeout(done));
      model.value = 'photos';
      await model.onchange();
    })()"""
    steps: list[dict[str, Any]] = [{"drop": [str(tmp_path / "brain.npy")], "wait": 1000}]
    steps += [{"set": ["#acceleration", "8"], "wait": 1000}, {"read": UNLIKE, "as": "before"}]
    steps += [{"read": stop, "as": "stopped"}, {"read": UNLIKE, "as": "after"}]
    steps += [{"read": leave, "as": "nothing", "wait": 2000}, {"read": MESSAGE, "as": "message"}]
    read = play([*steps, {"read": UNLIKE, "as": "photos"}])
    assert "acceleration" in read["before"]
    assert read["stopped"] == [1, "Stopped.", None, False]  # one request: the model is loaded again
    assert read["after"] == ""  # there is no result that it could be about
    assert read["message"] == ""
    assert read["photos"] == ""


def test_of_two_models_chosen_quickly_the_last_one_stays(play: Any) -> None:
    quickly = """(async () => {
      const {fetch} = globalThis, model = document.getElementById('model');
      globalThis.fetch = async (path) => {
        if (path.includes('photos')) await new Promise((done) => setTimeout(done, 500));
        return fetch(path);
      };
      const choose = (name) => { model.value = name; return model.onchange(); };
      await Promise.all([choose('photos'), choose('scans')]);
      globalThis.fetch = fetch;
      return [model.value, chasm.state.model.name, new URL(chasm.network.url).pathname.split('/').at(-2)];
    })()"""
    assert play([{"read": quickly, "as": "chosen"}])["chosen"] == ["scans"] * 3


def test_of_a_picture_that_is_too_large_the_middle_is_enlarged(play: Any, runs: dict[str, Run], tmp_path: Path) -> None:
    photo = np.random.default_rng(0).integers(0, 255, (262, 40, 3), dtype=np.uint8)
    Image.fromarray(photo).save(tmp_path / "tall.png")
    steps = [{"set": ["#model", "photos"], "wait": 1500}, {"drop": [str(tmp_path / "tall.png")], "wait": 3000}]
    steps += [{"read": RESULT, "as": "result"}]
    read = play([*steps, {"read": "document.getElementById('status').textContent", "as": "status"}])
    pixels = torch.as_tensor(photo[3:259].transpose(2, 0, 1).astype(np.float32) / 255)[None]
    large = F.interpolate(pixels, scale_factor=4, mode="bicubic", antialias=True).clamp(0, 1)
    with torch.no_grad():
        assert_same(read["result"], (runs["photos"].model(large).clamp(0, 1).numpy(), large.numpy()))
    assert "the middle 256 x 40 of 262 x 40 pixels" in read["status"]

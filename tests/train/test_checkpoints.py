"""No checkpoint that was saved is lost, and none that is damaged is trusted."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from small import record

from chasm.common.files import sha256, write_text
from chasm.train.checkpoints import Checkpoints, save_tensors, sha256_of


def listed(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.rglob("*"))


def test_tensors_are_as_readable_as_other_files(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        save_tensors(tmp_path / "a.safetensors", {"x": torch.zeros(1)})
        write_text(tmp_path / "a.txt", "")
    finally:
        os.umask(before)
    assert [oct((tmp_path / f"a.{end}").stat().st_mode & 0o777) for end in ("safetensors", "txt")] == ["0o640"] * 2


@pytest.fixture
def saved(tmp_path: Path) -> Checkpoints:
    checkpoints = Checkpoints(tmp_path / "c", pytest.fail)
    for step in (1, 2, 3):
        checkpoints.save({"x": torch.full((3,), step)}, record(step))
    return checkpoints


def test_the_last_two_are_kept(saved: Checkpoints) -> None:
    assert sorted(p.name for p in saved.folder.iterdir()) == ["00000002", "00000003"]
    found = saved.newest()
    assert found is not None
    assert torch.equal(found[0]["x"], torch.full((3,), 3))
    assert found[1] == record(3)


def test_no_checkpoint(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path / "c", pytest.fail).newest() is None


def passed_over(saved: Checkpoints) -> str:
    """The line that is said of the newest checkpoint, where the one of step 2 is used in its place."""
    said: list[str] = []
    saved.say = said.append
    found = saved.newest()
    assert found is not None
    assert found[1] == record(2)
    (line,) = said
    assert "\n" not in line
    return line


@pytest.mark.parametrize(
    "damage", ["truncated", "flipped", "missing", "no record", "empty record", "other record", "other step"]
)
def test_a_damaged_one_is_reported_and_the_one_before_is_used(saved: Checkpoints, damage: str) -> None:
    state, written = (saved.folder / "00000003" / name for name in ("state.safetensors", "record.json"))
    content = bytearray(state.read_bytes())
    if damage == "truncated":
        state.write_bytes(content[:-1])
    elif damage == "flipped":
        content[-1] ^= 1
        state.write_bytes(content)
    elif damage == "missing":
        state.unlink()
    elif damage == "no record":
        written.unlink()
    elif damage == "empty record":
        written.write_text("")
    elif damage == "other step":  # both files are sound, but they belong to the checkpoint before
        shutil.copytree(saved.folder / "00000002", state.parent, dirs_exist_ok=True)
    else:
        written.write_text("{}")
    assert "00000003 is damaged" in passed_over(saved)
    # It does not count as one of the two, and does not come back.
    saved.save({"x": torch.zeros(1)}, record(4 if damage == "missing" else 2))
    if damage != "missing":
        assert listed(saved.folder) == ["00000002", "record.json", "state.safetensors"]


def test_partial_folders_are_no_checkpoints_and_go_with_the_next_save(saved: Checkpoints) -> None:
    partial = saved.folder / ".00000009.partial"
    save_tensors(partial / "state.safetensors", {"x": torch.zeros(1)})
    found = saved.newest()
    assert found is not None
    assert found[1].step == 3
    saved.save(found[0], record(4))
    assert sorted(p.name for p in saved.folder.iterdir()) == ["00000003", "00000004"]


def test_nothing_is_pickled(saved: Checkpoints) -> None:
    for path in saved.folder.rglob("*"):
        assert path.is_dir() or path.suffix in (".safetensors", ".json")


def test_no_flipped_bit_of_a_record_is_trusted(saved: Checkpoints) -> None:
    written = saved.folder / "00000003" / "record.json"
    sound, said = written.read_bytes(), list[str]()
    reader = Checkpoints(saved.folder, said.append)
    for place in range(len(sound)):
        spoiled = bytearray(sound)
        spoiled[place] ^= 1 << place % 8
        written.write_bytes(spoiled)
        found = reader.newest()
        assert found is not None
        assert found[1] in (record(2), record(3))  # the white space may change
    assert len(said) > 0.8 * len(sound)


def forge(saved: Checkpoints, field: str, value: Any) -> None:
    """Change one field of the newest record, and compute its checksum again."""
    written = saved.folder / "00000003" / "record.json"
    content = {**json.loads(written.read_text()), field: value}
    del content["record_sha256"]
    written.write_text(json.dumps({**content, "record_sha256": sha256_of(content)}))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("step", "three"),
        ("step", None),
        ("best", []),
        ("best", {"step": 9, "score": 1.0, "values": {}}),
        ("best", {"step": 1, "score": "high", "values": {}}),
        ("seconds", {}),
        ("log", {"step": 1}),
        ("log", [1, 2]),
        ("fingerprint", []),
        ("fingerprint", {"config": {}, "data": {"train": 3}, "code": {}}),
    ],
)
def test_a_record_of_another_shape_is_damage_even_with_a_sound_checksum(
    field: str, value: Any, saved: Checkpoints
) -> None:
    forge(saved, field, value)
    assert f"00000003 is damaged ({field}" in passed_over(saved)


def test_a_file_that_is_no_safetensors_is_damage_even_with_a_sound_checksum(saved: Checkpoints) -> None:
    state = saved.folder / "00000003" / "state.safetensors"
    state.write_bytes(b"\xff" * 40)
    forge(saved, "sha256", sha256(state))
    said: list[str] = []
    saved.say = said.append
    found = saved.newest()
    assert found is not None
    assert found[1] == record(2)
    assert "00000003 is damaged" in said[0]

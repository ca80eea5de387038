"""Pages that are made from the code and the tests, so that they cannot fall behind them."""

import ast
import logging
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

from site_tools import commands, links, pictures

READING_ORDER = (
    "first_mixer",
    "swap_vit",
    "swap_monai_unet",
    "plain_adamw",
    "train_small_test_large",
    "volume_3d",
    "fold_and_onnx",
    "own_mixer",
    "read_a_run",
    "reconstruct_bart",
)

# What the package promises, and the test files that hold it to that.
PROMISES = {
    "The operator is the paper's": ("test_theory.py", "ops/test_forms.py", "ops/test_gains.py", "ops/test_basis.py"),
    "Every mixer keeps one contract": ("mixers/test_registry_contract.py",),
    "Folding and export change nothing but the speed": ("surgery/test_fold.py", "surgery/test_onnx.py"),
    "Swapping keeps the rest of a network as it was": ("surgery/test_swap.py", "surgery/test_swap_libraries.py"),
    "A run that is killed goes on as if nothing had happened": ("train/test_resume.py", "train/test_checkpoints.py"),
    "A failing disk or a power failure leaves the previous checkpoint": ("train/test_faults.py",),
    "A run never goes on with another config or other data": ("train/test_fingerprint.py",),
    "Same seed, same curve; numbers that are not finite are named": ("train/test_loop.py",),
    "Files are written whole or not at all": ("common/test_files.py", "common/test_locks.py"),
    "Damaged data is one line that names the file": (
        "data/test_damage.py",
        "data/test_limits.py",
        "fuzz/test_fuzz_readers.py",
        "fuzz/test_fuzz_folders.py",
    ),
    "Leaks between splits are found before training": ("data/test_check.py", "data/test_loading.py"),
    "A reconstruction says how far it is from what was measured": ("reconstruct/test_trust.py",),
    "A reconstruction never overwrites what it did not write": ("reconstruct/test_volumes.py",),
    "Models are loaded by checksum, and nothing is unpickled": ("models/test_pretrained.py",),
    "A mistake on the command line is one line and a documented exit code": ("cli/test_errors.py",),
}


class ReadingOrder:
    """Sort key of the gallery: the order in which a newcomer reads the examples."""

    def __init__(self, src_dir: str) -> None:
        self.src_dir = src_dir

    def __call__(self, filename: str) -> int:
        return READING_ORDER.index(Path(filename).stem)


def one_thread(gallery_conf: dict[str, Any], file: str) -> None:
    """Reset torch before an example: one thread, a known seed, no messages about packages that are not installed."""
    import torch

    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    warnings.simplefilter("ignore", FutureWarning)
    torch.set_num_threads(1)
    torch.manual_seed(0)


def write_all(docs: Path) -> None:
    """Write every generated page and picture below docs/."""
    for original, copy in links.COPIES.items():
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(original, copy)
    generated = docs / "generated"
    generated.mkdir(exist_ok=True)
    write_if_changed(generated / "mixers.md", mixer_tables())
    write_if_changed(generated / "commands.md", commands.overview())
    (docs / "commands").mkdir(exist_ok=True)
    for name, text in commands.command_pages().items():
        write_if_changed(docs / "commands" / f"{name}.md", text)
    write_if_changed(generated / "measured.md", measured())
    write_if_changed(generated / "promises.md", promises(docs.parent / "tests"))
    write_if_changed(docs / "_static" / "pictures-data.js", pictures.as_script())


def write_if_changed(file: Path, text: str) -> None:
    """Write a text file; leave it alone, and its time with it, if it holds this text already."""
    if not file.is_file() or file.read_text() != text:
        file.write_text(text)


def mixer_tables() -> str:
    """Return the tables of `chasm mixers --markdown`, each below a heading."""
    command = [sys.executable, "-m", "chasm", "mixers", "--markdown"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    title, cost, taxonomy, notes, legend = printed.replace("*", "\\*").strip().split("\n\n")
    legend = "\n\n".join(legend.splitlines())
    return f"### Cost\n\n{title}\n\n{cost}\n\n{legend}\n\n### Taxonomy\n\n{taxonomy}\n\n### Notes\n\n{notes}\n"


def measured() -> str:
    """Return the section "Measured" of the README, for the page "Compare"."""
    readme = links.ROOT / "README.md"
    _, found, rest = readme.read_text().partition("## Measured\n")
    assert found, f"{readme}: no section Measured"
    return links.moved(rest.partition("\n## ")[0], readme, links.DOCS / "compare.md")


def promises(tests: Path) -> str:
    """Return the promises, each with the number of its tests and what they say.

    Args:
        tests: the folder of the tests.
    """
    parts = []
    for promise, files in PROMISES.items():
        sentences = [sentence for file in files for sentence in test_sentences(tests / file)]
        rows = "\n".join(f"- {sentence}" for sentence in sentences)
        where = ", ".join(f"`tests/{file}`" for file in files)
        parts.append(f":::{{dropdown}} {promise}: {len(sentences)} tests\n{rows}\n\nIn {where}.\n:::\n")
    return "\n".join(parts)


def test_sentences(file: Path) -> list[str]:
    """Return what the tests of a file check, in words: `test_an_empty_batch` becomes "an empty batch"."""
    tree = ast.parse(file.read_text())
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    return [name.removeprefix("test_").replace("_", " ") for name in names]

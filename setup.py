"""What pyproject.toml cannot say: recipes are installed inside the package, and the package index gets the README.

The index knows no files of the repository, so that relative links become plain text there and pictures are left out.
With SOURCE_DATE_EPOCH wheel and source archive are the same bytes whenever and wherever they are built.
"""

import gzip
import io
import os
import re
import tarfile
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist


class WithRecipes(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:  # the package finds those of its checkout
            return
        recipes = sorted(Path("recipes").glob("*.yaml"))
        if not recipes:
            raise FileNotFoundError("recipes: no *.yaml here: a wheel is built from a checkout or a source archive")
        target = Path(self.build_lib, "chasm", "recipes")
        self.mkpath(str(target))
        for recipe in recipes:
            self.copy_file(str(recipe), str(target))
        for path in Path(self.build_lib).rglob("*"):  # the source may have been unpacked under another umask
            path.chmod(0o755 if path.is_dir() else 0o644)


class Reproducible(sdist):
    def make_archive(self, base_name: str, format: str, *args: object, **options: object) -> str:
        """Make the archive, and give all its entries one time, one owner and the mode of a fresh checkout."""
        path = Path(super().make_archive(base_name, format, *args, **options))
        epoch = os.environ.get("SOURCE_DATE_EPOCH")
        if epoch is None or format != "gztar":
            return str(path)
        packed = io.BytesIO()
        with tarfile.open(path) as old, tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as new:
            for entry in sorted(old.getmembers(), key=lambda entry: entry.name):
                plain = tarfile.TarInfo(entry.name)
                plain.type, plain.size, plain.mtime = entry.type, entry.size, int(epoch)
                plain.mode = 0o755 if entry.isdir() or entry.mode & 0o100 else 0o644
                new.addfile(plain, old.extractfile(entry))
        path.write_bytes(gzip.compress(packed.getvalue(), mtime=int(epoch)))
        return str(path)


os.umask(0o022)  # modes of files are part of an archive


def readme() -> str:
    text = Path("README.md").read_text(encoding="utf-8")
    text = re.sub(r"!\[[^\]]*\]\((?!https?:)[^)]*\)\n*", "", text)
    return re.sub(r"\[([^\]]+)\]\((?!https?:)[^)]*\)", r"\1", text)


setup(
    cmdclass={"build_py": WithRecipes, "sdist": Reproducible},
    long_description=readme(),
    long_description_content_type="text/markdown",
)

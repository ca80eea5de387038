"""What pyproject.toml cannot say: recipes are installed inside the package, and the package index gets the README.

The index knows no files of the repository, so that relative links become plain text there and pictures are left out.
"""

import re
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


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


def readme() -> str:
    text = Path("README.md").read_text(encoding="utf-8")
    text = re.sub(r"!\[[^\]]*\]\((?!https?:)[^)]*\)\n*", "", text)
    return re.sub(r"\[([^\]]+)\]\((?!https?:)[^)]*\)", r"\1", text)


setup(cmdclass={"build_py": WithRecipes}, long_description=readme(), long_description_content_type="text/markdown")

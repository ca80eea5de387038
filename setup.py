"""What pyproject.toml cannot say: the recipes at the root of the repository are installed inside the package."""

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


setup(cmdclass={"build_py": WithRecipes})

"""The documentation site: `make docs` builds it offline into build/site, with warnings as errors."""

import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests")]  # for the package `site_tools` and the module `libraries`

from site_tools import fold, generate, links, reference  # noqa: E402

import chasm  # noqa: E402
from libraries import library  # noqa: E402

library("deepinv")  # for the reference of chasm.interop.deepinv

project = "chasm"
author = "The chasm developers"
project_copyright = "2026, the chasm developers"
version = release = chasm.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx_gallery.gen_gallery",
]
exclude_patterns = ["generated", "site_tools", "**/sg_execution_times.rst", "sg_execution_times.rst"]
templates_path = ["_templates"]
default_role = "code"  # docstrings write `names` with single backticks
smartquotes_action = "D"  # dashes in lists of parameters; quotation marks stay as one types them

# --- pages ---------------------------------------------------------------------------------------

myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist", "html_image"]
myst_heading_anchors = 4
suppress_warnings = ["config.cache"]  # sphinx-gallery keeps classes in its configuration

# --- API reference -------------------------------------------------------------------------------

autosummary_generate = True
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autodoc_default_options = {"members": True, "show-inheritance": True}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_admonition_for_examples = False

# --- gallery -------------------------------------------------------------------------------------

sphinx_gallery_conf = {
    "examples_dirs": "../examples",
    "gallery_dirs": "gallery",
    "filename_pattern": r"\.py$",
    "within_subsection_order": "site_tools.generate.ReadingOrder",
    "abort_on_example_error": True,
    "default_thumb_file": str(HERE / "overview.png"),
    "capture_repr": (),  # only what is printed
    "download_all_examples": False,
    "show_memory": False,
    "show_signature": False,
    "min_reported_time": 1,
    "remove_config_comments": True,
    "reset_modules": ("matplotlib", "site_tools.generate.one_thread"),
}

# --- look ----------------------------------------------------------------------------------------

html_theme = "pydata_sphinx_theme"
html_title = f"chasm {release}"
html_static_path = ["_static"]
html_css_files = ["chasm.css"]
html_sidebars = {page: [] for page in ("index", "start", "understand", "use", "reconstruct")}  # nothing below them
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {
    "logo": {"text": "chasm"},
    "navbar_align": "left",
    "header_links_before_dropdown": 8,
    "show_prev_next": True,
    "secondary_sidebar_items": {  # code wants the width
        "**": ["page-toc"],
        **{f"gallery/{name}": [] for name in generate.READING_ORDER},
    },
    "footer_start": ["copyright"],
    "footer_end": [],
    "navigation_with_keys": False,
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True


def setup(app: Any) -> None:
    """Write the generated pages, and connect what changes pages while Sphinx reads and writes them."""
    generate.write_all(HERE)
    app.connect("source-read", links.rewrite)
    app.connect("autodoc-process-signature", reference.of_init)
    app.connect("autodoc-skip-member", reference.skip_foreign)
    app.connect("doctree-resolved", fold.long_tables)

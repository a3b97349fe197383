"""The site's settings: `nox -s docs` builds it, and a warning is an error."""

import importlib
from importlib import metadata

from sphinx.ext.autodoc.mock import mock

with mock(["torch"]):  # the site needs no more of PyTorch than names
    importlib.import_module("torch").__version__ = (2, 13)
    base = type("_FunctionBase", (), {"apply": None})  # operators take its apply from below Function
    importlib.import_module("torch.autograd").Function = type("Function", (base,), {})
    importlib.import_module("cuops.nn")

project = "cuops"
author = "The cuops authors"
copyright = author
release = metadata.version("cuops")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_argparse_cli", "sphinx_copybutton"]
exclude_patterns = ["cuda-versions.md"]  # installing.md includes it
myst_heading_anchors = 3
autodoc_typehints = "none"  # the docstrings name what is accepted
napoleon_google_docstring = True
smartquotes_action = "qe"  # two hyphens before an option stay such

html_theme = "furo"
html_title = f"cuops {release}"
nitpicky = True

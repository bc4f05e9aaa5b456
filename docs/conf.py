"""Configuration of the documentation site; ``make docs`` builds it, without network, and a warning is an error.

What can be made from the code is made from it at each build (``from_code.py``), into ``generated/``, which git ignores.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pygments.lexers.special import TextLexer

sys.path.insert(0, str(Path(__file__).parent))

import from_code

from reshard.version import __version__

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "reshard"
author = "The reshard authors"
project_copyright = author
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_click", "sphinx_copybutton"]
exclude_patterns = ["_build", "generated/*.inc.*"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_member_order = "bysource"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
copybutton_prompt_text = "$ "
nitpicky = False  # types of torch and numpy have no page here, and nothing is fetched from theirs

html_theme = "furo"
html_title = f"reshard {__version__}"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_extra_path = ["generated/pages"]
html_theme_options = {"source_edit_link": "", "source_view_link": ""}
html_copy_source = False
html_show_sourcelink = False


def setup(app: Sphinx) -> None:
    """Write the generated pages, and name the lexers that Pygments does not have."""
    app.add_lexer("mermaid", TextLexer)
    from_code.write(Path(__file__).parent / "generated")

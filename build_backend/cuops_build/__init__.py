"""The PEP 517 backend of every package here: hatchling, whose hooks are in hatch_build.py beside this package."""

from hatchling.build import (  # noqa: F401
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
)

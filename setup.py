"""What pyproject.toml cannot say: while in development the commit is a part of the version that is built.

It is read from the checkout. Where .git is not, as in an image's build, SEAMARK_COMMIT says it.
"""

import os
import re
import runpy
from pathlib import Path

from setuptools import setup

HALVES = (Path(__file__).resolve().parent / half / "version.py" for half in ("proxy", "engine_patches"))
release, _, commit = runpy.run_path(str(next(filter(Path.exists, HALVES))))["version"]().partition("+")
if ".dev" in release and (given := os.environ.get("SEAMARK_COMMIT")):
    if re.fullmatch("[0-9a-f]{9,40}", given) is None:
        raise SystemExit("SEAMARK_COMMIT is no commit in full: give what `git rev-parse HEAD` says")
    commit = "g" + given[:9]
# Without one a source distribution keeps that of the checkout it was made from.
setup(options={"egg_info": {"tag_build": "+" + commit}} if commit else {})

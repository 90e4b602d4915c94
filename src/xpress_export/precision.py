"""Which precision each model of a bundle runs in: `int8` for all, or `target=int8,drafter=fp8` for some."""

from __future__ import annotations

from collections.abc import Mapping

from xpress_export import names
from xpress_export.errors import BundleError
from xpress_export.manifest import Manifest
from xpress_export.platforms import QUANTIZED

Precision = str | Mapping[str, str] | None
"""One for all models, one for each of some models, or None: what the bundle was built to run in."""


def parse_precision(text: str | None) -> Precision:
    """The value of a `--precision` option; a BundleError if it is neither form."""
    if text is None or "=" not in text:
        return text
    chosen: dict[str, str] = {}
    for part in text.split(","):
        role, _, precision = part.partition("=")
        if role not in names.ROLES or not precision or role in chosen:
            raise BundleError(f"--precision {text!r} should be a precision, or role=precision with commas between")
        chosen[role] = precision
    return chosen


def choose_precisions(manifest: Manifest, asked: Precision) -> dict[str, str]:
    """The precision of each model of the bundle.

    A single precision is that of every model that has it; the others stay in the bundle's own. Raises BundleError
    where nothing has it, or where a model lacks the one asked of it by name.
    """
    own = manifest.precision
    if asked is None:
        asked = manifest.run_precision or own
    if isinstance(asked, str):
        found = {role: asked for role in manifest.roles if asked in manifest.precisions(role)}
        if not found:
            raise _lacks(manifest, "no model", asked)
        return {role: found.get(role, own) for role in manifest.roles}
    for role, precision in asked.items():
        if role not in manifest.roles:
            raise BundleError(f"the bundle has no {role}; it has {', '.join(manifest.roles)}")
        if precision not in manifest.precisions(role):
            raise _lacks(manifest, f"no {role}", precision)
    return {role: asked.get(role, own) for role in manifest.roles}


def step_precision(manifest: Manifest, chosen: Mapping[str, str]) -> str:
    """The precision of the step graph whose models run as `chosen`; a BundleError if the bundle has no such step."""
    steps = manifest.precisions(names.STEP) if names.STEP in manifest.cycle else ()
    for precision in steps:
        if choose_precisions(manifest, precision) == chosen:
            return precision
    asked = ", ".join(f"{role}={precision}" for role, precision in chosen.items())
    if not steps:
        raise BundleError(
            f"the bundle has no fused step; build one with `xpress-export build --layout {names.LAYOUT_FUSED}`"
        )
    raise BundleError(
        f"the bundle has no fused step of {asked} (it has {', '.join(steps)}); "
        f"`xpress-export quantize BUNDLE --precision P` adds the step of P, and --layout {names.LAYOUT_SPLIT} "
        f"runs any combination"
    )


def _lacks(manifest: Manifest, what: str, precision: str) -> BundleError:
    has = "; ".join(f"{role}: {', '.join(manifest.precisions(role))}" for role in manifest.roles)
    if precision in QUANTIZED:
        how = f"add it with `xpress-export quantize BUNDLE --precision {precision}`"
    else:
        how = f"build a bundle with `xpress-export build --precision {precision}`"
    return BundleError(f"the bundle has {what} in {precision} (it has {has}); {how}")

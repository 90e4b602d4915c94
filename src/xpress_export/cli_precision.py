"""The `--precision` option of every command that runs or compiles a bundle."""

from __future__ import annotations

from typing import Any

import click

from xpress_export.errors import BundleError
from xpress_export.precision import Precision, parse_precision


class _Precision(click.ParamType[Precision]):
    """A precision, or role=precision with commas between."""

    name = "precision"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Precision:
        try:
            return parse_precision(value) if isinstance(value, str) else value
        except BundleError as error:
            self.fail(str(error), param, ctx)


PRECISION = click.option(
    "--precision",
    type=_Precision(),
    metavar="P",
    help="Of the graphs: int8 for every model that has it, or target=int8,drafter=fp8.  [default: the bundle's]",
)

"""The one error of this package."""

from xpress_export.errors import XpressExportError


class TrainingError(XpressExportError):
    """Options, data or a checkpoint of a training run are not usable, or the run cannot go on."""

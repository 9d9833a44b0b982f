"""Why a question is not answered."""

from hami.protocol.errors import HamiError


class AnswerError(HamiError):
    """The question cannot be answered: what is missing or wrong, and what to do."""


class SnapshotError(AnswerError):
    """The file is no snapshot, or one that cannot be read."""


class MetricsError(AnswerError):
    """The text is no metrics text."""

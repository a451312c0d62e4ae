"""Errors that a user can fix. Any other exception is a bug and keeps its traceback."""


class SfiError(Exception):
    """Base class; the CLI prints the message on one line and exits with `exit_code`."""

    exit_code = 1


class ConfigError(SfiError, ValueError):
    """A setting is out of range or contradicts another setting."""

    exit_code = 2


class InputError(SfiError):
    """A file, a model folder or a prompt cannot be read."""

    exit_code = 3


class TraceError(InputError):
    """A trace is missing, damaged or of another schema version."""


class BackendError(SfiError):
    """This machine cannot run what was asked for."""

    exit_code = 4


class UnsupportedModelError(BackendError):
    """The model's architecture cannot run under SFI; the message says why."""


class MemoryForecastError(BackendError):
    """The run would need more memory than is free."""


class NumericsError(SfiError):
    """The model produced NaN or infinite logits."""


class RankLostError(SfiError):
    """Another process of a tensor-parallel run has died or does not answer."""

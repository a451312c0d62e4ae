"""Mistakes a user can make and fix. Anything else is a bug and keeps its traceback.

* SfiError            exit code 1
  x ConfigError       exit code 2; a setting is out of range or two settings contradict
  x InputError        exit code 3; a file, a model folder or a prompt cannot be read
    x TraceError      exit code 3; a trace is missing, truncated or of another schema version
  x BackendError      exit code 4; this machine cannot run what was asked for
    x UnsupportedModelError  exit code 4; this architecture cannot run under SFI
    x MemoryForecastError    exit code 4; the run would not fit
  x NumericsError     exit code 1; the model produced NaN or infinite logits
  x RankLostError     exit code 1; another process of a tensor-parallel run died or hangs
"""


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
    """A trace cannot be read."""


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

"""Errors a user can act on. Anything else that travels up is a bug and keeps its own type."""


class DFlashError(Exception):
    """Base of the errors below; the message is one sentence for the user."""


class InputError(DFlashError, ValueError):
    """A value the user gave cannot work; the message names it, what was expected and what to do."""


class StorageError(DFlashError, OSError):
    """The object store refuses us or cannot be reached."""


class UnreachableError(DFlashError):
    """A server that is to answer does not."""


class IncompleteError(DFlashError):
    """A dataset is used before its manifest exists."""


class MismatchError(DFlashError):
    """Two datasets, or a dataset and a request, do not belong together."""


class CorruptError(DFlashError):
    """Committed data does not match its commit record."""


class DeviceError(DFlashError):
    """A GPU, or the process that worked on it, was lost; the same work may succeed on a new one."""

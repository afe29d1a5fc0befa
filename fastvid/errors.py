"""All errors that fastvid raises deliberately.

    FastvidError
    ├── UsageError (ValueError)              an argument, key or configuration value is invalid
    │   └── SampleNotFoundError (KeyError, IndexError)  a dataset has no sample with this key or number
    ├── MissingDependency (ImportError)      an optional package is missing or fails to import
    ├── StorageError (OSError)               bytes cannot be listed, read or written
    │   ├── ConflictError                    another process changed the dataset in the meantime
    │   └── UnavailableError                 a store or disk failed or denied access: no fault of the file
    ├── FormatError                          the data on disk violates the format
    │   ├── VersionError                     written by a newer major version of the format
    │   └── ChecksumError                    the bytes read differ from the bytes that were indexed
    ├── DecodeError                          the packets do not decode to the expected frames
    ├── SourceError                          a raw video cannot become a sample; has a reason code
    ├── JobError                             a sharding job cannot start, resume or finish
    ├── StateError                           a loader or trainer state does not belong to this run
    └── WorkerError                          a worker thread or process died or stopped responding

A message states what happened, with which value, and where; `hint` states how to fix it.
Exceptions of other libraries are translated in the one file that imports the library.
"""

from __future__ import annotations

import builtins
import contextlib
from collections.abc import Iterator, Mapping
from typing import Any


def visible(text: str) -> str:
    """Escape the characters of a text that control a terminal, for names and messages from files and other machines.

    Line breaks, escape sequences and marks that reverse the direction of writing become ``\\n``, ``\\x1b`` and so on.
    """
    return "".join(
        one if one == " " or one.isprintable() else one.encode("unicode_escape").decode("ascii") for one in text
    )


class FastvidError(Exception):
    """Base of all errors raised by fastvid.

    Args:
        message: What happened, including the offending value.
        hint: How the user can fix it; printed on a separate line.
        **where: Where it happened, such as ``shard=``, ``key=``, ``file=``, ``frame=``. None values are dropped.
    """

    is_told = False  # whether another rank of a training run prints the same

    def __init__(self, message: str, *, hint: str | None = None, **where: object) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.where: dict[str, object] = {name: value for name, value in where.items() if value is not None}

    def at(self, **where: object) -> FastvidError:
        """Add details of the location that the caller knows, keeping those already set, and return self."""
        for name, value in where.items():
            if value is not None:
                self.where.setdefault(name, value)
        return self

    def at_sample(self, shard: str, key: str) -> FastvidError:
        """Add the sample that was read, and a hint for damaged data unless the error has a hint; return self."""
        if self.hint is None and isinstance(self, FormatError | DecodeError):
            self.hint = "run `fastvid verify DIR` to see what is damaged in the dataset in DIR"
        return self.at(shard=shard, key=key)

    def __str__(self) -> str:
        text = "\n".join(map(visible, self.message.split("\n")))
        if self.where:
            text += " [" + ", ".join(f"{name}={visible(str(value))}" for name, value in self.where.items()) + "]"
        if self.hint:
            text += f"\n  hint: {self.hint}"
        return text

    def __reduce__(self) -> tuple[object, ...]:
        # Errors are sent between processes, and the default pickling of exceptions loses keyword-only arguments.
        return _rebuild, (type(self), self.message, self.hint, self.where, self._extra())

    def _extra(self) -> dict[str, object]:
        return {}


class UsageError(FastvidError, ValueError):
    """An argument, key or configuration value is invalid."""


class SampleNotFoundError(UsageError, KeyError, IndexError):
    """A dataset has no sample with this key or number."""

    # KeyError.__str__ would print the message with quotes.
    __str__ = FastvidError.__str__


class MissingDependency(FastvidError, ImportError):
    """An optional package is missing or fails to import."""


# The extra of fastvid that installs each module, by import name.
_EXTRAS = {
    "PIL": "prepare",
    "cv2": "flow",
    "duckdb": "prepare",
    "obstore": "object-stores",
    "ray": "ray",
    "tensorboard": "tensorboard",
    "torch": "torch",
    "wandb": "wandb",
}


@contextlib.contextmanager
def naming_extras() -> Iterator[None]:
    """Say which extra to install if the block fails to import a module."""
    try:
        yield
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module not in _EXTRAS:
            raise
        raise MissingDependency(
            f"this needs {module}, which is not installed", hint=f"pip install 'fastvid-toolkit[{_EXTRAS[module]}]'"
        ) from error


class StorageError(FastvidError, OSError):
    """Bytes cannot be listed, read or written."""

    # OSError.__str__ would print errno and strerror instead of the message.
    __str__ = FastvidError.__str__


class ConflictError(StorageError):
    """Another process changed the dataset in the meantime; nothing was written."""


class UnavailableError(StorageError):
    """A store or disk failed, did not answer or denied access; this says nothing about the bytes of the file."""


class FormatError(FastvidError):
    """The data on disk violates the format."""


class VersionError(FormatError):
    """The data was written by a newer major version of the format."""


class ChecksumError(FormatError):
    """The bytes read differ from the bytes that were indexed."""


class DecodeError(FastvidError):
    """The packets do not decode to the expected frames."""


class SourceError(FastvidError):
    """A raw video cannot become a sample.

    Args:
        reason: A code from `fastvid.media.reasons`, stable across versions; the ledger is grouped by it.
        transient: Whether a retry may succeed, as after a time-out.
    """

    def __init__(
        self, message: str, *, reason: str, transient: bool = False, hint: str | None = None, **where: object
    ) -> None:
        super().__init__(message, hint=hint, **where)
        self.reason = reason
        self.transient = transient

    def _extra(self) -> dict[str, object]:
        return {"reason": self.reason, "transient": self.transient}


class JobError(FastvidError):
    """A sharding job cannot start, resume or finish, or a training run cannot start."""


class StateError(FastvidError):
    """A loader or trainer state does not belong to this run."""


class WorkerError(FastvidError):
    """A worker thread or process died or stopped responding."""


def _rebuild(
    kind: type[FastvidError], message: str, hint: str | None, where: dict[str, object], extra: dict[str, object]
) -> FastvidError:
    return kind(message, hint=hint, **extra, **where)


def error_to_json(error: Exception) -> dict[str, Any]:
    """Return an error as plain data, for a process that does not unpickle what this process sends.

    An error class of another library is replaced by its nearest built-in base class.
    """
    home = {FastvidError.__module__, builtins.__name__}
    kind = next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ in home)
    if not isinstance(error, FastvidError):
        plain = all(isinstance(argument, str | int | float | None) for argument in error.args)
        return {"kind": kind, "args": list(error.args) if plain else [str(error)]}
    where = {name: value if isinstance(value, str | int | float) else str(value) for name, value in error.where.items()}
    return {"kind": kind, "message": error.message, "hint": error.hint, "where": where, "extra": error._extra()}


def error_from_json(record: Mapping[str, Any]) -> Exception:
    """Return the error that `error_to_json` converted; FormatError for data that is no error."""
    try:
        kind = globals().get(record["kind"], getattr(builtins, record["kind"], None))
        if not (isinstance(kind, type) and issubclass(kind, Exception)):
            raise FormatError(f"{record['kind']!r} is not an error class")
        if issubclass(kind, FastvidError):
            message, hint = record["message"], record["hint"]
            if not (isinstance(message, str) and isinstance(hint, str | None)):
                raise FormatError(f"an error has the message {message!r} and the hint {hint!r}, expected text")
            return _rebuild(kind, message, hint, record["where"], record["extra"])
        args = list(record["args"])
    except (KeyError, TypeError, AttributeError) as error:
        raise FormatError(f"an error does not parse: {error!r}") from error
    try:
        return kind(*args)
    except TypeError:  # classes such as UnicodeDecodeError cannot be created from text alone
        return Exception(f"{kind.__name__}: {', '.join(map(str, args))}")

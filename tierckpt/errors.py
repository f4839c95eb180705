"""Every exception tierckpt raises.

    TierckptError
    ├── ConfigError (ValueError)                      exit 2   an invalid setting, URI or argument
    │   ├── MissingExtraError (ImportError)                    a package that is not installed
    │   └── UnsupportedTorchError (ImportError)                this torch lacks a private name
    ├── StoreError                                    exit 1   raised by stores/ and peer/ only
    │   ├── ObjectNotFoundError (FileNotFoundError)   exit 4
    │   │   └── BucketNotFoundError
    │   ├── PermissionDeniedError (PermissionError)   exit 6   missing or wrong credentials, read-only mount
    │   ├── EndpointError (ConfigError)               exit 2   wrong endpoint, certificate, region or proxy
    │   ├── PreconditionFailedError                            put-if-absent found an object, or an etag changed
    │   └── StoreUnavailableError                     exit 7   try again later: retries are exhausted
    │       ├── HubOfflineError                       exit 2   HF_HUB_OFFLINE is set
    │       └── PeerError                                      another node gives no or a wrong answer
    │           └── PeerBusyError                              its limit of requests: .retry_after_seconds
    ├── CapacityError (OSError)                       exit 1   no room: disk full, quota; no memory, thread or file
    ├── IntegrityError                                exit 5   bytes differ from the manifest
    │   ├── ManifestError (ValueError)                         an invalid manifest
    │   └── UnsafeCheckpointError (ValueError)                 more than data: code, foreign paths, false claims
    ├── CheckpointError                               exit 1
    │   ├── CheckpointNotFoundError (FileNotFoundError) exit 4
    │   ├── UncommittedCheckpointError                exit 4   files exist, but no commit
    │   ├── AlreadyCommittedError (FileExistsError)            another save owns this id
    │   ├── CommitAbandonedError                               some rank never finished its part
    │   ├── CheckpointSkippedError                    exit 7   staging is full and the policy is to skip
    │   └── StateMismatchError (ValueError)                    the state dict does not fit the checkpoint
    ├── UpdaterLostError                              exit 7   the process of a NearStorageOptimizer has ended
    ├── PartialTransferError                          exit 3   some files were not transferred: .failures
    └── OperationTimeoutError (TimeoutError)          exit 7   the message names the awaited event

Every instance pickles, because DCP sends exceptions between ranks. ``retryable`` alone decides whether the mover
retries.

Example:
    >>> issubclass(tierckpt.errors.CheckpointNotFoundError, FileNotFoundError)
    True
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .quantities import human_bytes
from .redaction import redact, redact_all


class TierckptError(Exception):
    """Base class of all errors. ``message`` states the failure and its object; ``hint`` the next step.

    Example:
        >>> try:
        ...     tierckpt.prefetch("run/step-7", to="copy")
        ... except tierckpt.TierckptError as error:
        ...     error.exit_code, error.to_json()["error"]
        (4, 'ObjectNotFoundError')
    """

    exit_code: int = 1
    retryable: bool = False
    is_logged: bool = False
    """Whether this process has logged the cause (``telemetry.log_failure``)."""

    def __init__(self, message: str, *, hint: str = "", **context: Any) -> None:
        # A server may repeat a secret.
        self.message = redact(message)
        self.hint = redact(hint)
        self.context = {key: redact_all(value) for key, value in context.items() if value is not None}
        super().__init__(self.message)

    def __str__(self) -> str:
        facts = ", ".join(f"{key}={_shown(key, value)}" for key, value in self.context.items())
        text = f"{self.message} [{facts}]" if facts else self.message
        return f"{text}. {self.hint}" if self.hint else text

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, self.hint, self.context))

    def to_json(self) -> dict[str, Any]:
        """Return one flat JSON object: error, message, hint and the context."""
        plain = (int, float, dict, list)
        facts = {key: value if isinstance(value, plain) else str(value) for key, value in self.context.items()}
        return {"error": type(self).__name__, "message": self.message, "hint": self.hint, **facts}


def from_json(facts: Mapping[str, Any]) -> TierckptError:
    """An unknown class becomes a CheckpointError that names it."""
    context = {key: value for key, value in facts.items() if key not in ("error", "message", "hint")}
    name, message, hint = (str(facts.get(key, "")) for key in ("error", "message", "hint"))
    kind = globals().get(name)
    if isinstance(kind, type) and issubclass(kind, TierckptError):
        return _rebuild(kind, message, hint, context)
    return CheckpointError(f"{name}: {message}", hint=hint, **context)


def _shown(key: str, value: Any) -> object:
    return human_bytes(value) if key.endswith("_bytes") and isinstance(value, int) and value >= 1024 else value


def _rebuild(kind: type[TierckptError], message: str, hint: str, context: dict[str, Any]) -> TierckptError:
    return kind(message, hint=hint, **context)


class ConfigError(TierckptError, ValueError):
    exit_code = 2


class MissingExtraError(ConfigError, ImportError):
    pass


class UnsupportedTorchError(ConfigError, ImportError):
    pass


class StoreError(TierckptError):
    pass


class ObjectNotFoundError(StoreError, FileNotFoundError):
    exit_code = 4


class BucketNotFoundError(ObjectNotFoundError):
    pass


class PermissionDeniedError(StoreError, PermissionError):
    exit_code = 6


class EndpointError(StoreError, ConfigError):
    """Retries are pointless."""


class PreconditionFailedError(StoreError):
    pass


class StoreUnavailableError(StoreError):
    exit_code = 7
    retryable = True


class HubOfflineError(StoreUnavailableError):
    exit_code = 2
    retryable = False


class PeerError(StoreUnavailableError):
    pass


class PeerBusyError(PeerError):
    """Use another peer, or this one after ``retry_after_seconds``."""

    @property
    def retry_after_seconds(self) -> float:
        return float(self.context.get("retry_after_seconds", 1.0))


class CapacityError(TierckptError, OSError):
    pass


class IntegrityError(TierckptError):
    exit_code = 5


class ManifestError(IntegrityError, ValueError):
    pass


class UnsafeCheckpointError(IntegrityError, ValueError):
    pass


class CheckpointError(TierckptError):
    pass


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    exit_code = 4


class UncommittedCheckpointError(CheckpointError):
    exit_code = 4


class AlreadyCommittedError(CheckpointError, FileExistsError):
    pass


class CommitAbandonedError(CheckpointError):
    pass


class CheckpointSkippedError(CheckpointError):
    exit_code = 7
    retryable = True


class StateMismatchError(CheckpointError, ValueError):
    pass


class UpdaterLostError(TierckptError):
    exit_code = 7
    retryable = True


class PartialTransferError(TierckptError):
    exit_code = 3

    @property
    def failures(self) -> dict[str, str]:
        return dict(self.context.get("failures", {}))


class OperationTimeoutError(TierckptError, TimeoutError):
    exit_code = 7
    retryable = True

"""One Settings object: keyword arguments > environment ``TIERCKPT_*`` > ``tierckpt.toml`` > defaults.

Sizes are written like ``"200GiB"``. Every field ends in its unit.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from pydantic import ByteSize, Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, TomlConfigSettingsSource

from .errors import ConfigError

MiB = 1 << 20
GiB = 1 << 30


def _default_local_root() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tierckpt"


class Settings(BaseSettings):
    """All settings. Build one with ``Settings.load(**overrides)``, which turns bad values into ``ConfigError``."""

    model_config = SettingsConfigDict(env_prefix="TIERCKPT_", toml_file="tierckpt.toml", extra="forbid", frozen=True)

    local_root: Path = Field(default_factory=_default_local_root)
    """Directory on node-local SSD that holds the local tier and the journal."""

    drain: bool = True
    """Drain each committed checkpoint to its URI in the background. False keeps it on the local tier only."""

    shard_size_bytes_max: ByteSize = Field(default=ByteSize(GiB), gt=0)
    """A shard is closed when the next item would pass this. The shard is the unit of retry, so it stays small."""

    chunk_size_bytes: ByteSize = Field(default=ByteSize(8 * MiB), ge=4096)
    """Bytes covered by one digest, and moved by one request."""

    concurrency: int = Field(default=4, ge=1, le=256)
    """Files in flight per mover. Each holds a few chunks, so this bounds the mover's memory."""

    commit_timeout_seconds: float = Field(default=1800.0, gt=0)
    """How long a mover waits for the other ranks' parts before it calls the checkpoint abandoned."""

    exit_timeout_seconds: float = Field(default=300.0, ge=0)
    """How long the process waits at exit for drains still running. What is left stays in the journal."""

    store_timeout_seconds: float = Field(default=60.0, gt=0)
    """Time one request to a store may take, its retries included."""

    retry_attempts_max: int = Field(default=5, ge=0)
    """Retries of one request inside the store client, with jittered backoff."""

    drain_retry_seconds_max: float = Field(default=30.0, gt=0)
    """Longest pause between two tries of a drain whose store is unavailable."""

    allow_tmpfs: bool = False
    """Say nothing when ``local_root`` is on tmpfs (memory), which does not survive the node."""

    @field_validator("local_root")
    @classmethod
    def _absolute(cls, value: Path) -> Path:
        return value.expanduser().absolute()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls)

    @classmethod
    def load(cls, settings: Settings | None = None, **overrides: Any) -> Settings:
        """Return ``settings`` with ``overrides`` applied, or a fresh one from the environment.

        Raises:
            ConfigError: an unknown name or a value that cannot work; the message names each.
        """
        try:
            if settings is None:
                return cls(**overrides)
            if not overrides:
                return settings
            return cls(**{**settings.model_dump(), **overrides})
        except ValidationError as error:
            lines = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
            raise ConfigError(
                f"invalid settings: {lines}", hint=f"Settings are {', '.join(cls.model_fields)}"
            ) from None

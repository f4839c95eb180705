"""``load_format="tierckpt"`` for vLLM (checked with 0.33): its default loader, with weights at the speed of the disk.

    vllm serve /nvme/llama-70b --load-format tierckpt
    vllm serve /nvme/llama-70b-config --load-format tierckpt \
        --model-loader-extra-config '{"uri": "s3://models/llama-70b"}'

vLLM calls ``register``, by the entry point group ``vllm.general_plugins``, in each of its processes.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from typing import Annotated, Any

import torch
from pydantic import BaseModel, Field, ValidationError
from torch import Tensor

from ..config import Settings
from ..disk.io_tuner import MODEL_READ_MODES, SHARED_READ_MODES, ReadMode
from ..errors import ConfigError
from ..format.uris import scheme_of
from ..loading.safetensors import BYTES_IN_FLIGHT_MAX, DEFERRED_BYTES_MIN, Deferral, WantedTensors
from ..loading.tensor_parts import Parts

LOAD_FORMAT = "tierckpt"
_VLLM_OWN = ("enable_weights_track", "enable_multithread_load", "num_threads")


class _Own(BaseModel):
    uri: str = ""
    device: str = "cpu"
    bytes_in_flight_max: Annotated[int, Field(strict=True, gt=0)] = BYTES_IN_FLIGHT_MAX


def register() -> None:
    from vllm.model_executor.model_loader import DefaultModelLoader, register_model_loader

    register_model_loader(LOAD_FORMAT)(_loader_class(DefaultModelLoader))


def _loader_class(base: Any) -> Any:
    import vllm.distributed.parallel_state as groups
    from vllm.config import get_current_vllm_config_or_none
    from vllm.model_executor.model_loader.ep_weight_filter import should_skip_weight
    from vllm.model_executor.model_loader.weight_utils import enable_tqdm

    class TierckptModelLoader(base):  # type: ignore[misc]
        """vLLM reads files other than safetensors."""

        counter_before_loading_weights: float = 0.0

        def __init__(self, load_config: Any) -> None:
            self._options = Options(load_config.model_loader_extra_config)
            config = copy.copy(load_config)
            config.load_format, config.model_loader_extra_config = "auto", self._options.for_vllm
            super().__init__(config)
            # A draft model, secondary weights and a reload from another path share these options, but not the URI.
            current = get_current_vllm_config_or_none()
            self._served = current.model_config.model if current is not None else None

        def _prepare_weights(
            self,
            model_name_or_path: str,
            subfolder: str | None,
            revision: str | None,
            fall_back_to_pt: bool,
            allow_patterns_overrides: list[str] | None,
        ) -> tuple[str, list[str], bool, str]:
            is_served = self._served is None or model_name_or_path == self._served
            if not self._options.uri or not is_served or allow_patterns_overrides is not None:
                found: tuple[str, list[str], bool, str] = super()._prepare_weights(
                    model_name_or_path, subfolder, revision, fall_back_to_pt, allow_patterns_overrides
                )
                return found
            if self.load_config.safetensors_load_strategy == "torchao":
                raise ConfigError(
                    "weights quantized by torchao are read by vLLM itself, which needs them in a directory",
                    hint=f"tierckpt prefetch {self._options.uri} --to DIR, and serve DIR without uri",
                )
            uri = self._options.uri.rstrip("/") + (f"/{subfolder}" if subfolder else "")
            return uri, [uri], True, ""

        def _get_weights_iterator(self, source: Any) -> Iterator[tuple[str, Tensor]]:
            """Raises as ``stream_safetensors``, mostly before any read."""
            _, locations, use_safetensors, _ = self._prepare_weights(
                source.model_or_path,
                source.subfolder,
                source.revision,
                source.fall_back_to_pt,
                source.allow_patterns_overrides,
            )
            if not use_safetensors or self.load_config.safetensors_load_strategy == "torchao":
                found: Iterator[tuple[str, Tensor]] = super()._get_weights_iterator(source)
                return found
            if self.counter_before_loading_weights == 0.0:
                self.counter_before_loading_weights = time.perf_counter()
            is_shown = enable_tqdm(self.load_config.use_tqdm_on_load)
            nodes = groups.get_node_count() if _ranks() > 1 else 1
            tensors = self._options.stream(sorted(locations), self._wanted(source.is_unused_weight), is_shown, nodes)
            return ((source.prefix + name, tensor) for name, tensor in tensors)

        def _wanted(self, is_unused: Callable[[str], bool] | None) -> Callable[[str], bool] | None:
            """Filter by vLLM's rules; None: all names."""
            experts, encoder_only = self.local_expert_ids, self._encoder_only_lm_prefixes
            mapper = self._encoder_only_weights_mapper
            if experts is None and encoder_only is None and is_unused is None:
                return None

            def is_wanted(name: str) -> bool:
                if should_skip_weight(name, experts) or (is_unused is not None and is_unused(name)):
                    return False
                mapped = name if mapper is None else mapper.map_name(name)
                return not (encoder_only and mapped is not None and mapped.startswith(encoder_only))

            return is_wanted

    return TierckptModelLoader


def _ranks() -> int:
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


class Options:
    """``--model-loader-extra-config``: ``uri``, ``device``, ``bytes_in_flight_max``, and any ``Settings``.

    ``for_vllm``: options of vLLM's default loader. Raises ConfigError: an unknown name or an invalid value.
    """

    def __init__(self, extra: dict[str, Any] | None) -> None:
        options = dict(extra or {})
        try:
            own = _Own.model_validate({name: options.pop(name) for name in _Own.model_fields if name in options})
        except ValidationError as error:
            raise ConfigError(
                f"model_loader_extra_config: {error}", hint="docs/guide/serving.md has the options"
            ) from None
        self.for_vllm = {name: options.pop(name) for name in _VLLM_OWN if name in options}
        self.uri, self._device, self._bytes_in_flight_max = own.uri, own.device, own.bytes_in_flight_max
        self._settings = Settings.load(**options)

    def stream(
        self, locations: list[str], names: Callable[[str], bool] | None, is_shown: bool, nodes: int = 1
    ) -> Generator[tuple[str, Tensor], None, None]:
        """Yield the tensors of files, or of a URI; show progress in bytes.

        All headers are checked before the first read. One of several ranks, or ``nodes``, gets only its parts of large
        tensors (``loading/safetensors.py``).
        """
        from tqdm.auto import tqdm

        is_fetched, ranks = any(map(scheme_of, locations)), _ranks()
        is_part = is_fetched and nodes > 1
        modes: tuple[ReadMode, ...] = MODEL_READ_MODES
        deferral = None
        if ranks > 1:
            modes = (replace(SHARED_READ_MODES[0], ranks=max(1, ranks // nodes)),)
            deferral = Deferral(1 if is_part else DEFERRED_BYTES_MIN)  # an unused one would cost a chunk
        with contextlib.ExitStack() as stack:
            every = [
                stack.enter_context(
                    contextlib.closing(WantedTensors(location, self._device, names, "", Parts(), self._settings, modes))
                )
                for location in locations
            ]
            bar = stack.enter_context(
                tqdm(
                    desc="Loading safetensors using tierckpt",
                    total=sum(want.size_bytes for selected in every for want in selected.requests),
                    disable=not is_shown,
                    unit="B",
                    unit_scale=True,
                    mininterval=1.0,
                )
            )
            for selected in every:
                if not is_part:
                    selected.begin()
                for name, tensor in selected.stream(self._bytes_in_flight_max, deferral):
                    bar.update(tensor.nbytes)
                    yield name, tensor
            if deferral is not None and is_fetched:  # a path can be read later, too
                deferral.settle()

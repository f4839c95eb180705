"""``load_format="tierckpt"`` for vLLM: weights are streamed into the model at the speed of the disk.

vLLM finds ``register`` by the entry point group ``vllm.general_plugins`` and calls it in each of its processes. Weights
come as whole tensors, in the order of the files; vLLM's own layers take their tensor-parallel part of each. Ranks of
one node that read a URI share the node cache, so each byte comes from the store once.

    vllm serve /nvme/llama-70b --load-format tierckpt
    vllm serve /nvme/llama-70b-config --load-format tierckpt \
        --model-loader-extra-config '{"uri": "s3://models/llama-70b"}'

Source: vLLM's plugin system and its ``BaseModelLoader`` (``download_model``, ``load_weights``).
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from torch import Tensor

from ..config import Settings
from ..errors import ConfigError
from ..loading.safetensors import BYTES_IN_FLIGHT_MAX, stream_safetensors

LOAD_FORMAT = "tierckpt"
_OWN = {"uri": str, "device": str, "bytes_in_flight_max": int}


def register() -> None:
    """Make ``load_format="tierckpt"`` known to the vLLM of this process. vLLM may call it more than once."""
    from vllm.model_executor.model_loader import BaseModelLoader, register_model_loader

    register_model_loader(LOAD_FORMAT)(_loader_class(BaseModelLoader))


def _loader_class(base: Any) -> Any:
    """The loader, made when vLLM is there to derive it from."""

    class TierckptModelLoader(base):  # type: ignore[misc]
        """Loads what ``weights`` streams; everything else is vLLM's."""

        def __init__(self, load_config: Any) -> None:
            super().__init__(load_config)
            self._options = Options(getattr(load_config, "model_loader_extra_config", None))

        def download_model(self, model_config: Any) -> None:
            """Nothing: what is not here is read through the node cache while it is loaded."""

        def load_weights(self, model: Any, model_config: Any) -> None:
            """Stream every weight into ``model``.

            Raises:
                TierckptError: as ``stream_safetensors``; the model is not loaded then.
            """
            stream = self._options.weights(model_config)
            try:
                model.load_weights(stream)
            finally:
                stream.close()

    return TierckptModelLoader


class Options:
    """What ``--model-loader-extra-config`` says: ``uri``, ``device``, ``bytes_in_flight_max``, and any ``Settings``.

    Raises:
        ConfigError: a name that nobody knows, or a value that cannot be.
    """

    def __init__(self, extra: dict[str, Any] | None) -> None:
        given = dict(extra or {})
        own = {name: given.pop(name) for name in _OWN if name in given}
        for name, value in own.items():
            if not isinstance(value, _OWN[name]) or isinstance(value, bool):
                raise ConfigError(
                    f"{name} of model_loader_extra_config is {value!r}", hint=f"Give a value of {_OWN[name].__name__}"
                )
        self._uri: str = own.get("uri", "")
        self._device: str = own.get("device", "cpu")
        self._bytes_in_flight_max: int = own.get("bytes_in_flight_max", BYTES_IN_FLIGHT_MAX)
        self._settings = Settings.load(**given)

    def weights(self, model_config: Any) -> Generator[tuple[str, Tensor], None, None]:
        """Stream the weights of the model that vLLM is to serve."""
        # vLLM keeps the place of the weights apart where it has fetched configuration and tokenizer elsewhere.
        place = self._uri or getattr(model_config, "model_weights", "") or model_config.model
        return stream_safetensors(
            place, self._device, bytes_in_flight_max=self._bytes_in_flight_max, settings=self._settings
        )

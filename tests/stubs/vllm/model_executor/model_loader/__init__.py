"""The registry of load formats, and the class that loaders derive from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

REGISTRY: dict[str, type[BaseModelLoader]] = {}


class BaseModelLoader(ABC):
    def __init__(self, load_config: Any) -> None:
        self.load_config = load_config

    @abstractmethod
    def download_model(self, model_config: Any) -> None: ...

    @abstractmethod
    def load_weights(self, model: Any, model_config: Any) -> None: ...

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> Any:
        """Build the model, have its weights loaded, and hand it out for inference: the order vLLM keeps."""
        model = vllm_config.make_model()
        self.load_weights(model, model_config)
        return model.eval()


def register_model_loader(load_format: str) -> Callable[[type], type]:
    def add(loader: type) -> type:
        if not issubclass(loader, BaseModelLoader):
            raise TypeError(f"{loader} is no loader")
        REGISTRY[load_format] = loader
        return loader

    return add


def get_model_loader(load_config: Any) -> BaseModelLoader:
    if load_config.load_format not in REGISTRY:
        raise ValueError(f"nobody loads {load_config.load_format}")
    return REGISTRY[load_config.load_format](load_config)

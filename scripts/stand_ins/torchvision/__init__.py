"""Stands in for torchvision while vLLM's scheduler tests run, on machines where only builds of it for GPUs are to be had.

Model modules import it. To learn how many tokens an image takes, vLLM has one blank image processed: the four functions that
takes are here (`_FUNCTIONS`). Every other name is a class that cannot be made.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

__version__ = "0.0"
__path__: list[str] = []


def pil_to_tensor(image: Any) -> Any:
    """Channels × height × width, of bytes."""
    import numpy
    import torch

    return torch.from_numpy(numpy.array(image)).permute(2, 0, 1)


def resize(image: Any, size: Any, **_: Any) -> Any:
    """To `size`, by the nearest pixel: what the image shows does not matter here."""
    import torch

    height_width = (size.height, size.width) if hasattr(size, "height") else tuple(size)
    pixels = image.float() if image.dim() == 4 else image.float().unsqueeze(0)
    sized = torch.nn.functional.interpolate(pixels, size=height_width).to(image.dtype)
    return sized if image.dim() == 4 else sized.squeeze(0)


def crop(image: Any, top: int, left: int, height: int, width: int) -> Any:
    """A rectangle of it."""
    return image[..., top : top + height, left : left + width]


def normalize(image: Any, mean: Sequence[float], std: Sequence[float], inplace: bool = False) -> Any:
    """Each channel less its mean, over its deviation."""
    import torch

    shape = (-1, 1, 1)
    return (image - torch.as_tensor(mean).view(shape)) / torch.as_tensor(std).view(shape)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function for function in (pil_to_tensor, resize, crop, normalize)
}


class _Absent(type):
    """A class that cannot be made, whose attributes are their own names: tables of constants are built at import."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"torchvision is not installed: {cls.__name__}")


class _AnySubmodule:
    """Finds and loads `torchvision.<anything>`."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not name.startswith(f"{__name__}."):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        def names(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            if name in _FUNCTIONS:
                return _FUNCTIONS[name]
            return importlib.import_module(f"{module.__name__}.{name}") if name.islower() else _Absent(name, (), {})

        module.__getattr__ = names  # type: ignore[method-assign]


sys.meta_path.append(_AnySubmodule())

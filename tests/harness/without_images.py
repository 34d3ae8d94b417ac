"""Models that read images, imported without torchvision by who gives them text: vLLM's CPU build comes without it."""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path


def stand_for_processor() -> None:
    """For an image processor of transformers that Qwen's models import."""
    processor = types.ModuleType("transformers.models.qwen2_vl.image_processing_qwen2_vl")
    for name in ("Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast", "smart_resize"):
        setattr(processor, name, type(name, (), {}))
    sys.modules[processor.__name__] = processor


def leave_package_bare(name: str) -> None:
    """Let a package's modules be imported without what it imports itself."""
    parent, _, own = name.rpartition(".")
    spec = importlib.util.find_spec(parent)
    assert spec is not None and spec.submodule_search_locations
    package = types.ModuleType(name)
    package.__path__ = [str(Path(folder, own)) for folder in spec.submodule_search_locations]
    sys.modules[name] = package

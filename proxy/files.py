"""Files an operator writes: TOML checked against a model, complaints that name file and field and never a value."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from proxy.errors import SettingsError

M = TypeVar("M", bound=BaseModel)


def read_toml(setting: str, path: Path) -> dict[str, Any]:
    """The file's content. Raises `SettingsError` naming the `setting` that leads to it."""
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise SettingsError(f"{setting}: {path} cannot be read ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{setting}: {path} is not TOML ({error})") from None


def read_model(setting: str, path: Path, model: type[M]) -> M:
    """The file's content as `model`. Raises `SettingsError`."""
    try:
        return model.model_validate(read_toml(setting, path))
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
        raise SettingsError(f"{setting}: {path}: {wrong}") from None


def read_secret(setting: str, path: Path) -> str:
    """The first line of a file that holds a secret. Raises `SettingsError` where there is none."""
    try:
        secret = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{setting}: {path} cannot be read ({type(error).__name__})") from None
    if not secret:
        raise SettingsError(f"{setting}: {path} is empty")
    return secret

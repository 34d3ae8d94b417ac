"""The workers, as settings and a file name them. The file is read again when it changes."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, HttpUrl, TypeAdapter, field_validator

from proxy.files import read_model
from proxy.upstream import base_url

_HTTP_URL = TypeAdapter(HttpUrl)


def worker_url(url: object) -> str:
    """The base URL, checked. Raises `ValueError`."""
    text = str(url).strip()
    _HTTP_URL.validate_python(text)
    return base_url(text)


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str
    max_inflight: int | None = Field(None, ge=0)

    @field_validator("url")
    @classmethod
    def _url(cls, url: str) -> str:
        return worker_url(url)


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    worker: tuple[_Entry, ...] = ()


def read_workers(path: Path) -> tuple[tuple[str, int | None], ...]:
    """`[[worker]]` entries: `url`, and `max_inflight` where it is not the setting's. Raises `SettingsError`."""
    return tuple((entry.url, entry.max_inflight) for entry in read_model("workers_file", path, _File).worker)

"""Servers in this process, as commands find them by their URLs: no socket is opened."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

import pytest

from proxy.http.client import Answer, Upstream
from tests.harness.in_memory_gateway import DirectUpstream


class Reachable:
    """ASGI applications by their URLs, and what fails instead of an answer. All else refuses connections."""

    def __init__(self) -> None:
        self.workers: dict[str, Any] = {}
        self.faults: dict[str, Exception] = {}
        self.unclosed = 0  # of those that were made to ask them
        self.connect_timeouts: set[float] = set()  # seconds
        self.patience: dict[str, float | None] = {}  # seconds for the last answer at each path

    def add(self, app: Callable[..., Any], url: str = "http://127.0.0.1:8000") -> str:
        """The URL of an application from now on."""
        self.workers[url] = app
        return url

    def serve(self, monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
        """These are all that the `Upstream` of `modules` finds."""
        found = self

        class Direct(DirectUpstream):
            def __init__(self, *arguments: Any) -> None:
                super().__init__()
                Upstream.__init__(self, *arguments)
                self.workers, self.faults = found.workers, found.faults
                found.unclosed += 1
                found.connect_timeouts.add(self._connect_timeout)

            async def send(self, method: str, url: str, *given: Any, **named: Any) -> Answer:
                found.patience[urlsplit(url).path] = named.get("read_timeout")
                return await super().send(method, url, *given, **named)

            async def aclose(self) -> None:
                found.unclosed -= 1

        for module in modules:
            monkeypatch.setattr(module, "Upstream", Direct)

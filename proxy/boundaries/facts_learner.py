from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client import Counter

from proxy.boundaries.renderer import Renderer
from proxy.boundaries.template_facts import TemplateFacts


class FactsLearner:
    def __init__(self, renders: Counter | None = None) -> None: ...
    def facts(self, renderer_id: bytes, model: Any, body: Mapping[str, Any]) -> TemplateFacts | None:
        return None

    def facts_or_learn(
        self, renderer: Renderer, renderer_id: bytes, model: Any, body: Mapping[str, Any]
    ) -> TemplateFacts | None:
        return None

    async def learn(self, renderer: Renderer, renderer_id: bytes, model: Any, body: Mapping[str, Any]) -> None: ...
    def forget(self, renderer_id: bytes) -> None: ...

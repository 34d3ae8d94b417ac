"""What these tests render with: a tokenizer and a chat template without a model."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.small_tokenizer import SmallTokenizer, write_small_tokenizer


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As the setting `tokenizer` names one."""
    return write_small_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder: Path) -> SmallTokenizer:
    return SmallTokenizer(tokenizer_folder)

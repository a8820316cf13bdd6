"""A stage for stories of whole jobs in virtual time."""

from pathlib import Path

import pytest

from tests.support.virtual_cluster import Stage


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(tmp_path, monkeypatch)

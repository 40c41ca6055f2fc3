import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache folder for each test."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("ZONAL_CACHE", str(folder))
    return folder

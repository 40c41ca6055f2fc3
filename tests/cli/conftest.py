import pytest


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A new folder, in which the test runs."""
    monkeypatch.chdir(tmp_path)
    return tmp_path

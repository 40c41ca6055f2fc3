import pytest


@pytest.fixture(scope="session")
def prepared_cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def cache(prepared_cache, monkeypatch):
    """One cache folder for the session, so that the novel is tokenised once."""
    monkeypatch.setenv("ZONAL_CACHE", str(prepared_cache))
    return prepared_cache

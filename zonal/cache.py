"""Where prepared data is kept between runs: the user's cache folder, or the one the environment names."""

import os
from pathlib import Path

import platformdirs

VARIABLE = "ZONAL_CACHE"


def cache_folder() -> Path:
    """The folder named by the environment variable ZONAL_CACHE, else the platform's cache folder for this user."""
    override = os.environ.get(VARIABLE)
    return (
        Path(override).expanduser().absolute() if override else platformdirs.user_cache_path("zonal", appauthor=False)
    )

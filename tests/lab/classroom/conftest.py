"""What all tests of the classroom have."""

import pytest

from lab.classroom import kept


@pytest.fixture(scope="session", autouse=True)
def nothing_kept(tmp_path_factory):
    """No grading takes what another day's has kept, and none is kept for another day."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept, "FOLDER", tmp_path_factory.mktemp("kept"))
        yield

import pytest

from tests import overlays


@pytest.mark.parametrize("version", overlays.OVERLAYS)
def test_oldest_and_newest_transformers(version):
    done = overlays.run(version)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert " passed" in done.stdout

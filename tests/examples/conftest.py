"""What tests of training scripts share."""

import pathlib
import sysconfig

import pytest


@pytest.fixture(scope="package")
def library(tmp_path_factory):
    """A few files of the standard library; two are held out, with a test that must not be trained on."""
    source = pathlib.Path(sysconfig.get_path("stdlib"))
    copy = tmp_path_factory.mktemp("library")
    for name in ("abc.py", "copy.py", "bisect.py", "queue.py", "test/test_queue.py"):
        (copy / name).parent.mkdir(exist_ok=True)
        (copy / name).write_bytes((source / name).read_bytes())
    (copy / "again.py").write_bytes((source / "copy.py").read_bytes())
    return copy

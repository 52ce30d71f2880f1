"""The environment of every test: CPU with 8 virtual devices, a disk cache of their own, warnings as errors."""

import functools
import gc
import os
import re
import signal
import sys
import time

import pytest

# Before any backend starts: 8 virtual devices on few cores deadlock without spare threads.
os.environ["NPROC"] = "32"
os.environ["JAX_ENABLE_PREEMPTION_SERVICE"] = "0"
os.environ["JAXINFER_PROGRESS"] = "0"  # when lines are shown depends on how fast the machine is
if "gpu" not in sys.argv:  # `pytest -m gpu` alone lets JAX find the GPU
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_NUM_CPU_DEVICES"] = "8"
    # Tests compile for far longer than they run. XLA's older code generator for fusions takes less than half as long.
    # One part of a program takes less than 32 where there are few cores. No test reads an operation's line in a source.
    quick = (
        "--xla_backend_optimization_level=0 --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters "
        "--xla_cpu_parallel_codegen_split_count=1 "
    )
    os.environ["XLA_FLAGS"] = quick + os.environ.get("XLA_FLAGS", "")
    os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"
    gc.set_threshold(50_000, 20, 20)  # traces are made of many objects that live long

    from hypothesis import HealthCheck, settings  # a machine with a GPU may have none

    settings.register_profile("any speed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("any speed")


# Processes start by the dozen, and would compile all modules each time.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background; processes inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config):
    """On a GPU machine, whose packages may be of any version, warnings are no errors: few tests would run."""
    if "gpu" in sys.argv:
        config.addinivalue_line("filterwarnings", "default")


def pytest_addoption(parser):
    parser.addoption("--share", metavar="K/N", help="of the selected tests, run share K of N, dealt out in turn")


@pytest.hookimpl(trylast=True)  # when -m and -k have selected
def pytest_collection_modifyitems(config, items):
    """Keep every N-th test from the K-th on: neighbours take about as long, so that shares do."""
    if (share := config.getoption("share")) is None:
        return
    if not (match := re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", share)) or int(match[1]) > int(match[2]):
        raise pytest.UsageError(f"--share is K/N with 1 <= K <= N, like 2/5, got {share!r}.")
    first, count = int(match[1]) - 1, int(match[2])
    kept = items[first::count]
    config.hook.pytest_deselected(items=[item for i, item in enumerate(items) if i % count != first])
    items[:] = kept


@functools.cache
def _group_of(file):
    """The `xdist_group` that a file's tests are in, or the file."""
    match = re.search(r'^pytestmark = pytest.mark.xdist_group\("(\w+)"\)$', file.read_text(), re.MULTILINE)
    return match[1] if match else str(file)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Run the tests of a file, and of a group of files, in one process: each process makes their fixtures anew.

    xdist 3.8 knows of no group under pytest 9.2, and would divide files.
    """
    if config.getoption("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return _group_of(config.rootpath / nodeid.partition("::")[0])

    return Scheduling(config, log)


def pytest_collection_finish():
    """Leave modules and tests out of what is searched for garbage."""
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def garbage():
    """Collect what a module has left, and search what outlives it no more: in time those are millions of objects.

    A module that took less time than the search has left little.
    """
    begin = time.process_time()
    yield
    if time.process_time() - begin > 0.5:
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def cache_folder(tmp_path_factory, pytestconfig):
    """Executables stay out of the user's cache, and serve all workers of this run. Measured costs serve none.

    They cannot be kept where a file is in the way: so no test, nor a process that it starts, decides by what another
    has measured.
    """
    from jaxinfer.compiled.cpu_library import forget_failures
    from tests.kernels.cpu_levels import has_compiler

    patch = pytest.MonkeyPatch()
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "cache"
    folder.mkdir(exist_ok=True)
    (folder / "costs").touch()
    patch.setenv("JAXINFER_CACHE", str(folder))
    # Which kernels run does not depend on how fast the machine is, and nobody is told where it has no compiler.
    patch.setenv("JAXINFER_CPU_LIBRARY", "unmeasured" if has_compiler() else "0")
    if pytestconfig.pluginmanager.hasplugin("cacheprovider"):  # C++ is compiled once for all runs, and by its digest
        patch.setenv("JAXINFER_CPU_LIBRARY_FOLDER", str(pytestconfig.cache.mkdir("cpu_kernels")))
        if not (folder / "failures_forgotten").exists():  # of earlier runs
            (folder / "failures_forgotten").touch()
            forget_failures()
    yield
    patch.undo()


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory):
    """The model directory of `tests.tiny`."""
    from tests.tiny import save_tiny

    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def vit(tmp_path_factory):
    """The model directory of `tests.elastic.vits`."""
    from tests.elastic.vits import save_vit

    return save_vit(tmp_path_factory.mktemp("vits") / "vit")


@pytest.fixture(scope="session")
def service_options():
    """Of elastic services: few programs."""
    return {"merge_levels": (-4,), "max_batch": 2, "max_tasks": 2, "max_classes": 3, "schedule": "constant"}


@pytest.fixture(scope="session")
def registered(vit, tmp_path_factory, service_options):
    """A repository with the task "stripes", with 2 prompts."""
    from jaxinfer.elastic import Service
    from tests.elastic.vits import QUICK, stripes

    folder = tmp_path_factory.mktemp("tasks")
    service = Service.from_checkpoint(vit, repository=folder, **service_options)
    service.register_task("stripes", stripes(seed=6), prompts=[2], training=QUICK)
    return folder


@pytest.fixture(scope="session")
def board(tmp_path_factory):
    """The folder of `tests.experts.boards.save_board`: tests that damage something copy it."""
    from tests.experts.boards import save_board

    return save_board(tmp_path_factory.mktemp("board"))

"""Files kept between processes: whole or not at all, private, bounded; under kills, full disks and many writers."""

import importlib.util
import os
import resource
import signal
import stat
import subprocess
import sys
import time

import pytest

from jaxinfer.disk_cache import files
from jaxinfer.disk_cache.files import KeptFiles, UntrustedFolderError, require_trusted

# A process that has nothing but the module: it starts in no time.
LOAD = f"""
import importlib.util, sys
from pathlib import Path
spec = importlib.util.spec_from_file_location("files", {importlib.util.find_spec("jaxinfer.disk_cache.files").origin!r})
files = importlib.util.module_from_spec(spec)
spec.loader.exec_module(files)
kept = files.KeptFiles(Path(sys.argv[1]), max_bytes=1 << 40)
"""


@pytest.fixture
def kept(tmp_path):
    return KeptFiles(tmp_path / "kept", max_bytes=10_000)


def child(program, *arguments):
    return subprocess.Popen([sys.executable, "-c", LOAD + program, *map(str, arguments)])


def temporaries(kept):
    return list(kept.folder.glob(".*.tmp"))


def test_what_was_put_is_found_again(kept):
    assert kept.get("a") is None
    kept.put("a", b"one")
    kept.put("b", b"")
    kept.put("a", b"two")
    assert (kept.get("a"), kept.get("b")) == (b"two", b"")
    assert kept.sizes().keys() == {"a", "b"}
    kept.remove("a")
    assert kept.get("a") is None


@pytest.mark.parametrize("length", [0, 1, 31, 32, 33, 60])
def test_half_a_file_is_deleted(kept, length):
    kept.put("a", bytes(100))
    path = kept.folder / "a"
    path.write_bytes(path.read_bytes()[:length])
    assert kept.get("a") is None
    assert not path.exists()


def test_a_changed_bit_is_found_out(kept):
    kept.put("a", bytes(100))
    path = kept.folder / "a"
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    assert kept.get("a") is None
    assert not path.exists()


def test_nobody_else_can_read_or_write(kept):
    kept.put("a", b"one")
    assert stat.S_IMODE(kept.folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((kept.folder / "a").stat().st_mode) == 0o600
    kept.folder.chmod(0o755)  # nobody else could write to it
    assert kept.get("a") == b"one"
    assert stat.S_IMODE(kept.folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o777, 0o730])
def test_a_folder_that_others_could_fill_is_emptied(kept, mode, caplog):
    kept.put("a", b"one")
    kept.folder.chmod(mode)
    assert kept.get("a") is None
    assert stat.S_IMODE(kept.folder.stat().st_mode) == 0o700
    assert not os.listdir(kept.folder)
    assert [record.message for record in caplog.records] == [
        f"{kept.folder} was open to other users: what was in it is deleted"
    ]
    kept.put("a", b"two")
    assert kept.get("a") == b"two"


def open_to_others(path):
    path.chmod(0o620)


def of_another_user(path):
    os.chown(path, 12345, -1)


def elsewhere(path):
    path.symlink_to(path.rename(path.parent.parent / "target"))


def a_pipe(path):
    path.unlink()
    os.mkfifo(path)


def a_folder(path):
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    "change",
    [
        *(open_to_others, elsewhere, a_pipe, a_folder),
        pytest.param(of_another_user, marks=pytest.mark.skipif(os.geteuid() != 0, reason="needs another user")),
    ],
)
def test_a_file_that_may_be_anothers_counts_as_not_there(kept, change):
    kept.put("a", b"one")
    change(kept.folder / "a")
    assert kept.get("a") is None
    if change is not a_folder:
        kept.put("a", b"two")
        assert kept.get("a") == b"two"
        assert stat.S_ISREG((kept.folder / "a").lstat().st_mode)


def test_a_link_is_not_used_as_the_folder(kept, tmp_path, caplog):
    mine = tmp_path / "mine"
    mine.mkdir(mode=0o777)
    mine.chmod(0o777)
    (mine / "text").write_text("precious")
    kept.folder.symlink_to(mine)
    kept.put("a", b"one")
    assert kept.get("a") is None
    assert os.listdir(mine) == ["text"]
    assert [record.message for record in caplog.records] == [f"{kept.folder} is not used: it is a link"]


def test_what_is_written_follows_no_link(tmp_path, monkeypatch):
    (tmp_path / "victim").write_bytes(b"precious")
    monkeypatch.setattr(files.secrets, "token_hex", lambda size: "guessed")
    (tmp_path / ".a.guessed.tmp").symlink_to(tmp_path / "victim")
    with pytest.raises(FileExistsError):
        files.write_atomically(tmp_path / "a", b"content")
    assert (tmp_path / "victim").read_bytes() == b"precious"


def test_a_folder_of_another_user_is_not_used(kept, monkeypatch, caplog):
    kept.put("a", b"one")
    monkeypatch.setattr(os, "geteuid", lambda: kept.folder.stat().st_uid + 1)
    assert kept.get("a") is None
    kept.put("b", b"two")
    assert [record.message for record in caplog.records] == [f"{kept.folder} is not used: it belongs to another user"]
    monkeypatch.undo()
    assert kept.sizes().keys() == {"a"}


def test_what_was_used_longest_ago_goes_first(kept):
    for name, used in (("a", 1000), ("b", 2000), ("c", 3000)):
        kept.put(name, bytes(3000))
        os.utime(kept.folder / name, (used, used))
    assert kept.get("a") is not None  # used now
    kept.put("d", bytes(3000))
    assert kept.sizes().keys() == {"a", "c", "d"}
    kept.put("e", bytes(6000))
    assert kept.sizes().keys() == {"d", "e"}
    kept.put("f", bytes(10_001))
    assert "e" in kept.sizes()


def test_what_a_killed_writer_left_is_deleted_once_it_is_old(kept):
    kept.put("a", b"one")
    for name, used in ((".old.tmp", 0), (".new.tmp", time.time())):
        (kept.folder / name).touch()
        os.utime(kept.folder / name, (used, used))
    kept.put("b", b"two")
    assert [path.name for path in temporaries(kept)] == [".new.tmp"]


def test_a_full_disk_leaves_nothing_and_is_said_once(kept, caplog):
    kept.put("a", bytes(100))
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limit[1]))
    try:
        for _ in range(2):
            kept.put("a", bytes(5000))
            KeptFiles(kept.folder, max_bytes=10_000).put("b", bytes(5000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert not temporaries(kept)
    assert (kept.get("a"), kept.get("b")) == (bytes(100), None)
    assert [record.message for record in caplog.records] == [
        f"nothing can be kept in {kept.folder}: [Errno 27] File too large"
    ]
    kept.put("b", bytes(5000))
    assert kept.get("b") == bytes(5000)


def test_a_killed_writer_leaves_no_half_file(kept):
    size = 32 << 20
    writer = "while True:\n  for i in range(256): kept.put('a', bytes([i]) * int(sys.argv[2]))"
    for _ in range(5):
        process = child(writer, kept.folder, size)
        try:
            while process.poll() is None and not any(file.stat().st_size for file in temporaries(kept)):
                pass
        except FileNotFoundError:
            pass  # renamed meanwhile: as good a moment as any
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        content = kept.get("a")
        assert content is None or content == content[:1] * size


@pytest.mark.slow
def test_ten_processes_on_an_empty_folder(tmp_path):
    """Every process finds a file whole or not at all, whatever the others write and delete."""
    program = """
kept.max_bytes = 200_000  # of 480,000
for turn in range(40):
    for name in "abcdefgh":
        content = name.encode() * 60_000
        assert kept.get(name) in (None, content)
        kept.put(name, content)
"""
    processes = [child(program, tmp_path / "kept") for _ in range(10)]
    assert [process.wait() for process in processes] == [0] * 10
    kept = KeptFiles(tmp_path / "kept", max_bytes=200_000)
    assert 0 < sum(kept.sizes().values()) <= kept.max_bytes
    assert not temporaries(kept)


def test_the_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("JAXINFER_CACHE")
    assert files.cache_folder() == tmp_path / "jaxinfer"
    monkeypatch.setenv("JAXINFER_CACHE", str(tmp_path / "mine"))
    assert files.cache_folder() == tmp_path / "mine"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_another_users_folder_is_not_trusted(tmp_path, monkeypatch):
    folder = tmp_path / "models"
    folder.mkdir(mode=0o755)
    require_trusted(folder)
    os.chown(folder, 12345, 12345)
    with pytest.raises(UntrustedFolderError, match="models is not used: it belongs to another user"):
        require_trusted(folder)
    os.chown(folder, 0, 0)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    require_trusted(folder)  # root's, as in an image of a container
    folder.chmod(0o777)
    with pytest.raises(UntrustedFolderError, match="models is not used: other users can write to it"):
        require_trusted(folder)
    require_trusted(tmp_path / "absent")

"""A folder of blocks: whole or absent, private, capped over restarts; under damage, full disks, kills and rivals."""

import os
import resource
import shutil
import stat
import subprocess
import sys

import pytest

from jaxinfer.disk_cache import blocks
from jaxinfer.disk_cache.blocks import BlockFolder

KEYS = [bytes([number]) * blocks.KEY_BYTES for number in range(9)]
SIZE = 100
FILE = SIZE + 4
GIVEN = [bytes([number]) * SIZE for number in range(9)]


def open_folder(folder, limit=5 * FILE):
    return BlockFolder.open(folder, max_bytes=limit)


@pytest.fixture
def folder(tmp_path):
    opened = open_folder(tmp_path / "kv")
    yield opened
    opened.close()


def put(folder, *numbers):
    for number in numbers:
        assert folder.put(KEYS[number], GIVEN[number])


def reopened(folder, limit=5 * FILE):
    folder.close()
    return open_folder(folder.folder, limit)


def read(folder, key):
    """The content of a block, in two parts as one; None if it cannot be read."""
    content = bytearray(SIZE)
    whole = memoryview(content)
    return bytes(content) if folder.get_into(key, whole[:30], whole[30:]) else None


def kept(folder):
    """The blocks that can be read, by number; reading is a use."""
    found = [read(folder, key) for key in KEYS]
    assert all(content in (None, given) for content, given in zip(found, GIVEN, strict=True))
    return [number for number, content in enumerate(found) if content]


def file_of(folder, number):
    return folder.folder / KEYS[number].hex()


def age(folder, *numbers):
    """Have these blocks been used in this order, long ago."""
    for at, number in enumerate(numbers):
        os.utime(file_of(folder, number), (at, at))


def test_blocks_come_back_after_a_restart(folder):
    assert folder.put(KEYS[0], GIVEN[0][:30], GIVEN[0][30:])
    put(folder, 1)
    assert not folder.put(KEYS[1], GIVEN[1])  # it is there
    assert kept(folder) == [0, 1]
    later = reopened(folder)
    assert (KEYS[0] in later, KEYS[2] in later, len(later)) == (True, False, 2)
    assert kept(later) == [0, 1]
    later.close()


def test_the_least_recently_used_leave(folder):
    put(folder, 0, 1, 2, 3, 4)
    assert KEYS[0] in folder  # a use
    put(folder, 5)
    assert kept(folder) == [0, 2, 3, 4, 5]
    assert not folder.put(KEYS[6], bytes(6 * FILE))
    age(folder, 4, 0, 5, 3, 2)
    later = reopened(folder, limit=3 * FILE)
    assert kept(later) == [2, 3, 5]
    assert sum(file.stat().st_size for file in later.folder.glob("0*")) == 3 * FILE
    later.close()


def test_only_the_user_can_read_them(folder):
    put(folder, 0)
    assert stat.S_IMODE(folder.folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(file_of(folder, 0).stat().st_mode) == 0o600


def test_a_folder_that_others_could_fill_is_emptied(folder, caplog):
    put(folder, 0)
    folder.folder.chmod(0o777)
    later = reopened(folder)
    assert stat.S_IMODE(folder.folder.stat().st_mode) == 0o700
    assert not kept(later)
    assert "was open to other users: the 1 blocks in it are deleted" in caplog.text
    later.close()


def changed(at):
    def change(file):
        data = bytearray(file.read_bytes())
        data[at] ^= 1
        file.write_bytes(data)

    return change


def cut(file):
    os.truncate(file, 50)


def swapped(file):
    """It has the content of another key."""
    shutil.copy(file.parent / KEYS[1].hex(), file)


def open_to_others(file):
    file.chmod(0o666)


@pytest.mark.parametrize("damage", [*map(changed, (0, 4, 60, -1)), cut, swapped, open_to_others])
def test_a_damaged_block_is_deleted_and_named_once(folder, caplog, damage):
    put(folder, 0, 1)
    damage(file_of(folder, 0))
    for _ in range(2):
        assert read(folder, KEYS[0]) is None
    assert [record.message for record in caplog.records] == [
        f"{file_of(folder, 0)} is not used, and deleted: it is damaged, or others can write to it."
    ]
    assert not file_of(folder, 0).exists()
    assert KEYS[0] not in folder
    put(folder, 0)
    assert kept(folder) == [0, 1]


def test_a_block_that_was_deleted_is_forgotten(folder, caplog):
    put(folder, 0)
    file_of(folder, 0).unlink()
    assert read(folder, KEYS[0]) is None
    assert KEYS[0] not in folder
    assert "No such file" in caplog.text
    assert read(folder, KEYS[1]) is None  # which was never there
    assert len(caplog.records) == 1


def test_a_full_disk_is_said_once_and_tried_later(folder, caplog, monkeypatch):
    put(folder, 0)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE // 2, limit[1]))
    try:
        for _ in range(2):
            assert not folder.put(KEYS[1], GIVEN[1])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    (record,) = caplog.records
    assert record.message.startswith(f"{folder.folder}: a block cannot be written (File too large). Nothing is written")
    assert not folder.can_write
    assert not folder.put(KEYS[1], GIVEN[1])  # not tried
    assert kept(folder) == [0]
    now = blocks.time.monotonic() + blocks.PAUSE
    monkeypatch.setattr(blocks.time, "monotonic", lambda: now)
    put(folder, 1)
    assert {file.name for file in folder.folder.iterdir()} == {".lock", KEYS[0].hex(), KEYS[1].hex()}


def test_what_a_killed_writer_left_is_deleted(folder):
    put(folder, 0)
    left = folder.folder / f".{KEYS[1].hex()}.0123456789abcdef.tmp"
    left.write_bytes(GIVEN[1])
    later = reopened(folder)
    assert kept(later) == [0]
    assert not left.exists()
    later.close()


def test_a_process_shares_the_folder_and_another_is_refused(folder):
    put(folder, 0)
    again = open_folder(folder.folder)
    assert again is folder
    with pytest.raises(ValueError, match=r"with a limit of 520 bytes, and not 521: give both the same limit"):
        open_folder(folder.folder, limit=521)
    other = "import sys; from pathlib import Path; from jaxinfer.disk_cache.blocks import BlockFolder\n"
    other += "BlockFolder.open(Path(sys.argv[1]), max_bytes=520)"

    def run():
        return subprocess.run([sys.executable, "-c", other, folder.folder], capture_output=True, text=True)

    again.close()
    assert f"process {os.getpid()} has it: end that process, or name another folder" in run().stderr
    assert kept(folder) == [0]
    folder.close()
    assert run().returncode == 0


def test_what_cannot_be_is_refused(tmp_path):
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ValueError, match=r"it has other files, such as 'notes.txt': name a new folder, or"):
        open_folder(tmp_path)
    assert os.listdir(tmp_path) == ["notes.txt"]
    for _ in range(2):  # the first has left nothing that the second would meet
        with pytest.raises(ValueError, match=r"of its disk are free or have its blocks, and the limit is \d+ bytes"):
            open_folder(tmp_path / "kv", limit=1 << 60)
    with pytest.raises(OSError, match="Not a directory"):
        open_folder(tmp_path / "notes.txt" / "kv")


def test_a_restart_goes_on_if_others_have_filled_the_disk(folder, monkeypatch, caplog):
    put(folder, 0, 1)
    disk = shutil.disk_usage(folder.folder)
    monkeypatch.setattr(blocks.shutil, "disk_usage", lambda _: disk._replace(free=FILE))
    later = reopened(folder)
    assert kept(later) == [0, 1]
    assert f"its disk has room for {3 * FILE} bytes of blocks, less than the limit" in caplog.text
    with pytest.raises(ValueError, match="lower it, or free space"):
        reopened(later, limit=disk.total + 1)

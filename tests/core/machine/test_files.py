"""Files that are replaced whole, and folders that one process writes."""

import subprocess
import sys
from pathlib import Path

import pytest

from sfi_core.errors import ConfigError
from sfi_core.machine import files
from sfi_core.machine.files import LOCK, FolderLock, atomic_file, write_atomically

TAKE = """
import sys
from pathlib import Path
from sfi_core.machine.files import FolderLock
lock = FolderLock(Path(sys.argv[1]), "trace folder")
print("held", flush=True)
sys.stdin.read()
"""


def test_a_temporary_file_is_new_and_a_link_in_a_file_s_place_is_not_followed(tmp_path):
    """A stranger's folder may hold links to what the user can write."""
    mine, file = tmp_path / "mine", tmp_path / "report.html"
    mine.write_text("mine")
    for link in (".report.html.tmp", "report.html"):
        (tmp_path / link).symlink_to(mine)
    write_atomically(file, b"new")
    assert (mine.read_text(), file.read_text(), file.is_symlink()) == ("mine", "new", False)


def test_a_file_that_cannot_be_finished_leaves_what_was_there(tmp_path):
    file = tmp_path / f"{'n' * 251}.txt"  # as long as a name may be
    write_atomically(file, b"old")
    with pytest.raises(OSError, match="No space"), atomic_file(file) as temporary:  # noqa: PT012 - while it writes
        temporary.write_bytes(b"half")
        raise OSError(28, "No space left on device")
    assert [(one.name, one.read_bytes()) for one in tmp_path.iterdir()] == [(file.name, b"old")]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such locks")
def test_a_folder_has_one_writer_at_a_time(tmp_path):
    lock = FolderLock(tmp_path, "trace folder")
    with pytest.raises(ConfigError, match=f"trace folder {tmp_path} must be free, got another process on it"):
        FolderLock(tmp_path, "trace folder")
    lock.release()
    assert list(tmp_path.iterdir()) == []
    path = {"PYTHONPATH": str(Path(files.__file__).parents[2])}
    with subprocess.Popen(
        [sys.executable, "-c", TAKE, str(tmp_path)], env=path, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(ConfigError, match="must be free"):
            FolderLock(tmp_path, "trace folder")
        other.kill()
    FolderLock(tmp_path, "trace folder").release()  # the lock ended with the process
    (tmp_path / LOCK).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        FolderLock(tmp_path, "trace folder")
    assert not (tmp_path / "elsewhere").exists()

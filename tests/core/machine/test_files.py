"""Files that are replaced whole, folders that one process writes, and text that came from a file or a client."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sfi_core.errors import ConfigError
from sfi_core.machine import files
from sfi_core.machine.files import LOCK, FolderLock, atomic_file, write_atomically
from sfi_core.machine.text import parse_json, printable_lines, shown, write_json

ODD = "\x1b[2J \x9b31m \u202eabc \x7f \ud800 \U000e0001"
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
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [(file.name, b"old")]


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


def test_what_does_not_print_is_escaped_and_json_stays_the_same():
    assert printable_lines(f"one{ODD}\ntwo é") == ("one\\x1b[2J \\x9b31m \\u202eabc \\x7f \\ud800 \\U000e0001\ntwo é")
    text = write_json({"model": ODD, "é": ["\n"]}, indent=1)
    assert text.replace("\n", "").isprintable()
    assert '"é"' in text
    assert json.loads(text) == {"model": ODD, "é": ["\n"]}


@pytest.mark.parametrize(("text", "why"), [("[" * 100_000, "nested too deeply"), ("9" * 5000, "digits")])
def test_json_that_python_cannot_read_is_a_value_error(text, why):
    with pytest.raises(ValueError, match=why):
        parse_json(text)


def test_a_value_in_an_error_is_short():
    nested = []
    for _ in range(5000):
        nested = [nested]
    assert shown("sfl") == "'sfl'"
    assert shown(10**5000) == "int too long to show"
    assert shown(nested) == "list too long to show"
    assert len(shown("x" * 10**6)) == 203

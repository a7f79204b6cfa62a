"""Files that appear whole or not at all: what was there before survives whatever stops the writer."""

import os
import threading
from pathlib import Path

import pytest

from relpos.translation.atomic_files import open_atomic, write_text_atomic


def test_text_is_written_in_utf_8_and_nothing_else_stays(tmp_path) -> None:
    for text in ("first\n", "fünf\n"):
        write_text_atomic(tmp_path / "file", text)
        assert (tmp_path / "file").read_bytes() == text.encode()
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_what_was_there_survives_a_failure(tmp_path, monkeypatch, failure) -> None:
    path = tmp_path / "file"
    path.write_text("before")

    def fail(number: int) -> None:
        raise failure

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(type(failure)) as caught:
        write_text_atomic(path, "after")
    assert path.read_text() == "before"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    if isinstance(caught.value, OSError):
        assert str(caught.value) == f"[Errno 28] No space left on device: '{path}'"


def test_a_missing_folder_is_told_with_the_name_of_the_file(tmp_path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        write_text_atomic(tmp_path / "none" / "file", "text")
    assert caught.value.filename == str(tmp_path / "none" / "file")


def test_the_first_failure_is_told_and_not_that_of_closing() -> None:
    def write() -> None:
        with open_atomic(Path("/dev/full")) as file:
            file.write("text")
            raise KeyError("first")

    with pytest.raises(KeyError, match="first"):
        write()


def test_a_link_is_followed_and_stays(tmp_path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder/file")
    for text in ("first", "second"):
        write_text_atomic(tmp_path / "link", text)
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "folder" / "file").read_text() == text


def test_devices_and_pipes_are_written_to_directly(tmp_path) -> None:
    write_text_atomic(Path("/dev/null"), "text")
    assert not Path("/dev/null").is_file()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    with open_atomic(pipe) as file:
        file.write("text")
    reader.join(10)
    assert read == ["text"]
    assert pipe.is_fifo()

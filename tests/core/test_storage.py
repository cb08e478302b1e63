import multiprocessing
import threading

import pytest

from dflash_core.errors import InputError, StorageError
from dflash_core.storage import Storage


@pytest.fixture(params=["memory", "folder"])
def storage(request, tmp_path):
    url = "memory://" if request.param == "memory" else str(tmp_path / "a folder with spaces")
    return Storage.from_url(url)


def test_put_get_range_list_and_delete(storage):
    child = storage.child("x/y")
    child.put("a", b"0123456789")
    assert child.get("a") == b"0123456789"
    assert bytes(child.get_range("a", 2, 3)) == b"234"
    assert b"".join(child.stream("a", 3, 5)) == b"34567"
    assert b"".join(child.stream("a", 8, 5)) == b"89", "what there is of it"
    assert [(i.key, i.size) for i in child.list()] == [("a", 10)]
    assert [i.key for i in storage.list("x")] == ["x/y/a"]
    child.delete(["a"])
    assert not child.exists("a")
    assert list(child.list()) == []


def test_what_is_not_there_keeps_nothing_else_from_being_deleted(storage):
    for number in range(40):
        storage.put(f"a/{number}", b"x")
    storage.delete(["gone", *(f"a/{number}" for number in range(40)), "a/gone"])
    assert list(storage.list()) == []
    storage.delete(["gone"])


def test_a_missing_object_is_file_not_found_with_its_url(storage):
    with pytest.raises(FileNotFoundError, match="nothing does not exist"):
        storage.get("nothing")


def test_create_only_write_keeps_the_first_bytes_and_recognises_its_own(storage):
    assert storage.put_new("k", b"mine")
    assert storage.put_new("k", b"mine")
    assert not storage.put_new("k", b"other")
    assert storage.get("k") == b"mine"


def test_parts_are_written_as_one_object(storage):
    parts = [b"01", memoryview(bytearray(b"2345")), b"6"]
    storage.put("replaced", parts)
    assert storage.get("replaced") == b"0123456"
    assert storage.put_new("new", parts)
    assert storage.put_new("new", parts)
    assert storage.put_new("new", b"0123456")
    assert not storage.put_new("new", [b"012345", b"7"])
    assert storage.get("new") == b"0123456"


def test_a_stream_hands_on_large_objects_in_pieces(storage):
    data = bytes(range(256)) * 8192
    storage.put("large", data)
    pieces = [bytes(piece) for piece in storage.stream("large", 1, len(data) - 2)]
    assert b"".join(pieces) == data[1:-1]
    with pytest.raises(FileNotFoundError, match="missing"):
        list(storage.stream("missing", 0, 1))


def test_of_many_writers_of_one_key_one_wins(storage):
    wins, barrier = [], threading.Barrier(8)

    def write(i):
        barrier.wait()
        if storage.put_new("k", f"writer {i}".encode()):
            wins.append(i)

    threads = [threading.Thread(target=write, args=(i,)) for i in range(8)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert len(wins) == 1
    assert storage.get("k") == f"writer {wins[0]}".encode()


def test_fresh_keys_differ(storage):
    assert storage.put_fresh("parts/0", ".bin", b"a") != storage.put_fresh("parts/0", ".bin", b"a")


def test_preflight_leaves_nothing_behind(storage):
    storage.preflight()
    assert list(storage.list()) == []


def test_preflight_names_a_folder_that_cannot_be_written(tmp_path):
    blocker = tmp_path / "file"
    blocker.write_text("x")
    with pytest.raises(StorageError, match="cannot be made"):
        Storage.from_url(str(blocker / "below"))


@pytest.mark.parametrize(("url", "words"), [("gs://b/x", "scheme 'gs'"), ("s3:///x", "no bucket")])
def test_a_url_we_cannot_open_is_named(url, words):
    with pytest.raises(InputError, match=words):
        Storage.from_url(url)


def test_use_after_fork_raises_instead_of_hanging(storage):
    def child(connection):
        try:
            storage.get("k")
        except RuntimeError as error:
            connection.send(type(error).__name__)

    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=child, args=(theirs,))
    process.start()
    assert ours.poll(20)
    assert ours.recv() == "RuntimeError"
    process.join(5)

"""The store of a run, on a folder and on S3: objects, trees, the journal of a worker, what is shipped and brought."""

import hashlib

import pytest
from s3_service import BUCKET, s3_server

from composer_core.errors import RunFailed
from composer_executors.journal import Reader, Writer, checkpoints
from composer_executors.store import Stamp, Store

AWS = ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION", "AWS_PROFILE")


@pytest.fixture(scope="session", params=["moto", "localbucket"])
def s3(request, tmp_path_factory):
    with s3_server(request.param, tmp_path_factory.mktemp(request.param)) as environment:
        yield environment


def folder_with(path, **files):
    path.mkdir(parents=True)
    for name, text in files.items():
        (path / name).write_text(text)
    return {name: path / name for name in files}


# -- objects and trees -------------------------------------------------------------------------------------------------


def check_objects(uri, tmp_path):
    store = Store(uri)
    assert store.read("a/b") is None
    assert store.create("a/b", b"first")
    assert not store.create("a/b", b"second")
    assert store.read("a/b") == b"first"
    assert Store(uri).read("a/b") == b"first"
    store.remove("a/b")
    store.remove("a/b")
    assert store.read("a/b") is None
    (tmp_path / "file").write_bytes(b"\0" * 3_000_000)
    assert store.create("c", tmp_path / "file")
    assert not store.create("c", tmp_path / "file")
    stamp = Stamp(3_000_000, hashlib.sha256(b"\0" * 3_000_000).hexdigest())
    store.get_file("c", stamp, tmp_path / "back" / "file")
    assert (tmp_path / "back" / "file").read_bytes() == b"\0" * 3_000_000


def check_trees(uri, tmp_path):
    store = Store(uri)
    stamps = store.put_tree("tree", folder_with(tmp_path / "from", one="1", two="22"))
    assert stamps == {
        "one": Stamp(1, hashlib.sha256(b"1").hexdigest()),
        "two": Stamp(2, hashlib.sha256(b"22").hexdigest()),
    }
    store.get_tree("tree", stamps, tmp_path / "to")
    assert {path.name: path.read_text() for path in (tmp_path / "to").iterdir()} == {"one": "1", "two": "22"}

    store.remove("tree/two")
    store.create("tree/two", b"2?")
    with pytest.raises(RunFailed) as damaged:
        store.get_tree("tree", stamps, tmp_path / "again")
    found, wanted = (hashlib.sha256(text).hexdigest()[:12] for text in (b"2?", b"22"))
    assert str(damaged.value) == (
        f"{uri}/tree/two: damaged in the store: 2 bytes with sha256 {found}, put there as 2 bytes with {wanted}\n"
        "  fix: remove it and what belongs to it from the store, then start the run again"
    )
    assert not (tmp_path / "again" / "two").exists()
    store.remove("tree/two")
    with pytest.raises(RunFailed) as gone:
        store.get_tree("tree", stamps, tmp_path / "again")
    assert str(gone.value) == f"{uri}/tree/two: it is gone from the store"


def check_journal(uri, tmp_path):
    store, reader = Store(uri), Reader(Store(uri), 0)
    assert reader.newest("L") is None
    assert reader.trees() == {}
    first = Writer(store, 0, {"launch": "L"})
    first.append("metrics.jsonl", b"1\n2\n")
    assert reader.newest("L") is None  # it has not begun: another one may not go on from it
    first.begin(reader.seen())
    first.append("metrics.jsonl", b"3\n")
    assert reader.newest("L") == 0
    assert reader.newest("another launch") is None
    assert reader.growing(0) == ["metrics.jsonl"]
    assert reader.lines(0, "metrics.jsonl", 0) == b"1\n2\n3\n"
    assert reader.lines(0, "metrics.jsonl", 4) == b"3\n"
    assert reader.lines(0, "metrics.jsonl", 6) == b""

    second_step = first.tree("checkpoints/step_2", folder_with(tmp_path / "two", w="2"))
    first.tree("checkpoints/step_10", folder_with(tmp_path / "ten", w="10"))
    assert list(checkpoints(reader.trees())) == [2, 10]  # by number, not by name
    first.remove(second_step)
    assert list(reader.trees()) == ["checkpoints/step_10"]
    assert store.read(f"{second_step.prefix}/w") is None

    other = Reader(Store(uri), 0)
    other.trees()
    second = Writer(store, 0, {"launch": "L"})
    second.begin(other.seen())
    first.tree("checkpoints/step_12", folder_with(tmp_path / "late", w="?"))  # it was thought dead
    second.tree("model", folder_with(tmp_path / "model", w="m"))
    assert second.number == 1
    assert Reader(Store(uri), 0).newest("L") == 1
    assert list(reader.trees()) == ["checkpoints/step_10", "model"]
    assert Reader(Store(uri), 1).trees() == {}  # of another rank


CHECKS = [check_objects, check_trees, check_journal]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_folder_is_a_store(check, tmp_path):
    check((tmp_path / "a store").as_uri(), tmp_path)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_s3_is_a_store(check, s3, tmp_path, monkeypatch):
    for name, value in s3.items():
        monkeypatch.setenv(name, value)
    check(f"s3://{BUCKET}/{check.__name__}/run", tmp_path)

"""The store of a run, on a folder and on S3: objects, trees, the journal of a worker, messages."""

import hashlib
import os
import subprocess
import sys

import pytest
from s3_service import BUCKET, s3_server

from composer_core.errors import MissingError, RunFailed, UsageError
from composer_executors import store as store_module
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


def test_what_a_killed_writer_left_half_is_not_there(tmp_path):
    os.mkfifo(tmp_path / "source")
    code = "import sys, pathlib; from composer_executors.store import Store\n"
    code += "Store(sys.argv[1]).create('key', pathlib.Path(sys.argv[2]))"
    writer = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "store"), str(tmp_path / "source")])
    with (tmp_path / "source").open("wb", buffering=0) as source:
        source.write(b"x" * 2_000_000)  # more than a pipe holds: the writer has taken a part of it
        writer.kill()
        writer.wait()
    assert [path.name.split(".")[-1] for path in (tmp_path / "store").iterdir()] == ["tmp"]
    assert Store(str(tmp_path / "store")).read("key") is None
    assert Store(str(tmp_path / "store")).create("key", b"whole")


def test_an_upload_that_fails_in_between_is_no_tree(tmp_path):
    store = Store(str(tmp_path / "store"))
    writer = Writer(store, 0, {"launch": "L"})
    writer.begin([])
    files = folder_with(tmp_path / "step", a="1")
    with pytest.raises(FileNotFoundError):
        writer.tree("checkpoints/step_1", {**files, "b": tmp_path / "gone"})
    assert store.read("rank=0/writer=0/tree=1/a") == b"1"
    assert Reader(store, 0).trees() == {}


@pytest.mark.parametrize("name", ["../out", "/etc/out", "a/../../out"])
def test_a_name_that_leads_out_of_the_folder_is_refused(name, tmp_path):
    store = Store(str(tmp_path / "store"))
    with pytest.raises(RunFailed, match="names a file outside the run's folder") as refused:
        store.get_tree("tree", {name: Stamp(1, "0")}, tmp_path / "to")
    assert repr(name) in str(refused.value)


# -- messages ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("uri", ["gs://bucket/run", "relative/folder", "s3://", ""])
def test_another_kind_of_store_is_refused(uri):
    with pytest.raises(UsageError) as refused:
        Store(uri)
    assert str(refused.value) == (
        f"executor.store: not a store: {uri.rstrip('/')!r}\n"
        "  fix: an absolute folder, file:///..., or s3://BUCKET/PREFIX"
    )


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(MissingError) as missing:
        Store("s3://bucket/run", field="replicas.store")
    assert str(missing.value) == (
        "replicas.store: a store in S3 needs s3fs\n  fix: pip install 'composer-executors[s3]'"
    )


def test_a_bucket_that_is_not_there_is_named(s3, monkeypatch):
    for name, value in s3.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(MissingError) as missing:
        Store("s3://nowhere/run")
    assert str(missing.value) == "executor.store: there is no bucket nowhere\n  fix: make it, or name another"


def test_missing_credentials_are_named(monkeypatch, tmp_path):
    for name in AWS:
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(MissingError) as missing:
        Store("s3://bucket/run")
    assert str(missing.value) == (
        "executor.store: cannot open s3://bucket/run: no credentials\n"
        "  fix: export AWS_ACCESS_KEY_ID=... and AWS_SECRET_ACCESS_KEY=..., and name both under executor.secrets"
    )


def test_a_store_that_fails_is_asked_again_and_then_named(tmp_path, monkeypatch):
    pauses = []
    monkeypatch.setattr(store_module.time, "sleep", pauses.append)
    (tmp_path / "store").write_text("not a folder")
    with pytest.raises(RunFailed) as failed:
        Store(str(tmp_path / "store")).create("a/b", b"")
    assert pauses == [0.5, 1.0, 2.0, 4.0]
    assert str(failed.value).startswith(f"{tmp_path}/store/a/b: the store fails: [Errno 20] Not a directory")

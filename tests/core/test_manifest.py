import json

import pytest

from dflash_core.errors import CorruptError, IncompleteError, MismatchError
from dflash_core.manifest import Dataset, canonical_json, fingerprint, require_same
from dflash_core.storage import Storage


@pytest.fixture
def root(tmp_path):
    return Storage.from_url(str(tmp_path))


def make(root, **config):
    return Dataset.create(
        root, "tokens", "demo", version=1, config=config, inputs={"corpus": "abc"}
    )


def test_same_request_lands_in_the_same_place_and_another_elsewhere(root):
    assert make(root, seed=1).path == make(root, seed=1).path
    assert make(root, seed=1).path != make(root, seed=2).path


def test_fingerprint_ignores_key_order_and_refuses_sets_and_nan():
    assert fingerprint("s", 1, {"a": 1, "b": 2}, {}) == fingerprint("s", 1, {"b": 2, "a": 1}, {})
    with pytest.raises(TypeError):
        canonical_json({"a": {1}})
    with pytest.raises(ValueError, match="JSON"):
        canonical_json({"a": float("nan")})


def test_a_unit_exists_only_once_its_record_does(root):
    dataset = make(root)
    dataset.storage.put("parts/000", b"data without a record")
    assert dataset.committed() == set()
    dataset.commit("000", {"rows": 3})
    assert dataset.committed() == {"000"}
    assert dataset.record("000")["rows"] == 3


def test_the_second_writer_of_a_unit_gets_the_first_ones_record(root):
    dataset = make(root)
    first = dataset.commit("000", {"rows": 3})
    second = dataset.commit("000", {"rows": 4})
    assert second == first
    assert dataset.record("000") == first


def test_seal_refuses_while_a_unit_is_missing_and_names_it(root):
    dataset = make(root)
    dataset.commit("000", {})
    with pytest.raises(IncompleteError, match=r"1 of 2 units .* '001'"):
        dataset.seal(["000", "001"], {})
    assert not dataset.complete
    with pytest.raises(IncompleteError, match="1 units are committed"):
        dataset.manifest()


def test_manifest_is_written_once(root):
    dataset = make(root)
    assert dataset.seal([], {"tokens": 1})["facts"] == {"tokens": 1}
    assert dataset.seal([], {"tokens": 2})["facts"] == {"tokens": 1}
    assert Dataset.open(root, dataset.path).facts == {"tokens": 1}


@pytest.mark.parametrize("damage", ["flip", "cut", "foreign"])
def test_a_damaged_commit_record_is_an_error_that_names_it(root, damage):
    dataset = make(root)
    dataset.commit("000", {"rows": 3})
    key = "_commits/000.json"
    data = dataset.storage.get(key)
    if damage == "flip":
        body = json.loads(data)
        body["rows"] = 4
        dataset.storage.put(key, json.dumps(body).encode())
    elif damage == "cut":
        dataset.storage.put(key, data[:-10])
    else:
        dataset.commit("001", {"rows": 3})
        dataset.storage.put(key, dataset.storage.get("_commits/001.json"))
    with pytest.raises(CorruptError, match="000"):
        dataset.record("000")


def test_opening_something_else_says_what_was_expected(root):
    with pytest.raises(FileNotFoundError, match="expected a path like"):
        Dataset.open(root, "tokens/nothing")


def test_a_dataset_of_another_stage_is_refused(root):
    dataset = make(root)
    dataset.seal([], {})
    with pytest.raises(MismatchError, match="output of the tokens stage, expected one of hidden"):
        dataset.require_stage("hidden")


def test_differences_are_listed_field_by_field():
    with pytest.raises(MismatchError) as caught:
        require_same("store x", {"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 5}, "extract again")
    assert "b: have 5, want 2" in str(caught.value)
    assert "c: have None, want 3" in str(caught.value)
    assert "a:" not in str(caught.value).replace("store x", "")

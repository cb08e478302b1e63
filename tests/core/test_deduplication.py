import random
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_core.corpus import grams
from dflash_core.corpus.deduplication import (
    SHINGLE_WORDS,
    first_of_equal,
    near_duplicates,
    signatures,
)
from dflash_core.corpus.grams import batches


def words_of(texts):
    [(_, words)] = batches(texts)
    return words


def runs(text, length):
    """Plain oracle of `Words.grams`: the set of runs of words."""
    words = re.findall(r"\w+", text.lower())
    if 0 < len(words) < length:
        return {tuple(words)}
    return {tuple(words[i : i + length]) for i in range(len(words) - length + 1)}


TEXTS = st.lists(
    st.lists(st.sampled_from(["a", "b", "c", "dd", "Ee", "F1"]), max_size=9).map(" ".join),
    max_size=8,
)


@settings(max_examples=150, deadline=None)
@given(TEXTS.filter(bool), st.integers(1, 5))
def test_grams_are_the_runs_of_each_text_and_never_cross_texts(texts, length):
    hashes, offsets = words_of(texts).grams(length)
    assert len(offsets) == len(texts) + 1
    for i, text in enumerate(texts):
        mine = hashes[offsets[i] : offsets[i + 1]]
        assert len(set(mine.tolist())) == len(runs(text, length))
        for j, other in enumerate(texts):
            same = set(mine.tolist()) == set(hashes[offsets[j] : offsets[j + 1]].tolist())
            assert same == (runs(text, length) == runs(other, length))


def test_batches_are_bounded_and_give_the_same_words(monkeypatch):
    texts = ["one two three", "", "four", "five six seven eight", "nine"]
    together = words_of(texts)
    monkeypatch.setattr(grams, "BYTES_AT_ONCE", 12)
    parts = list(batches(texts))
    assert [first for first, _ in parts] == [0, 1, 4]
    assert (
        np.concatenate([words.hashes_W for _, words in parts]).tolist()
        == together.hashes_W.tolist()
    )
    assert list(batches([])) == []


CASES = [
    ("Hello, World!  x_y 3.5\n", 5),
    ("今天天气很好 and こんにちは世界、はい", 16),
    ("na\u00efve caf\u00e9 \u201cquoted\u201d \u2013 dash\u2026", 4),
    ("a\u00a0b \u00abc\u00bb", 3),
    ("한국어 단어들", 2),
    ("天a天b", 4),
    ("", 0),
    ("?! ...", 0),
]


@pytest.mark.parametrize(("text", "count"), CASES)
def test_words_are_runs_of_letters_and_chinese_characters_stand_alone(text, count):
    assert len(words_of([text]).hashes_W) == count
    around = words_of(["x", text, "y"])
    assert around.hashes_W[1:-1].tolist() == words_of([text]).hashes_W.tolist()


def test_case_and_punctuation_do_not_count():
    assert (
        words_of(["Hello, World!"]).hashes_W.tolist() == words_of(["hello world"]).hashes_W.tolist()
    )


def test_different_words_have_different_hashes_wherever_they_stand():
    rng = random.Random(0)
    words = {f"{rng.choice('abcdef')}{i}" for i in range(50_000)} | {"a" * i for i in range(1, 60)}
    shuffled = rng.sample(sorted(words), len(words))
    hashes = words_of([" ".join(shuffled)]).hashes_W.tolist()
    assert len(set(hashes)) == len(words)
    again = words_of([" ".join(sorted(words))]).hashes_W.tolist()
    assert dict(zip(shuffled, hashes, strict=True)) == dict(zip(sorted(words), again, strict=True))


def vary(text, changes, rng):
    words = text.split()
    for place in rng.sample(range(len(words)), changes):
        words[place] = f"new{rng.random()}"
    return " ".join(words)


def jaccard(one, other):
    a, b = runs(one, SHINGLE_WORDS), runs(other, SHINGLE_WORDS)
    return len(a & b) / len(a | b)


def test_signatures_estimate_the_similarity_of_texts():
    pytest.importorskip("rensa")
    rng = random.Random(0)
    text = " ".join(f"w{rng.randrange(5000)}" for _ in range(400))
    texts = [text] + [vary(text, changes, rng) for changes in (1, 5, 15, 40)]
    signed = signatures(words_of(texts))
    for i in range(1, len(texts)):
        assert (signed[0] == signed[i]).mean() == pytest.approx(jaccard(text, texts[i]), abs=0.13)


def test_near_duplicates_are_found_and_others_stay():
    pytest.importorskip("rensa")
    rng = random.Random(1)
    originals = [" ".join(f"w{rng.randrange(9000)}" for _ in range(200)) for _ in range(60)]
    texts, expected = [], []
    for place, text in enumerate(originals):
        texts.append(text)
        expected.append(-1)
        if place % 2:
            texts.append(vary(text, 1, rng))  # similarity about 0.95
            expected.append(len(texts) - 2)
        if place % 3 == 0:
            texts.append(vary(text, 30, rng))  # about 0.3
            expected.append(-1)
    found = near_duplicates(signatures(words_of(texts)), 0.8)
    assert found.tolist() == expected


def test_a_row_is_compared_with_rows_that_stay_and_not_with_rows_that_go():
    chain = np.tile(np.arange(1, 129, dtype=np.uint32), (3, 1))
    chain[1, :16] += 1000  # like the first, like the third
    chain[2, :16] += 1000
    chain[2, 16:32] += 1000  # unlike the first
    assert near_duplicates(chain, 0.8).tolist() == [-1, 0, -1]


def test_texts_without_words_are_no_duplicates_of_each_other():
    pytest.importorskip("rensa")
    signed = signatures(words_of(["!!!", "???", "one two", "one two"]))
    assert near_duplicates(signed, 0.8).tolist() == [-1, -1, -1, 2]


@pytest.mark.parametrize("threshold", [0.5, 0.7, 0.8, 0.9, 1.0])
def test_pairs_at_the_threshold_are_mostly_found(threshold):
    rng = np.random.default_rng(0)
    base = rng.integers(0, 2**32, (400, 128), np.uint32)
    other = np.where(rng.random((400, 128)) < min(threshold + 0.03, 1), base, base + 1)
    other = other[(other == base).mean(1) >= threshold]
    found = near_duplicates(np.concatenate([base, other.astype(np.uint32)]), threshold)
    assert (found[400:] >= 0).mean() > 0.85
    assert (found[:400] == -1).all()


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=30))
def test_first_of_equal_is_the_first_index_of_the_key(keys):
    found = first_of_equal(np.array(keys, np.uint64).reshape(-1, 2))
    assert found.tolist() == [keys.index(key) for key in keys]

import json
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from tests.training.conftest import write_text_files
from zaya.errors import UserError
from zaya.files import manifest_digest
from zaya.shards import TokenShards, write_index, write_split
from zaya.training.data.corpus import Document, collect
from zaya.training.data.loader import Loader, heldout_batch, permute
from zaya.training.data.ngram import cross_entropies
from zaya.training.data.tokenize import encode, tokenize, train_tokenizer
from zaya.training.recipe import Corpus, load_recipe


@pytest.fixture
def shards(tmp_path):
    """1,000 tokens whose value is their position, over three files."""
    documents = [np.arange(0, 400), np.arange(400, 1000)]
    entries = write_split(tmp_path, "train", documents, 1000, shard_tokens=334)
    assert [e["tokens"] for e in entries] == [334, 334, 332]
    write_index(tmp_path, {"train": entries}, 1000)
    return TokenShards(tmp_path, "train")


def test_shards_read_as_one_array(shards):
    assert len(shards) == 1000
    for start, count in [(0, 1000), (333, 2), (334, 0), (300, 400), (999, 1)]:
        assert shards.read(start, count).tolist() == list(range(start, start + count))
    with pytest.raises(IndexError):
        shards.read(999, 2)


def test_shards_refuse_what_does_not_fit(tmp_path, shards):
    with pytest.raises(UserError, match="outside the vocabulary"):
        write_split(tmp_path / "..", "x", [np.array([5, 12])], 12)
    with pytest.raises(UserError, match="vocabulary of 1000 and model has 999"):
        shards.check_vocabulary(999, "model")
    (tmp_path / "train-00001.bin").write_bytes(b"12")
    with pytest.raises(UserError, match="bytes are not 334 tokens"):
        TokenShards(tmp_path, "train")
    (tmp_path / "train-00001.bin").unlink()
    with pytest.raises(UserError, match="missing shard"):
        TokenShards(tmp_path, "train")
    with pytest.raises(UserError, match="no such index"):
        TokenShards(tmp_path / "nowhere", "train")


def test_ids_above_16_bits_survive(tmp_path):
    big = np.array([0, 65_535, 65_536, 262_271])
    write_index(tmp_path, {"train": write_split(tmp_path, "train", [big], 262_272)}, 262_272)
    assert TokenShards(tmp_path, "train").read(0, 4).tolist() == big.tolist()


@pytest.mark.parametrize("size", [1, 2, 3, 17, 64, 1000, 4097])
def test_the_order_is_a_permutation_that_changes_with_seed_and_epoch(size):
    orders = [permute(np.arange(size), size, seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    for order in orders:
        assert sorted(order) == list(range(size))
    if size > 16:
        assert len({tuple(o) for o in orders}) == 4
        assert abs(np.corrcoef(orders[0], np.arange(size))[0, 1]) < 0.5


def test_an_epoch_sees_every_window_once_and_batches_depend_on_tokens_alone(shards):
    loader = Loader(shards, 10, seed=3)
    assert loader.windows == 99
    seen = [loader.batch(step * 110, 11)[0][:, 0] // 10 for step in range(18)]
    first, second = torch.cat(seen[:9]).tolist(), torch.cat(seen[9:]).tolist()
    assert sorted(first) == sorted(second) == list(range(99))
    assert first != second
    # 12 sequences cross the epoch's end; another batch size walks the same sequences
    crossing = loader.batch(8 * 120, 12)[0][:, 0] // 10
    assert crossing.tolist() == (first + second)[96:108]


@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
def test_ranks_share_the_batch_that_one_rank_sees(shards, ranks):
    loader = Loader(shards, 10, seed=3)
    whole, targets = loader.batch(960, 12)
    parts = [loader.batch(960, 12, rank, ranks) for rank in range(ranks)]
    assert torch.equal(torch.cat([p[0] for p in parts]), whole)
    assert torch.equal(torch.cat([p[1] for p in parts]), targets)
    assert torch.equal(targets, whole + 1)  # tokens are their own position here


def test_too_few_tokens_are_refused(shards):
    with pytest.raises(UserError, match="less than one sequence"):
        Loader(shards, 1000, 0)
    with pytest.raises(UserError, match="less than one sequence"):
        heldout_batch(shards, 1000, 1000)


def test_heldout_sequences_cover_the_split_evenly(shards):
    inputs, _ = heldout_batch(shards, 99, 1000)
    assert inputs[:, 0].tolist() == [100 * i for i in range(10)]


def test_ngrams_are_those_of_the_formula_written_out():
    rng = np.random.default_rng(0)
    train, held = rng.integers(0, 7, 300), rng.integers(0, 8, 60)
    unigram = Counter(train.tolist())
    p = {b: (unigram[b] + 0.5) / (len(train) + 4) for b in range(8)}
    follows: dict[int, Counter] = {}
    for a, b in zip(train, train[1:], strict=False):
        follows.setdefault(int(a), Counter())[int(b)] += 1
    nats = 0.0
    for a, b in zip(held.tolist(), held[1:].tolist(), strict=False):
        after = follows.get(a, Counter())
        kinds = len(after)
        nats -= math.log((after[b] + kinds * p[b]) / (sum(after.values()) + kinds) if after else p[b])
    ours = cross_entropies(train, held, 8)
    assert ours[0] == pytest.approx(-sum(math.log(p[b]) for b in held.tolist()) / 60, rel=1e-12)
    assert ours[1] == pytest.approx(nats / 59, rel=1e-12)


def test_tokenizing_twice_gives_the_same_bytes_and_the_text_comes_back(tiny, tiny_data, tmp_path):
    tokenize(load_recipe(tiny), tmp_path / "again")
    assert manifest_digest(tmp_path / "again") == manifest_digest(tiny_data)
    tokenizer = AutoTokenizer.from_pretrained(tiny_data / "tokenizer")
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    held = [json.loads(line) for line in (tiny_data / "heldout.jsonl").read_text().splitlines()]
    shards = TokenShards(tiny_data, "heldout")
    ids = shards.read(0, len(shards)).tolist()
    assert tokenizer.decode(ids, skip_special_tokens=True) == "".join(d["text"] for d in held)
    assert ids.count(1) == ids.count(2) == len(held)
    assert tokenizer(held[0]["text"]).input_ids == ids[: ids.index(2)]  # <bos> is put in front
    assert tokenizer.decode(tokenizer("é\tx 🙂").input_ids, skip_special_tokens=True) == "é\tx 🙂"
    summary = json.loads((tiny_data / "dataset.json").read_text())
    assert summary["heldout_tokens"] == len(ids)
    assert summary["bigram_heldout_nats_per_token"] < summary["unigram_heldout_nats_per_token"] < math.log(320)


def test_the_split_is_by_file_and_holds_nothing_twice(tmp_path):
    write_text_files(tmp_path / "text", files=20)
    (tmp_path / "text" / "copy.txt").write_text((tmp_path / "text" / "3.txt").read_text())
    (tmp_path / "text" / "empty.txt").write_text(" \n")
    (tmp_path / "text" / "binary.txt").write_bytes(b"\xff\xfe\x00")
    corpus = Corpus(sources=[str(tmp_path / "text" / "*.txt")], heldout_fraction=0.1)
    train, held = collect(corpus, seed=0)
    assert (len(train), len(held)) == (18, 2)
    assert not {d.text for d in train} & {d.text for d in held}
    assert held[0].path.startswith("text/")
    assert collect(corpus, seed=0) == (train, held)
    assert any(collect(corpus, seed=s)[1] != held for s in range(1, 4))
    small = corpus.model_copy(update={"max_bytes": 8000})
    assert 0 < sum(len(d.text) for part in collect(small, 0) for d in part) <= 8000


def test_the_standard_library_is_a_corpus():
    train, held = collect(Corpus(sources=["python-stdlib", "pydoc-topics"], max_bytes=300_000), seed=0)
    names = [d.path for d in (*train, *held)]
    assert len(names) > 5
    assert all(n.startswith(("python-stdlib/", "pydoc-topics/")) for n in names)
    assert not any("site-packages" in n for n in names)


def test_corpora_without_text_are_refused_and_nothing_is_written(tmp_path, tiny):
    def refuse(match: str, *overrides: str):
        with pytest.raises(UserError, match=match):
            tokenize(load_recipe(tiny, overrides), tmp_path / "out")
        assert list(tmp_path.glob("**/out*")) == []

    (tmp_path / "empty.txt").write_text("  \n")
    refuse("0 files with text", f"corpus.sources=[{tmp_path}/empty.txt]")
    refuse("no such file", f"corpus.sources=[{tmp_path}/nothing*.txt]")
    refuse("is a folder", f"corpus.sources=[{tmp_path}]")
    refuse("yields only", "tokenizer.vocab_size=60000")


def test_a_full_disk_is_refused_before_writing(tmp_path, tiny, monkeypatch):
    monkeypatch.setenv("ZAYA_FREE_BYTES", "1000")
    with pytest.raises(UserError, match="GB are free"):
        tokenize(load_recipe(tiny), tmp_path / "out")
    assert list(Path(tmp_path).iterdir()) == []


def test_text_that_looks_like_a_special_token_stays_text():
    text = 'html = "<pad>"  # <eos> ends and <bos> begins a document\n'
    documents = [Document("a.py", text), *(Document(f"{i}.py", f"x{i} = {i}\n" * 9) for i in range(9))]
    tokenizer = train_tokenizer(documents, 300, 64)
    assert tokenizer(text)["input_ids"].count(2) == 1  # transformers' own reading, which chat templates need
    ids = next(encode(tokenizer, documents, 300, "train")).tolist()
    assert (ids[0], ids[-1]) == (1, 2)
    assert not {0, 1, 2} & set(ids[1:-1])
    assert tokenizer.decode(ids[1:-1]) == text

"""Text to a tokenizer and token shards: what `zaya data tokenize` does."""

import datetime
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from zaya.errors import UserError
from zaya.files import check_target, require_free_space, sha256_json, stage_dir, write_json, write_text
from zaya.results import provenance
from zaya.shards import TokenShards, token_dtype, write_index, write_split
from zaya.text import text_only
from zaya.training.data import ngram
from zaya.training.data.corpus import Document, collect
from zaya.training.progress import progress
from zaya.training.recipe import Recipe

SPECIAL = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}  # ids 0, 1, 2
NGRAM_TOKENS = 100_000_000  # enough for a bigram table, and bounds its memory
BATCH = 64
PROVENANCE = "provenance.json"


def train_tokenizer(documents: list[Document], vocab_size: int, model_max_length: int):
    """Byte-level BPE over `documents` as a transformers tokenizer that puts <bos> first.

    The result depends on the documents and `vocab_size` alone. Raises UserError when the text yields fewer entries.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL.values()),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = progress((d.text for d in documents), total=len(documents), what="training the tokenizer", unit="file")
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise UserError(
            f"tokenizer.vocab_size {vocab_size}: the corpus yields only {tokenizer.get_vocab_size()} entries; "
            "lower it or add text"
        )
    bos = SPECIAL["bos_token"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **SPECIAL,
        model_max_length=model_max_length,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )


def encode(tokenizer, documents: list[Document], vocab_size: int, what: str) -> Iterator[np.ndarray]:
    """Ids of each document, <bos> first and <eos> last. Text that looks like a special token is text."""
    backend, eos = text_only(tokenizer).backend_tokenizer, tokenizer.eos_token_id
    dtype = np.dtype(token_dtype(vocab_size))
    starts = range(0, len(documents), BATCH)
    for start in progress(starts, total=len(starts), what=f"tokenizing {what}", unit="batch"):
        for encoding in backend.encode_batch_fast([d.text for d in documents[start : start + BATCH]]):
            yield np.array([*encoding.ids, eos], dtype)


def tokenize(recipe: Recipe, out: Path) -> dict[str, Any]:
    """Make the data folder `out`: tokenizer/, shards, index.json, heldout.jsonl, dataset.json,
    provenance.json. Returns dataset.json.

    Raises UserError for a corpus without text, a vocabulary larger than the text yields, and a full disk.
    """
    began = datetime.datetime.now(datetime.UTC)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    check_target(out, "data")
    train, heldout = collect(recipe.corpus, recipe.seed)
    size = sum(len(d.text.encode()) for d in (*train, *heldout))
    require_free_space(out, 3 * size + 10_000_000, "the tokenized corpus")
    vocab_size = recipe.tokenizer.vocab_size
    inputs = {
        "seed": recipe.seed,
        "corpus": recipe.corpus.model_dump(exclude={"sources"}),
        "vocab_size": vocab_size,
        "text": sha256_json([[d.path, d.text] for d in (*train, *heldout)]),
    }
    with stage_dir(out, "data", inputs, timings=(PROVENANCE,)) as folder:
        tokenizer = train_tokenizer(train, vocab_size, recipe.model.max_position_embeddings)
        tokenizer.save_pretrained(folder / "tokenizer")
        splits = {
            name: write_split(folder, name, encode(tokenizer, part, vocab_size, name), vocab_size)
            for name, part in (("train", train), ("heldout", heldout))
        }
        fingerprint = write_index(folder, splits, vocab_size)
        _write_heldout(folder, heldout)
        summary = _summary(folder, recipe, train, heldout, fingerprint)
        write_json(folder / "dataset.json", summary)
        write_json(folder / PROVENANCE, provenance(began, recipe.seed).model_dump())
    return summary


def _write_heldout(folder: Path, documents: list[Document]) -> None:
    lines = (json.dumps({"path": d.path, "text": d.text}, ensure_ascii=False) + "\n" for d in documents)
    write_text(folder / "heldout.jsonl", "".join(lines))


def _summary(folder: Path, recipe: Recipe, train: list[Document], heldout: list[Document], fingerprint: str):
    """What dataset.json says: sizes, and the cross-entropies of n-gram models in nats per token."""
    tokens = {name: TokenShards(folder, name) for name in ("train", "heldout")}
    counted = min(len(tokens["train"]), NGRAM_TOKENS)
    held = tokens["heldout"].read(0, len(tokens["heldout"]))
    unigram, bigram = ngram.cross_entropies(tokens["train"].read(0, counted), held, recipe.tokenizer.vocab_size)
    return {
        "fingerprint": fingerprint,
        "vocab_size": recipe.tokenizer.vocab_size,
        "train_files": len(train),
        "heldout_files": len(heldout),
        "train_bytes": sum(len(d.text.encode()) for d in train),
        "heldout_bytes": sum(len(d.text.encode()) for d in heldout),
        "train_tokens": len(tokens["train"]),
        "heldout_tokens": len(tokens["heldout"]),
        "ngram_tokens": counted,
        "unigram_heldout_nats_per_token": unigram,
        "bigram_heldout_nats_per_token": bigram,
    }

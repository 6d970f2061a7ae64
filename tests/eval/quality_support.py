"""A tiny ZAYA folder made with stock's class, held-out text, and a completions server over it."""

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers.models.zaya import ZayaConfig, ZayaForCausalLM

from zaya.training.data.corpus import Document
from zaya.training.data.tokenize import train_tokenizer

TEXTS = [
    "def area(r):\n    return 3.14159 * r * r\n\nclass Shape:\n    name = 'circle'  # Größe\n" * 12,
    "import os\n\nfor path in sorted(os.listdir('.')):\n    print(path, os.path.getsize(path))\n",
    "Question: why is the sky blue?\nAnswer: because of Rayleigh scattering.\n" * 3,
]
VOCABULARY, LONGEST = 340, 1024


def make_folder(folder: Path) -> Path:
    """A model of stock's class with weights far from their initial ones, and a tokenizer that puts <bos> first."""
    torch.manual_seed(1)
    config = ZayaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        moe_intermediate_size=32,
        num_experts=4,
        router_hidden_size=16,
        max_position_embeddings=LONGEST,
        initializer_range=0.2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    ZayaForCausalLM(config).save_pretrained(folder)
    documents = [Document(f"{i}.py", text) for i, text in enumerate(TEXTS)]
    train_tokenizer(documents, VOCABULARY, LONGEST).save_pretrained(folder)
    return folder


def make_heldout(path: Path) -> Path:
    """heldout.jsonl with two Python files and one that is not."""
    names = ("lib/shape.py", "lib/sizes.py", "topics/sky.txt")
    lines = [json.dumps({"path": n, "text": t}) + "\n" for n, t in zip(names, TEXTS, strict=True)]
    path.write_text("".join(lines), encoding="utf-8")
    return path


def stock(folder: Path) -> ZayaForCausalLM:
    """Stock's class with the folder's weights."""
    return ZayaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def log_probabilities(model: ZayaForCausalLM, ids: list[int]) -> list[float]:
    """Of ids[1:], each given those before it: one sequence, no padding, no cache."""
    logits = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    return [logits[i, t].item() for i, t in enumerate(ids[1:])]


@contextmanager
def completions_server(folder: Path, root: str, longest: int) -> Iterator[str]:
    """The address of a server that answers /v1/models and echoed prompts with log-probabilities, as vLLM does."""
    model, asked = stock(folder), []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.answer({"data": [{"id": "tiny", "root": root, "max_model_len": longest}]})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            prompts = body["prompt"]
            asked.extend(prompts)
            choices = []
            for i, ids in enumerate(prompts):
                assert len(ids) < longest
                values = log_probabilities(model, ids)
                logprobs = {
                    "token_logprobs": [None, *values, -1.0],
                    "top_logprobs": [None, *({"?": 0.0} for _ in ids)],
                }
                choices.append({"index": i, "logprobs": logprobs | {"tokens": ["?"] * (len(ids) + 1)}})
            self.answer({"choices": choices})

        def answer(self, value):
            data = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
        assert asked
        assert all(ids[0] == 1 and ids.count(1) == 1 for ids in asked)
    finally:
        server.shutdown()
        server.server_close()

"""Text is text: what looks like a special token in a document is characters, and specials come from us alone.

A tokenizer from the hub turns "<eos>" in a text into the id that ends a document. That is for chat templates, whose
output is the one place where it is wanted.
"""

from typing import Any


def text_only(tokenizer: Any) -> Any:
    """Make a transformers tokenizer read special tokens that are written in a text as text, and return it.

    The <bos> and <eos> that it adds itself are still added, and it still decodes them.
    """
    tokenizer.split_special_tokens = True
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:  # for calls that go to the fast tokenizer directly
        backend.encode_special_tokens = True
    return tokenizer

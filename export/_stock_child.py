"""Run as a script in a process of its own: an exported folder in stock transformers, without our package.

python -P _stock_child.py FOLDER REQUEST.json ANSWER.safetensors   (prints the class that was loaded)
"""

import json
import sys

import torch


@torch.no_grad()
def compute(model, prompts: list[list[int]], new_tokens: int) -> dict[str, torch.Tensor]:
    """Full-sequence logits [S, V] in fp32 and greedy tokens [new_tokens] for each prompt."""
    answer = {}
    for i, prompt in enumerate(prompts):
        ids = torch.tensor([prompt])
        answer[f"logits.{i}"] = model(ids).logits[0].float().contiguous()
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
        )
        answer[f"tokens.{i}"] = made[0, len(prompt) :].contiguous()
    return answer


def main(folder: str, request: str, answer: str) -> None:
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with open(request, encoding="utf-8") as f:
        save_file(compute(model, **json.load(f)), answer)
    assert "zaya" not in sys.modules, "this process must know stock transformers only"
    print(f"{type(model).__module__}.{type(model).__name__}")


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Makes `tiny@g2rpo` from fully tuned weights: `python benchmarks/tuned_lora.py WEIGHTS --rank 32`.

The change of every linear layer is truncated to its largest singular values and saved as a LoRA in the layout
of diffusers; changes of biases and norms are dropped. The script prints the scores of the base, the tuned
weights and the LoRA on unseen prompts with equal seeds. WEIGHTS is a run folder, or a .safetensors of the
transformer.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

from g2rpo.data.prompts import read_prompts
from g2rpo.evaluation.before_after import changes_of, markdown
from g2rpo.inference.open import open_policy
from g2rpo.inference.sample import sample_images
from g2rpo.models.tiny import assets
from g2rpo.models.transformer.export import transformer_of
from g2rpo.models.transformer.weights import LORA_FILE
from g2rpo.rewards.registry import load_rewards

NAMES = ("tiny_preference", "tiny_clip", "verifier", "verifier_strict")


def low_rank(base: nn.Module, tuned: nn.Module, rank: int) -> dict[str, Tensor]:
    """Computes lora_A [rank, in] and lora_B [out, rank] of every linear layer; B A best fits its change."""
    layers = dict(tuned.named_modules())
    adapters = {}
    for name, layer in base.named_modules():
        if isinstance(layer, nn.Linear):
            change = (layers[name].weight - layer.weight).detach().double()
            u, s, v = torch.linalg.svd(change, full_matrices=False)
            root = s[:rank].sqrt()
            adapters[f"{name}.lora_A.weight"] = (root[:, None] * v[:rank]).bfloat16().contiguous()
            adapters[f"{name}.lora_B.weight"] = (u[:, :rank] * root).bfloat16().contiguous()
    return adapters


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tuned")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--name", default="g2rpo")
    parser.add_argument("--prompts", type=int, default=256)
    given = parser.parse_args()
    from diffusers.loaders import FluxLoraLoaderMixin

    base = open_policy("tiny")
    tuned = open_policy(given.tuned, base="tiny")
    folder = assets() / f"tiny_flux_{given.name}"
    adapters = low_rank(transformer_of(base), transformer_of(tuned), given.rank)
    FluxLoraLoaderMixin.save_lora_weights(folder, transformer_lora_layers=adapters, weight_name=LORA_FILE)
    print(f"{folder / LORA_FILE}: {(folder / LORA_FILE).stat().st_size / 1e6:.2f} MB")

    rewards = load_rewards(NAMES, "cpu")
    prompts = [p.text for p in read_prompts("world:heldout")[0][: given.prompts]]
    scores = {}
    for name, policy in (("base", base), ("tuned", tuned), ("lora", open_policy(f"tiny@{given.name}"))):
        images = sample_images(
            policy, prompts, num_steps=16, seeds=range(2_000_000, 2_000_000 + len(prompts)), batch=32
        )
        images = ((images * 255).round() / 255).split(32)
        scores[name] = {
            key: torch.cat(
                [reward(part, prompts[32 * i :][: len(part)], None) for i, part in enumerate(images)]
            )
            for key, reward in rewards.items()
        }
    for name in ("tuned", "lora"):
        print(f"\nbase -> {name}, {Path(given.tuned).name}")
        print(markdown(changes_of("unseen prompts", scores["base"], scores[name], NAMES[:2])))


if __name__ == "__main__":
    main()

"""The four reward models at full size: images per second, memory, and rounding errors by data type.

    python benchmarks/rewards.py --out results/performance/rewards.json
    python benchmarks/rewards.py --path hps=HPS_v2.1_compressed.pt    # with real weights
    python benchmarks/rewards.py --tiny --device cpu                  # a quick check

Weights are random unless given, so the scores have no meaning, but arithmetic and rounding are those of the
real networks. The floor of a data type and batch size is the difference of its scores to those of float32 in
batches of 1, on the same weights, images and captions. Its mean shifts all members of a group and does not
change advantages; its standard deviation within groups is noise, to be compared with the spread within
groups.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
import zlib
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from g2rpo.rewards.clip import imagereward, networks
from g2rpo.rewards.clip.base import ClipReward
from g2rpo.rewards.model_reward import DTYPES, ModelReward, ScoringOptions
from g2rpo.rewards.preprocess import crop_transformers, framed, pad, squash
from g2rpo.rewards.registry import load_reward
from g2rpo.runtime.processes import resolve_device

NAMES = ("hps", "clip", "pickscore", "imagereward")
FRAMES = {"hps": pad, "clip": squash, "pickscore": crop_transformers}


def random_network(name: str, device: torch.device, tiny: bool) -> Any:
    """Creates the network of a reward with random weights, in float32."""
    torch.manual_seed(NAMES.index(name))
    with device:
        if name == "imagereward":
            vision, text = dict(imagereward.VISION), dict(imagereward.TEXT)
            if tiny:
                vision |= {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
                text |= {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2}
            network = imagereward.ImageRewardNetwork(vision, text)
            # The default initialisation is so small (1e-10 for BLIP's vision) that all images would have the
            # same score.
            for weight in [*network.vision.parameters(), *network.mlp.parameters()]:
                if weight.ndim > 1:
                    torch.nn.init.normal_(weight, std=weight[0].numel() ** -0.5)
            return network
        from transformers import CLIPModel

        sizes: dict[str, Any] = {**copy.deepcopy(networks.VIT_H_14), "quick_gelu": name == "clip"}
        if tiny:
            sizes["vision_cfg"] |= {"layers": 2, "width": 64, "head_width": 16, "patch_size": 32}
            sizes["text_cfg"] |= {"layers": 2, "width": 48, "heads": 4}
        return CLIPModel(networks.clip_config(sizes))


def random_ids(length: int, vocabulary: int, end: int) -> Any:
    """Creates a substitute for a tokenizer: 12 random ids seeded by the caption, then the end token."""

    def ids(prompts: list[str]) -> Tensor:
        rows = torch.zeros(len(prompts), length, dtype=torch.int64)
        for row, prompt in zip(rows, prompts, strict=True):
            generator = torch.Generator().manual_seed(zlib.crc32(prompt.encode()))
            row[:12] = torch.randint(1000, vocabulary - 2, (12,), generator=generator)
            row[12] = end
        return rows

    return ids


def build(name: str, network: Any, use: ScoringOptions, path: str | None) -> ModelReward:
    """Creates a reward from a copy of `network`, or from the weights at `path`."""
    if path is not None:
        loaded = load_reward(
            name, use.device, {"path": path, "batch": use.batch, "dtype": use.dtype, "offload": use.offload}
        )
        return loaded.reward
    network = copy.deepcopy(network)
    if name == "imagereward":
        return imagereward.ImageReward(network, random_ids(35, 30522, 102), use)
    return ClipReward(network, random_ids(77, 49408, 49407), use, FRAMES[name])


def random_images(groups: int, members: int, side: int, device: torch.device) -> Tensor:
    """Creates images [groups * members, 3, side, side] of soft shapes, similar within a group, in 8 bits."""
    generator = torch.Generator().manual_seed(7)

    def soft(number: int, coarse: int) -> Tensor:
        low = torch.randn(number, 3, coarse, coarse, generator=generator)
        return F.interpolate(low, (side, side), mode="bicubic")

    base = soft(groups, 6).repeat_interleave(members, 0)
    image = 0.5 + 0.2 * base + 0.1 * soft(groups * members, 24)
    image += 0.03 * torch.randn(image.shape, generator=generator)
    return ((255 * image.clamp(0, 1)).round() / 255).to(device)


def seconds(call: Any, device: torch.device, least: float = 1.0) -> float:
    """Measures the seconds per call, after a warm-up, over at least `least` seconds."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    call()
    wait()
    start, count = time.perf_counter(), 0
    while (passed := time.perf_counter() - start) < least:
        call()
        wait()
        count += 1
    return passed / count


def floor(scores: Tensor, exact: Tensor, members: int) -> dict[str, float]:
    """Computes the mean and largest difference, and its standard deviation within groups."""
    error = (scores.double() - exact.double()).unflatten(0, (-1, members))
    return {
        "mean": error.mean().item(),
        "within_groups": error.std(1).square().mean().sqrt().item(),
        "largest": error.abs().max().item(),
    }


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rewards", default=",".join(NAMES))
    parser.add_argument("--path", action="append", default=[], metavar="REWARD=PATH")
    parser.add_argument("--side", type=int, default=720, help="side of the images in pixels")
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--members", type=int, default=12)
    parser.add_argument("--tiny", action="store_true", help="small networks and images")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.tiny:
        given.side, given.groups, given.members = 96, 2, 3
    return given


def main() -> None:
    """Runs the benchmark."""
    given = parse_arguments()
    device = resolve_device(given.device)
    paths = dict(option.split("=", 1) for option in given.path)
    images = random_images(given.groups, given.members, given.side, device)
    prompts = [f"caption {group}" for group in range(given.groups) for _ in range(given.members)]
    batches = (1, 2) if given.tiny else (1, 4, 32)
    results: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "torch": torch.__version__,
        "pictures": [len(images), given.side],
        "weights": paths or "random",
        "rewards": {},
    }
    resident: list[ModelReward] = []
    for name in given.rewards.split(","):
        network = None if name in paths else random_network(name, device, given.tiny)
        row: dict[str, Any] = {"images_per_second": {}, "floor": {}, "gigabytes": {}}
        exact = None
        for dtype in DTYPES:
            reward = build(name, network, ScoringOptions(device, batches[0], dtype), paths.get(name))
            size = sum(
                parameter.numel() * parameter.element_size() for parameter in reward.network.parameters()
            )
            row["gigabytes"][dtype] = size / 1e9
            for batch in batches:
                reward.options = ScoringOptions(device, batch, dtype)
                scores = reward(images, prompts)
                if exact is None:
                    exact = scores
                    row["spread_within_groups"] = exact.unflatten(0, (-1, given.members)).std(1).mean().item()
                else:
                    row["floor"][f"{dtype}, batch {batch}"] = floor(scores, exact, given.members)
                part = images[:batch]

                # A new tensor per call prevents caching of the pixels; captions are cached, as in a rollout.
                call = partial(
                    lambda score, batch_images: score(batch_images.clone(), prompts[: len(batch_images)]),
                    reward,
                    part,
                )
                rate = batch / seconds(call, device, 0.2 if given.tiny else 2.0)
                row["images_per_second"][f"{dtype}, batch {batch}"] = rate
            if dtype == "float16":
                resident.append(reward)
            del reward
        frame = (FRAMES | {"imagereward": crop_transformers})[name](given.side, given.side, 224)
        part = images[: batches[-1]]
        row["preprocessing_ms_per_image"] = 1000 * seconds(partial(framed, part, frame), device) / len(part)
        results["rewards"][name] = row
        print(name, json.dumps(row, indent=1), flush=True)
        del network
    results["gigabytes_resident"] = {
        dtype: sum(row["gigabytes"][dtype] for row in results["rewards"].values()) for dtype in DTYPES
    }
    if device.type == "cuda":
        results["float16_peak_gigabytes"] = peak(resident, images, prompts, batches[-1])
    text = json.dumps(results, indent=1)
    print(text)
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(text + "\n")


def peak(rewards: list[ModelReward], images: Tensor, prompts: list[str], batch: int) -> float:
    """Measures the peak memory in GB of all rewards, resident and scoring in turn, with the images."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    for reward in rewards:
        reward.options = ScoringOptions(reward.device, batch, reward.options.dtype)
        reward(images, prompts)
    return torch.cuda.max_memory_allocated() / 1e9


if __name__ == "__main__":
    main()

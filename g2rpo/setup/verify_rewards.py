"""`g2rpo doctor --verify PATH` of reward models: compares keys and shapes of their files, reads no tensor.

HPS_v2.1_compressed.pt, OpenCLIP's files      with ViT-H-14, or the open_clip_config.json beside them
a CLIP in transformers' layout                with its config.json
ImageReward.pt                                with the published network
"""

from __future__ import annotations

from pathlib import Path

import torch

from g2rpo.models.loading.files import read_json
from g2rpo.models.loading.reading import Header, read_header
from g2rpo.rewards.clip import clip, hps, imagereward, layouts, networks
from g2rpo.rewards.published import TORCH_FILES, read_torch, weight_file
from g2rpo.setup.doctor import Row
from g2rpo.setup.headers import AGAIN, compared

DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float64: "F64"}
OWN_NAMES = (hps.FILES[0], *imagereward.FILES, *networks.OPENCLIP_FILES)
"""Names of weight files in folders without a configuration."""


def is_reward(path: Path) -> bool:
    """Whether `path` is, or holds, a reward model's weights."""
    if path.is_dir():
        if any((path / name).is_file() for name in (*OWN_NAMES, networks.OPENCLIP_CONFIG)):
            return True
        try:
            return read_json(path / "config.json").get("model_type") == "clip"
        except ValueError:
            return False
    if path.suffix != ".safetensors":
        return path.suffix in TORCH_FILES and path.is_file()
    try:
        return path.is_file() and _is_reward_header(read_header(path))
    except ValueError:
        return False  # the check of other files reports the error


def check_reward(path: Path, base: str | None = None) -> list[Row]:
    """Checks a reward model's folder or file by its own configuration; `base` is not used.

    Returns:
        One row if the files match, otherwise one row per problem.
    """
    try:
        file = weight_file(path, (*OWN_NAMES, *clip.FILES))
        header = read_header(file) if file.suffix == ".safetensors" else _torch_header(file)
        network, layout, kind = _network(file, header)
    except ValueError as error:
        return [Row(path.name, "missing", str(error), AGAIN)]
    used = {key: value for key, value in header.items() if not layouts.is_unused(key)}
    rows = compared(
        file.name, used, layouts.stored_shapes(network, layout), "the file belongs to another network"
    )
    return rows if any(row.status != "ok" for row in rows) else [_with_kind(row, kind) for row in rows]


def _network(file: Path, header: Header) -> tuple[torch.nn.Module, layouts.Layout, str]:
    """The network that the weights should belong to, on the meta device, its layout and its name."""
    state = {key: torch.empty(shape, device="meta") for key, (_, shape) in header.items()}
    if any(key.startswith("blip.") for key in state):
        return imagereward.meta_network(file, state), layouts.imagereward, "ImageReward"
    network, layout = networks.meta_clip(file, state, quick_gelu=file.name not in hps.FILES[:1])
    size = network.config.vision_config.image_size  # type: ignore[union-attr]
    owner = "OpenCLIP's" if layout is layouts.openclip else "transformers'"
    return network, layout, f"a CLIP for {size} pixels in {owner} layout"


def _with_kind(row: Row, kind: str) -> Row:
    return Row(row.name, row.status, f"{kind}: {row.detail}", row.advice)


def _is_reward_header(header: Header) -> bool:
    clips = ("visual.conv1.weight", "vision_model.embeddings.patch_embedding.weight")
    return any(key in header for key in clips) or any(key.startswith("blip.") for key in header)


def _torch_header(file: Path) -> Header:
    return {
        key: (DTYPES.get(value.dtype, str(value.dtype)), tuple(value.shape))
        for key, value in read_torch(file, "meta").items()
    }


REWARD_KINDS = ((is_reward, check_reward),)
"""(recognises a path, checks it), as in `g2rpo.setup.verify.KINDS`."""

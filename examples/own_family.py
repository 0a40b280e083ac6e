r"""A model family of your own: a small velocity field over 8 x 8 tokens, each a coloured tile of the image.

In the folder of this file:

    g2rpo train tiny model=random:tiles family=own_family:FAMILY guidance=3.5 \
      rewards.verifier=none rewards.colourfulness=1.0 'eval_rewards=[]' out=runs/tiles
    g2rpo evaluate random:tiles runs/tiles --family own_family:FAMILY --prompts world:heldout --limit 16 \
      --rewards colourfulness
    g2rpo export runs/tiles --family own_family:FAMILY --out tuned
    g2rpo sample tuned --family own_family:FAMILY --prompt "a red circle"

The commands import this file only because `--family` names it; without it they say so.
"""

import hashlib
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import g2rpo

SIDE, CHANNELS, WORDS, HIDDEN = 8, 3, 16, 32
TILE_PX = 8
PIXELS = SIDE * TILE_PX
INPUTS = CHANNELS + WORDS + 3  # of a token: its value, the text, sigma, row and column
WEIGHTS = "tiles.safetensors"


class BagOfWords(g2rpo.TextEncoders):
    """Counts the words of a prompt in 16 buckets; the bucket of a word is a hash of it."""

    identity = "bag-of-words:16"  # of the embedding cache: all that an embedding depends on

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def encode(self, prompts: list[str]) -> g2rpo.Conditioning:
        """Returns the tensor "words" [N, 16]."""
        counts = torch.zeros(len(prompts), WORDS)
        for row, prompt in zip(counts, prompts, strict=True):
            for word in prompt.lower().split():
                row[hashlib.sha256(word.encode()).digest()[0] % WORDS] += 1
        return g2rpo.Conditioning({"words": counts.to(self.device)})


class Tiles(g2rpo.Policy):
    """The velocity of each token is a function of its value and place, the text and sigma."""

    latent_shape = (SIDE * SIDE, CHANNELS)
    resolution = (PIXELS, PIXELS)

    def __init__(self, options: g2rpo.PolicyOptions, device: torch.device) -> None:
        self.options, self.device, self.text = options, device, BagOfWords(device)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # the same random weights on every process
            layers = (nn.Linear(INPUTS, HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, CHANNELS))
            self.modules = {"field": nn.Sequential(*layers).to(device)}
        place = torch.linspace(-1, 1, SIDE, device=device)
        self.places = torch.cartesian_prod(place, place)

    @property
    def conditions(self) -> dict[str, Any]:
        """What determines the images beside the weights; exports record it."""
        return self.options.conditions()

    @property
    def encoder_identity(self) -> str:
        return self.text.identity

    def encode(self, prompts: list[str]) -> g2rpo.Conditioning:
        return self.text.encode(prompts)

    def velocity(self, x: Tensor, sigma: Tensor, cond: g2rpo.Conditioning) -> Tensor:
        num, tokens, _ = x.shape
        text = cond.tensors["words"][:, None].expand(num, tokens, WORDS)
        level = sigma[:, None, None].expand(num, tokens, 1)
        velocity: Tensor = self.modules["field"](
            torch.cat([x, text, level, self.places.expand(num, tokens, 2)], 2)
        )
        return velocity

    def decode(self, latents: Tensor) -> Tensor:
        tiles = (latents / 2).sigmoid().transpose(1, 2).reshape(-1, CHANNELS, SIDE, SIDE)
        return tiles.repeat_interleave(TILE_PX, 2).repeat_interleave(TILE_PX, 3)


def check(files: g2rpo.ModelFiles, options: g2rpo.PolicyOptions, mesh: Any) -> None:
    """Refuses, before anything is loaded, what this family does not have."""
    plain = g2rpo.PolicyOptions()
    for option in fields(options):
        value = getattr(options, option.name)
        if option.name == "resolution" and value == Tiles.resolution:
            continue
        if option.name != "guidance" and value != getattr(plain, option.name):
            raise ValueError(f"the family of tiles has no {option.name}={value!r}; leave it out")
    if mesh is not None:
        raise ValueError("the family of tiles trains on one process; start it without torchrun")


def load(files: g2rpo.ModelFiles, options: g2rpo.PolicyOptions, device: torch.device, mesh: Any) -> Tiles:
    """Loads an export, or makes random weights."""
    policy = Tiles(options, device)
    if files.folder is not None:
        policy.modules["field"].load_state_dict(load_file(files.folder / WEIGHTS))
    return policy


def write(policy: g2rpo.Policy, out: Path, dtype: torch.dtype) -> None:
    """Writes the layout of this family: the weights, and the index by which a folder is recognised."""
    state = {name: value.to(dtype) for name, value in policy.modules["field"].state_dict().items()}
    save_file(state, out / WEIGHTS)
    (out / "model_index.json").write_text(json.dumps({"_class_name": FAMILY.pipeline}))


def shape(files: g2rpo.ModelFiles, options: g2rpo.PolicyOptions) -> g2rpo.ModelShape:
    """Returns the sizes from which `g2rpo plan` computes memory and time."""
    params = (INPUTS + 1) * HIDDEN + (HIDDEN + 1) * CHANNELS
    return g2rpo.ModelShape(
        height_px=PIXELS,
        width_px=PIXELS,
        latent_shape=Tiles.latent_shape,
        text_tokens=1,
        embedding_numbers=WORDS,
        width=HIDDEN,
        num_blocks=1,
        transformer_params=params,
        norm_params=0,
        vae_params=0,
        text_params=0,
        lora_params_per_rank=0,
        forward_flops=2 * params * SIDE * SIDE,
        decode_flops=0,
        decoder_width=CHANNELS,
    )


FAMILY = g2rpo.ModelFamily(
    name="tiles",
    pipeline="TilesPipeline",
    load=load,
    text_encoders=lambda files, options, device: BagOfWords(device),
    check=check,
    shape=shape,
    random={"random:tiles": {}},
    writers={"tiles": g2rpo.Writer(write)},
)

"""ModelFamily: everything that differs between model families, as functions and data.

A family is one folder of `models/` with an object of this class; models/registry.py finds it by the name of a
model. Its module imports torch, diffusers and transformers only inside its functions, because `g2rpo plan`
reads shapes of every family.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from g2rpo.models.loading.files import read_json

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from g2rpo.models.options import PolicyOptions
    from g2rpo.models.policy import Conditioning, Policy
    from g2rpo.models.transformer.architecture import Architecture

Configs = Mapping[str, Mapping[str, Any]]
"""Part of a model, such as "transformer" -> its configuration."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model under given options: closed formulas, without weights and without building a network.

    Attributes:
        height_px, width_px: size of the image, in pixels.
        latent_shape: (L, C), the numbers of tokens and channels of a packed latent.
        text_tokens: text tokens that the network attends to: the padded length, or the length of a long
            prompt where prompts are not padded.
        embedding_numbers: numbers that the embedding cache stores per prompt.
        width, num_blocks: channels and number of blocks of the transformer, for activation estimates.
        transformer_params, vae_params, text_params: numbers of parameters.
        norm_params: parameters of the transformer's norms and modulations, which an 8-bit base stores in the
            compute dtype.
        lora_params_per_rank: parameters of the adapters per unit of rank.
        forward_flops, decode_flops: floating-point operations of a forward and of decoding, per image.
        decoder_width: channels of the decoder at full resolution.
        stored_widths: what a block keeps for its backward pass without recomputation, per token, in multiples
            of `width` numbers of the compute dtype. The default is that of Korthikanti et al. (their paper is
            arXiv 2205.05198), without the attention matrix, which is never stored.
        lora_layers: number of linear layers that adapters would have under these options.
    """

    height_px: int
    width_px: int
    latent_shape: tuple[int, int]
    text_tokens: int
    embedding_numbers: int
    width: int
    num_blocks: int
    transformer_params: int
    norm_params: int
    vae_params: int
    text_params: int
    lora_params_per_rank: int
    forward_flops: int
    decode_flops: int
    decoder_width: int
    stored_widths: float = 17.0
    lora_layers: int = 0

    @property
    def tokens(self) -> int:
        """Number of image and text tokens, the sequence length of attention."""
        return self.latent_shape[0] + self.text_tokens


@dataclass(frozen=True)
class ModelFiles:
    """A model that was found.

    Attributes:
        name: the name by which it was found.
        folder: its folder in diffusers layout. None: a model with random weights, or one whose built-in
            configuration was enough.
        configs: built-in configurations of its parts; empty if they are read from the folder.
        weights: weights that belong to the name and are applied to the base first.
    """

    name: str
    folder: Path | None = None
    configs: Configs = field(default_factory=dict)
    weights: tuple[Path, ...] = ()

    def config(self, part: str, file: str = "config.json") -> Mapping[str, Any]:
        """Returns the configuration of a part, built in or from its folder.

        Args:
            part: such as "transformer".
            file: name of the file in the part's folder.

        Raises:
            ValueError: the file is missing or damaged, or there are no files.
        """
        if part in self.configs and file == "config.json":
            return self.configs[part]
        if self.folder is None:
            raise ValueError(f"{self.name} has no {part}/{file}")
        return read_json(self.folder / part / file)


@dataclass(frozen=True)
class Truncation:
    """Prompts that are longer than an encoder's limit.

    Attributes:
        encoder: name of the encoder.
        tokens: the limit, including special tokens.
        prompts: the truncated prompts.
        effect: what the truncation shortens.
    """

    encoder: str
    tokens: int
    prompts: tuple[str, ...]
    effect: str = "what the model reads"

    def __str__(self) -> str:
        first = self.prompts[0][:60] + ("…" if len(self.prompts[0]) > 60 else "")
        return (
            f"{self.encoder} truncates {len(self.prompts)} prompts to {self.tokens} tokens, which shortens "
            f"{self.effect}; the first: {first!r}"
        )


def truncation_lines(encoders: Any, prompts: Iterable[str]) -> list[str]:
    """Returns one line per encoder that truncates any of the distinct prompts.

    Args:
        encoders: what has `text`, a TextEncoders, such as a policy; without it nothing is known.
    """
    text = getattr(encoders, "text", None)
    truncated = getattr(text, "truncated", None)
    return [] if truncated is None else [str(cut) for cut in truncated(list(dict.fromkeys(prompts)))]


class TextEncoders(Protocol):
    """The frozen text encoders of a model, without its network; `unload` and `truncated` have defaults.

    Attributes:
        device: device of the encoders.
    """

    device: torch.device

    @property
    def identity(self) -> str:
        """Key of the embedding cache, equal to `Policy.encoder_identity`."""
        ...

    def encode(self, prompts: list[str]) -> Conditioning:
        """Encodes prompts, each independently of the others; loads the encoders at the first call."""
        ...

    def unload(self) -> None:
        """Frees the memory of the encoders; the next `encode` loads them again."""
        return None

    def truncated(self, prompts: Sequence[str]) -> list[Truncation]:
        """Returns the prompts that are longer than a limit: one entry per encoder that truncates any."""
        return []


@dataclass(frozen=True)
class Writer:
    """A layout in which a trained policy is exported.

    Attributes:
        write: writes the policy's weights into an empty folder in a dtype.
        adapters: whether the layout holds only adapters.
    """

    write: Callable[[Policy, Path, torch.dtype], None]
    adapters: bool = False


@dataclass(frozen=True)
class Export:
    """What a model card says how to load.

    Attributes:
        policy: the exported policy.
        layout: name of the layout.
        model: name of the base model.
        num_steps: denoising steps of an image.
    """

    policy: Policy
    layout: str
    model: str
    num_steps: int


def _own_command(export: Export) -> list[str]:
    return ["```sh", 'g2rpo sample "THIS FOLDER" --prompt "…"', "```"]


@dataclass(frozen=True)
class ModelFamily:
    """A model family.

    Attributes:
        name: name of the family.
        pipeline: the stock pipeline's class, which `model_index.json` names as `_class_name`.
        load: loads a policy; all that can be wrong was checked by `check`.
        text_encoders: creates the text encoders, which load their weights at the first prompt.
        check: checks options and files before any weight is read, for sharding over a mesh if there is one.
        shape: sizes under these options, as closed formulas.
        parts: folders of the pipeline that are downloaded.
        tokenizers: folder of a tokenizer -> sets of files, of which one complete set is needed.
        known: name on the hub -> built-in configurations, so that a run can be planned without access.
        random: "random:NAME" -> configurations of a model that is created with random weights.
        negative_prompt: negative prompt of classifier-free guidance, unless another one is given.
        writers: name of an export layout -> its writer. The default is the first one for all weights, and
            for adapters the first one for adapters.
        usage: Markdown lines of the model card on how other programs load an export.
        architecture: the network as diffusers' class, for `g2rpo doctor --verify`; None: another one.
    """

    name: str
    pipeline: str
    load: Callable[[ModelFiles, PolicyOptions, torch.device, DeviceMesh | None], Policy]
    text_encoders: Callable[[ModelFiles, PolicyOptions, torch.device], TextEncoders]
    check: Callable[[ModelFiles, PolicyOptions, DeviceMesh | None], None]
    shape: Callable[[ModelFiles, PolicyOptions], ModelShape]
    parts: tuple[str, ...] = ()
    tokenizers: Mapping[str, tuple[tuple[str, ...], ...]] = field(default_factory=dict)
    known: Mapping[str, Configs] = field(default_factory=dict)
    random: Mapping[str, Configs] = field(default_factory=dict)
    negative_prompt: str = ""
    writers: Mapping[str, Writer] = field(default_factory=dict)
    usage: Callable[[Export], list[str]] = _own_command
    architecture: Architecture | None = None

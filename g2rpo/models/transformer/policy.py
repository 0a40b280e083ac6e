"""What the policies of diffusers' transformers share; a family adds its network's inputs and its latents.

Differences from the diffusers pipelines:
  * sigma reaches the time embedding in float32. diffusers casts the timestep to the dtype of hidden_states
    before the embedding; in bfloat16 the result is off by up to 3 of 1,000.
  * the text encoders run on one prompt at a time, so that a row depends on its prompt alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import SDPBackend, sdpa_kernel

from g2rpo.flow.schedule import Shift
from g2rpo.models.family import ModelFiles, TextEncoders
from g2rpo.models.loading.files import dtype_argument
from g2rpo.models.loading.low_precision import float8_linears
from g2rpo.models.loading.precision import DTYPES
from g2rpo.models.loading.pretrained import check_finite, load_module
from g2rpo.models.options import PolicyOptions, Size
from g2rpo.models.policy import Conditioning, Policy
from g2rpo.models.transformer.architecture import Architecture
from g2rpo.models.transformer.network import Training, fill_from_folder, fill_randomly, make_network
from g2rpo.models.transformer.shift import SCHEDULER_FILE, scheduler_shift
from g2rpo.runtime.sharding import resident

COMPILED_DECODE_BATCH = 4
"""Batch size of the compiled decoder, in images; fixed, so that the decoder is compiled only once."""


@dataclass(frozen=True)
class Parts:
    """The loaded parts of a model.

    Attributes:
        files: the model's files.
        options: options of the policy, with the resolution, the negative prompt and the maximum number of
            text tokens resolved.
        device: device of all networks.
        module: the velocity network.
        vae: diffusers' decoder.
        text: the text encoders, which are loaded when they are first needed.
        autocast: whether autocast runs bfloat16 forwards over float32 weights.
    """

    files: ModelFiles
    options: PolicyOptions
    device: torch.device
    module: Any
    vae: Any
    text: TextEncoders
    autocast: bool


def load_parts(
    architecture: Architecture,
    files: ModelFiles,
    options: PolicyOptions,
    device: torch.device,
    mesh: DeviceMesh | None,
    text: TextEncoders,
) -> Parts:
    """Loads the network and the decoder of a model, or creates them with random weights.

    Args:
        architecture: classes of the network and the decoder.
        files, device, text: as in `Parts`.
        options: with the resolution and the maximum number of text tokens resolved.
        mesh: device mesh over which trained parameters are sharded (runtime/sharding.py); None: one process.

    Raises:
        ValueError: files are damaged or do not fit the configuration.
    """
    training = Training(options, mesh)
    random = files.folder is None
    fill = fill_randomly if files.folder is None else fill_from_folder(files.folder / "transformer")
    module = make_network(architecture, files.config("transformer"), fill, device, training)
    vae_dtype = training.dtype if device.type == "cuda" else torch.float32
    vae = random_vae(architecture, files, vae_dtype) if random else _vae_of(architecture, files, vae_dtype)
    vae = nn.Module.to(vae, device).eval().requires_grad_(False)
    return Parts(files, options, device, module, vae, text, training.autocast)


def _vae_of(architecture: Architecture, files: ModelFiles, dtype: torch.dtype) -> Any:
    import diffusers

    assert files.folder is not None
    folder = files.folder / "vae"
    vae = load_module(getattr(diffusers, architecture.vae), folder, **dtype_argument(dtype))
    check_finite(vae, folder)
    return vae


def random_vae(architecture: Architecture, files: ModelFiles, dtype: torch.dtype) -> Any:
    """Creates a decoder with torch's initial weights, which are the same on every process."""
    import diffusers

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        vae = getattr(diffusers, architecture.vae).from_config(dict(files.config("vae")))
        return nn.Module.to(vae, dtype)


class TransformerPolicy(Policy):
    """A diffusers transformer as a Policy.

    A subclass defines `_forward` and `decode`, and may override `guided`, `_time_inputs` and `_attention`.

    Beside the attributes of `Policy`:

    Attributes:
        architecture: class of the network; of the subclass.
        time_scale: factor between sigma and the network's timestep; of the subclass.
        time_embedding: name of the submodule whose first argument is the timestep; of the subclass.
        module: the velocity network, the only one of `modules`.
        text, vae, files, options: as in `Parts`.
        compute_dtype: dtype of the forwards.
    """

    architecture: ClassVar[Architecture]
    time_scale: ClassVar[float] = 1000.0
    time_embedding: ClassVar[str] = "time_text_embed"

    def __init__(self, parts: Parts, size: Size, latent_shape: tuple[int, int]) -> None:
        self.files, self.options, self.device = parts.files, parts.options, parts.device
        self.module: Any = parts.module
        self.vae: Any = parts.vae
        self.modules = {"transformer": parts.module}
        self.text = parts.text
        self.folder = parts.files.folder
        self.resolution: Size = size
        self.latent_shape = latent_shape
        guided = parts.options.true_cfg != 1
        self.forwards_per_sample = 2 if guided else 1
        self.negative_prompt = (parts.options.negative_prompt or "") if guided else None
        self.compute_dtype = DTYPES[parts.options.precision]
        self._autocast, self._holds_bfloat16 = parts.autocast, False
        self._frozen_base = bool(getattr(parts.module, "peft_config", None))
        self._float8_tails = parts.options.tails_precision == "float8"
        self._timestep: Tensor | None = None
        self._negative: Conditioning | None = None
        parts.module.get_submodule(self.time_embedding).register_forward_pre_hook(self._float32_time)

    @contextmanager
    def resident(self) -> Iterator[None]:
        """Keeps all weights gathered within the block, so that forwards without gradient do not communicate.

        Adapters over a bfloat16 base, and all weights under float8 tails (which are made from bfloat16
        weights), are held in bfloat16 within the block, because autocast would cast them at each use. They
        are not merged into the base, and the float32 values are restored on exit.
        """
        with resident(self.module):
            needs_bfloat16 = self._autocast and (self._frozen_base or self._float8_tails)
            if not needs_bfloat16 or self._holds_bfloat16:
                yield
                return
            trained = {p: p.data for p in self.module.parameters() if p.requires_grad}
            try:
                self._holds_bfloat16 = True
                for parameter, value in trained.items():
                    parameter.data = value.to(self.compute_dtype)
                yield
            finally:
                for parameter, value in trained.items():
                    parameter.data = value
                self._holds_bfloat16 = False

    @contextmanager
    def tails(self) -> Iterator[None]:
        """Runs forwards in 8 bits within the block if tails_precision is "float8"; use it within `resident`.

        It is meant for tails, whose results are only decoded and scored.
        """
        with float8_linears(self.architecture.blocks_of(self.module) if self._float8_tails else ()):
            yield

    @property
    def conditions(self) -> dict[str, Any]:
        """Options that, beside the weights, determine the images that this model generates."""
        return self.options.conditions()

    @property
    def guidance_option(self) -> str | None:
        """Name of the option that holds the guidance scale; None: the model has no guidance."""
        return "true_cfg" if self.options.true_cfg != 1 else None

    @property
    def guidance(self) -> float | None:
        """Scale of the guidance that `velocity` applies; None: the model has none."""
        name = self.guidance_option
        return None if name is None else float(getattr(self.options, name))

    @contextmanager
    def with_guidance(self, scale: float) -> Iterator[None]:
        """Replaces the guidance scale within the block.

        Args:
            scale: the scale, >= 0. With classifier-free guidance 1 leaves out the negative prompt.

        Raises:
            ValueError: the model has no guidance, or the scale is not a number >= 0.
        """
        name = self.guidance_option
        if name is None:
            raise ValueError(f"{self.files.name} has no guidance scale; sample without one")
        if not 0 <= scale < math.inf:
            raise ValueError(f"guidance={scale}: give a number >= 0")
        before, changes = self.options, dict[str, Any]({name: float(scale)})
        if changes.get("true_cfg") == 1:
            changes["negative_prompt"] = None  # options refuse one that has no effect
        self.options = replace(before, **changes)
        try:
            yield
        finally:
            self.options = before

    @property
    def encoder_identity(self) -> str:
        """Key of the embedding cache: everything that `encode` depends on beside the prompt."""
        return self.text.identity

    def encode(self, prompts: list[str]) -> Conditioning:
        """Returns the embeddings of prompts, on the policy's device."""
        return self.text.encode(prompts)

    def velocity(self, x: Tensor, sigma: Tensor, cond: Conditioning) -> Tensor:
        """Predicts the velocity, noise - image: [N, L, C], float32 or float64; see `Policy.velocity`.

        Raises:
            ValueError: the shapes of x, sigma and cond do not fit together.
        """
        if x.shape[1:] != self.latent_shape or sigma.shape != x.shape[:1] or len(cond) != len(x):
            raise ValueError(
                f"need x [N, {self.latent_shape[0]}, {self.latent_shape[1]}], sigma [N] and N rows of "
                f"conditioning, got {tuple(x.shape)}, {tuple(sigma.shape)} and {len(cond)} rows"
            )
        velocity = self._evaluate(x, sigma, cond.to(self.device, self.compute_dtype))
        if self.options.true_cfg == 1:
            return velocity
        negative = self.negative[torch.zeros(len(x), dtype=torch.long)]
        return self.guided(velocity, self._evaluate(x, sigma, negative))

    def guided(self, velocity: Tensor, unconditional: Tensor) -> Tensor:
        """Combines the velocities under the prompt and under the negative prompt, [N, L, C] each."""
        return unconditional + self.options.true_cfg * (velocity - unconditional)

    @property
    def negative(self) -> Conditioning:
        """Embedding of the negative prompt, one row; it is encoded only once."""
        if self._negative is None:
            self.set_negative(self.encode([self.negative_prompt or ""]))
            assert self._negative is not None
        return self._negative

    def set_negative(self, cond: Conditioning) -> None:
        """Sets the embedding of the negative prompt, one row, so that no encoder is loaded for it."""
        self._negative = cond.to(self.device, self.compute_dtype)

    def pipeline_shift(self) -> Shift:
        """Returns the shift of the sigmas that the stock pipeline's scheduler applies to images of this size.

        Raises:
            ValueError: the scheduler's configuration is missing, or its sigmas are no shift of even steps.
        """
        return scheduler_shift(self.files.config("scheduler", SCHEDULER_FILE), self.latent_shape[0])

    def _evaluate(self, x: Tensor, sigma: Tensor, cond: Conditioning) -> Tensor:
        """Evaluates the network once: [N, L, C], float32 or float64."""
        autocast = self._autocast and not self._holds_bfloat16
        self._timestep = self._network_time(sigma)
        try:
            with torch.autocast(x.device.type, torch.bfloat16, enabled=autocast), self._attention():
                out = self._forward(x if autocast else x.to(self.compute_dtype), sigma, cond)
        finally:
            self._timestep = None
        return out.to(torch.promote_types(out.dtype, torch.float32))

    def _forward(self, x: Tensor, sigma: Tensor, cond: Conditioning) -> Tensor:
        """Calls the network with its family's inputs.

        Args:
            x: latents [N, L, C] in the dtype of the forwards.
            sigma: noise level of each row [N], float32; the time embedding receives `_network_time` of it.
            cond: conditioning of N rows on the device, in the dtype of the forwards.

        Returns:
            [N, L, C], in the dtype of the forwards.
        """
        raise NotImplementedError

    def _attention(self) -> AbstractContextManager[None]:
        """Selects cuDNN's attention for forwards without gradient: 1.7 times as fast as flash on an H200."""
        if torch.is_grad_enabled() or self.device.type != "cuda":
            return nullcontext()
        backends = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
        return sdpa_kernel([*backends, SDPBackend.MATH], set_priority=True)

    def _network_time(self, sigma: Tensor) -> Tensor:
        """Returns the network's timestep, time_scale sigma, in float32.

        If sigma_rounding is "released", sigma is int(1000 sigma) / 1000.
        """
        if self.options.sigma_rounding == "exact":
            return self.time_scale * sigma.float()
        timestep = (1000 * sigma.float()).trunc()
        return timestep if self.time_scale == 1000 else timestep * (self.time_scale / 1000)

    def _float32_time(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        # Left unchanged if the network is not called by `_evaluate`.
        return args if self._timestep is None else self._time_inputs(self._timestep, args)

    def _time_inputs(self, timestep: Tensor, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Returns the arguments of the time embedding, `args`, with the exact timestep in place of theirs."""
        return (timestep, *args[1:])


class CompiledDecoder:
    """A convolutional decoder, compiled: on an H200 it takes 0.56 of the time; compiling takes half a minute.

    Args:
        decoder: a module over latents [N, C, h, w]; it is changed to channels_last.
    """

    def __init__(self, decoder: Any) -> None:
        decoder.to(memory_format=torch.channels_last)
        self._decoder: Any = torch.compile(decoder)

    def __call__(self, z: Tensor) -> Tensor:
        """Decodes in batches of COMPILED_DECODE_BATCH; the last one is padded, and the padding is removed."""
        parts = []
        for part in z.split(COMPILED_DECODE_BATCH):
            padded = part[torch.arange(COMPILED_DECODE_BATCH, device=z.device).clamp(max=len(part) - 1)]
            padded = padded.contiguous(memory_format=torch.channels_last)
            parts.append(self._decoder(padded)[: len(part)])
        return torch.cat(parts)

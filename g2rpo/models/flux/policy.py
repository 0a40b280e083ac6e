"""FLUX as a Policy, built on diffusers' transformer and VAE and transformers' text encoders.

FLUX.1 (Black Forest Labs, 2024) is a rectified-flow transformer over 2x2-packed latents of a 16-channel,
8x VAE; guidance-distilled models take the guidance scale as an input, so a velocity costs one forward.
The layout of latents, position ids and conditioning is that of FluxPipeline, which a test verifies.

Differences from the diffusers pipeline:
  * sigma and the guidance scale reach the time embedding in float32. diffusers casts the timestep to the
    dtype of hidden_states before multiplying it by 1,000; in bfloat16 the result is off by up to 3 of 1,000.
  * the text encoders run on one prompt at a time (models/flux/text.py explains why).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import SDPBackend, sdpa_kernel

from g2rpo.models.flux.latents import checked_resolution, image_ids, unpack
from g2rpo.models.flux.network import Training, blocks_of, fill_from_folder, fill_randomly, make_network
from g2rpo.models.flux.random import RandomText, is_random, random_configs, random_vae
from g2rpo.models.flux.text import DTYPES, FluxText
from g2rpo.models.loading.files import dtype_argument, flux_folder, read_json
from g2rpo.models.loading.low_precision import check_float8, float8_linears
from g2rpo.models.policy import Conditioning
from g2rpo.runtime.sharding import resident

Precision = Literal["float32", "tf32", "bfloat16", "float64"]
SigmaRounding = Literal["exact", "released"]
TailsPrecision = Literal["compute", "float8"]

COMPILED_DECODE_BATCH = 4
"""Batch size of the compiled VAE decoder, in images; fixed, so that the decoder is compiled only once."""


class FluxPolicy:
    """A FLUX model as a Policy; create one with `FluxPolicy.load`.

    Beside the attributes of `Policy`:

    Attributes:
        text: the text encoders, which are loaded when they are first needed.
        vae: diffusers' AutoencoderKL.
        guidance, true_cfg, sigma_rounding: as in `load`.
        resolution, patch_px: sides of the image and of one latent token, in pixels.
        compute_dtype: dtype of the forwards.
    """

    def __init__(
        self,
        folder: Path | None,
        module: Any,
        vae: Any,
        text: FluxText | RandomText,
        *,
        device: torch.device,
        guidance: float,
        resolution: int | None,
        sigma_rounding: SigmaRounding,
        autocast: bool = False,
        true_cfg: float = 1.0,
        tails_precision: TailsPrecision = "compute",
        compiled: bool = False,
    ) -> None:
        self._folder, self.text, self.device = folder, text, device
        self.module: Any = module
        self.vae: Any = vae
        self.guidance, self.true_cfg = guidance, true_cfg
        self.forwards_per_sample = 1 if true_cfg == 1 else 2
        self.resolution, self.patch_px = checked_resolution(resolution, vae.config)
        self.compute_dtype, self.sigma_rounding, self._autocast = text.dtype, sigma_rounding, autocast
        side = self.resolution // self.patch_px
        self.latent_shape: tuple[int, int] = (side * side, int(module.config.in_channels))
        self._img_ids = image_ids(side).to(device)
        self._timestep: Tensor | None = None
        self._frozen_base = bool(getattr(module, "peft_config", None))
        self._holds_bfloat16 = False
        self._negative: Conditioning | None = None
        self._float8_tails = tails_precision == "float8"
        self._decoder: Any = None
        # On an H200 compiled decoding takes 0.56 of the time; compiling takes half a minute.
        if compiled and device.type == "cuda" and vae.post_quant_conv is None:
            vae.to(memory_format=torch.channels_last)
            self._decoder = torch.compile(vae.decoder)
        module.time_text_embed.register_forward_pre_hook(self._float32_time)

    @classmethod
    def load(
        cls,
        name: str | Path,
        *,
        device: torch.device | str = "cpu",
        precision: Precision = "float32",
        guidance: float = 3.5,
        true_cfg: float = 1.0,
        resolution: int | None = None,
        max_sequence_length: int | None = None,
        lora_rank: int = 0,
        lora_alpha: float | None = None,
        lora_targets: Sequence[str] | None = None,
        base_dtype: Literal["compute", "float8"] = "compute",
        tails_precision: TailsPrecision = "compute",
        sigma_rounding: SigmaRounding = "exact",
        weights: Sequence[Path] = (),
        gradient_checkpointing: bool = False,
        compiled: bool = False,
        mesh: DeviceMesh | None = None,
    ) -> FluxPolicy:
        """Loads the transformer and the VAE; the text encoders are loaded when the first prompt is encoded.

        Args:
            name: a folder in diffusers layout, a hub name (downloaded to the hub's cache) or `random:NAME`.
            device: device of all networks.
            precision: "float32"; "tf32": float32 weights with matrix products of 10-bit mantissas on a GPU;
                "bfloat16": autocast over float32 master weights if all weights are trained, or over a frozen
                bfloat16 base with float32 adapters if lora_rank > 0; or "float64", for tests. The choice
                between float32 and tf32 holds for the process: the policy loaded last sets it for all.
            guidance: guidance scale, an input of guidance-distilled models; no effect on others.
            true_cfg: scale of classifier-free guidance against the empty prompt,
                v = v0 + true_cfg (v1 - v0), with two forwards per sample; 1: none.
            resolution: side of the square image in pixels; None: the size that the VAE was trained for.
            max_sequence_length: number of T5 tokens; None: the smaller of 512 and the tokenizer's limit.
            lora_rank: rank of the trained adapters; 0 trains all weights of the transformer.
            lora_alpha: the adapters' scale times their rank; None: twice the rank.
            lora_targets: ends of the names of layers that get adapters; None: attention and MLP linears.
            base_dtype: "float8" stores a frozen base in 8 bits (e4m3) and computes in `precision`.
            tails_precision: "float8" multiplies in 8 bits within `tails` (needs bfloat16 and torchao).
            sigma_rounding: "exact", or "released": int(1000 sigma) / 1000, as in G2RPO's released code.
            weights: weights that are first applied to the base's transformer, in order
                (models/flux/weights.py).
            gradient_checkpointing: whether blocks are recomputed in the backward pass, which saves memory and
                costs one more forward.
            compiled: whether forwards without gradient, and on a GPU the VAE's decoder, use torch.compile.
            mesh: device mesh over which trained parameters are sharded (runtime/sharding.py); None: one
                process.

        Raises:
            ValueError: the model is not a FLUX model, or a setting is outside its range.
        """
        from diffusers import AutoencoderKL

        if precision not in get_args(Precision):
            raise ValueError(f"precision={precision!r}: choose one of {', '.join(get_args(Precision))}")
        if sigma_rounding not in get_args(SigmaRounding):
            raise ValueError(f'sigma_rounding={sigma_rounding!r}: choose "exact" or "released"')
        if base_dtype not in ("compute", "float8") or (base_dtype == "float8" and not lora_rank):
            raise ValueError(
                f"base_dtype={base_dtype!r} with lora_rank={lora_rank}: choose compute, or float8 for the "
                "frozen base of adapters"
            )
        if tails_precision == "float8":
            check_float8(precision, base_dtype)
        device = torch.device(device)
        # Set in both cases: otherwise a float32 policy after a tf32 one would run in tf32.
        torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
        if device.type == "cuda":
            # cuDNN's attention backward crashes with few, small heads in bfloat16 (H100, torch 2.11).
            torch.backends.cuda.enable_cudnn_sdp(False)
        dtype = DTYPES[precision]
        training = Training(
            dtype=dtype,
            lora_rank=lora_rank,
            lora_alpha=lora_alpha,
            lora_targets=None if lora_targets is None else tuple(lora_targets),
            base_dtype=base_dtype,
            gradient_checkpointing=gradient_checkpointing,
            compiled=compiled,
            mesh=mesh,
        )
        vae_dtype = dtype if device.type == "cuda" else torch.float32
        text: FluxText | RandomText
        if is_random(str(name)):
            configs, folder = random_configs(str(name)), None
            checked_resolution(resolution, configs["vae"])
            module = make_network(configs["transformer"], fill_randomly, device, training, tuple(weights))
            vae: Any = random_vae(configs["vae"], device, vae_dtype)
            text = RandomText(configs, device=device, precision=precision, length=max_sequence_length)
        else:
            folder = flux_folder(name)
            # Checked here so that an error comes before 24 GB are read.
            checked_resolution(resolution, read_json(folder / "vae" / "config.json"))
            text = FluxText(
                folder, device=device, precision=precision, max_sequence_length=max_sequence_length
            )
            config = read_json(folder / "transformer" / "config.json")
            fill = fill_from_folder(folder / "transformer")
            module = make_network(config, fill, device, training, tuple(weights))
            vae = AutoencoderKL.from_pretrained(folder / "vae", **dtype_argument(vae_dtype))
        return cls(
            folder,
            module,
            vae.to(device).eval().requires_grad_(False),
            text,
            device=device,
            guidance=guidance,
            resolution=resolution,
            sigma_rounding=sigma_rounding,
            autocast=training.autocast,
            true_cfg=true_cfg,
            tails_precision=tails_precision,
            compiled=compiled,
        )

    @property
    def folder(self) -> Path:
        """Folder of the model's files.

        Raises:
            ValueError: the model has random weights and therefore no files.
        """
        if self._folder is None:
            raise ValueError("this model has random weights and no files: there is nothing to export")
        return self._folder

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
        with float8_linears(blocks_of(self.module) if self._float8_tails else ()):
            yield

    @property
    def conditions(self) -> dict[str, Any]:
        """Arguments of `load` that, beside the weights, determine the images that this model generates."""
        return {
            "precision": self.text.precision,
            "guidance": self.guidance,
            "true_cfg": self.true_cfg,
            "resolution": self.resolution,
            "max_sequence_length": self.text.max_sequence_length,
            "sigma_rounding": self.sigma_rounding,
        }

    @property
    def encoder_identity(self) -> str:
        """Key of the embedding cache: everything that `encode` depends on beside the prompt."""
        return self.text.identity

    def encode(self, prompts: list[str]) -> Conditioning:
        """Returns CLIP's pooled and T5's padded token embeddings of prompts, on the policy's device."""
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
        cond = cond.to(self.device, self.compute_dtype)
        velocity = self._forward(x, sigma, cond)
        if self.true_cfg == 1:
            return velocity
        negative = self.negative[torch.zeros(len(x), dtype=torch.long, device=self.device)]
        unconditional = self._forward(x, sigma, negative)
        return unconditional + self.true_cfg * (velocity - unconditional)

    @property
    def negative(self) -> Conditioning:
        """Embedding of the empty prompt, one row, for classifier-free guidance; it is encoded only once."""
        if self._negative is None:
            self._negative = self.encode([""])
        return self._negative

    def set_negative(self, cond: Conditioning) -> None:
        """Sets the embedding of the empty prompt, one row, so that no encoder is loaded for it."""
        self._negative = cond

    def _forward(self, x: Tensor, sigma: Tensor, cond: Conditioning) -> Tensor:
        autocast = self._autocast and not self._holds_bfloat16
        guidance = x.new_full((len(x),), self.guidance) if self.module.config.guidance_embeds else None
        self._timestep = self._network_time(sigma)
        try:
            with torch.autocast(x.device.type, torch.bfloat16, enabled=autocast), self._attention():
                out: Tensor = self.module(
                    hidden_states=x if autocast else x.to(self.compute_dtype),
                    encoder_hidden_states=cond.text,
                    pooled_projections=cond.pooled,
                    timestep=sigma,
                    img_ids=self._img_ids,
                    txt_ids=self._img_ids.new_zeros(cond.text.shape[1], 3),
                    guidance=guidance,
                    return_dict=False,
                )[0]
        finally:
            self._timestep = None
        return out.to(torch.promote_types(out.dtype, torch.float32))

    def _attention(self) -> AbstractContextManager[None]:
        """Selects cuDNN's attention for forwards without gradient: 1.7 times as fast as flash on an H200."""
        if torch.is_grad_enabled() or self.device.type != "cuda":
            return nullcontext()
        backends = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
        return sdpa_kernel([*backends, SDPBackend.MATH], set_priority=True)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Decodes clean latents [N, L, C] to images [N, 3, H, W], float32 in [0, 1], without gradient."""
        config = self.vae.config
        z = (unpack(latents) / config.scaling_factor + config.shift_factor).to(self.vae.dtype)
        out = self.vae.decode(z, return_dict=False)[0] if self._decoder is None else self._decode_compiled(z)
        return (out.float() / 2 + 0.5).clamp(0, 1)

    def _decode_compiled(self, z: Tensor) -> Tensor:
        """Decodes in batches of COMPILED_DECODE_BATCH; the last one is padded, and the padding is removed."""
        parts = []
        for part in z.split(COMPILED_DECODE_BATCH):
            padded = part[torch.arange(COMPILED_DECODE_BATCH, device=z.device).clamp(max=len(part) - 1)]
            padded = padded.contiguous(memory_format=torch.channels_last)
            parts.append(self._decoder(padded)[: len(part)])
        return torch.cat(parts)

    def _network_time(self, sigma: Tensor) -> Tensor:
        """Returns 1000 sigma in float32, truncated to an integer if sigma_rounding is "released"."""
        timestep = 1000 * sigma.float()
        return timestep.trunc() if self.sigma_rounding == "released" else timestep

    def _float32_time(self, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        # args: timestep, (guidance,) pooled. Left unchanged if the network is not called by `_forward`.
        if self._timestep is None:
            return args
        if len(args) == 2:
            return self._timestep, args[1]
        return self._timestep, torch.full_like(self._timestep, 1000 * self.guidance), args[2]

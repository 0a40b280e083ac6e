"""FLUX as a Policy, over diffusers' transformer and VAE and transformers' text encoders.

FLUX.1 (Black Forest Labs, 2024) is a rectified-flow transformer over 2x2-packed latents of a 16-channel,
8x VAE; guidance-distilled models take the guidance scale as an input, so a velocity costs one forward.
The layout of latents, position ids and conditioning is FluxPipeline's, checked against it by a test.

What differs from the stock pipeline, and why:
  * sigma (and the guidance scale) reach the time embedding in float32. diffusers casts the timestep to the
    dtype of hidden_states before multiplying by 1,000, in bfloat16 up to 3 of 1,000 off.
  * the text encoders see one prompt at a time (models/text.py).
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
from g2rpo.models.flux.network import Training, blocks_of, fill_at_random, fill_from_folder, make_network
from g2rpo.models.flux.random import RandomText, is_random, random_configs, random_vae
from g2rpo.models.flux.text import DTYPES, FluxText
from g2rpo.models.loading.files import dtype_argument, flux_folder, read_json
from g2rpo.models.loading.low_precision import check_float8, float8_linears
from g2rpo.models.policy import Conditioning
from g2rpo.runtime.sharding import resident

Precision = Literal["float32", "tf32", "bfloat16", "float64"]
SigmaRounding = Literal["exact", "released"]
TailsPrecision = Literal["compute", "float8"]

COMPILED_DECODE = 4
"""Images that the compiled decoder takes at once: a fixed number, so that it is compiled once."""


class FluxPolicy:
    """A FLUX model of a folder or the hub; make one with `FluxPolicy.load`."""

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
        self._rolling = False
        self._negative: Conditioning | None = None
        self._float8_tails = tails_precision == "float8"
        self._decoder: Any = None
        # 0.56 of the time on an H200, for half a minute of compiling.
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
        """Reads the transformer and the VAE; the text encoders follow when the first prompt needs them.

        Args:
            name: folder in diffusers layout, or hub name (fetched into the hub's cache), or random:flux-dev.
            device: where everything lives.
            precision: "float32"; "tf32": the same weights, matrix products of 10-bit mantissas on a GPU;
                "bfloat16": autocast over float32 master weights where all weights are trained, over a frozen
                bfloat16 base with float32 adapters where lora_rank > 0; or "float64", for checks. Products in
                float32 or tf32 are a switch of the process: the policy loaded last decides for all of them.
            guidance: input of guidance-distilled models; no effect on others.
            true_cfg: classifier-free guidance against the empty prompt, v = v0 + true_cfg (v1 - v0), two
                forwards a sample; 1 = none.
            resolution: side of the square image in pixels; None: what the VAE was made for.
            max_sequence_length: T5 tokens; None: the smaller of 512 and the tokenizer's limit.
            lora_rank: 0 trains all weights of the transformer, else adapters of this rank.
            lora_alpha: the adapters' scale times their rank; None: twice the rank.
            lora_targets: ends of the layers' names that get adapters; None: attention and MLP linears.
            base_dtype: "float8" stores a frozen base in 8 bits (e4m3) and computes in `precision`.
            tails_precision: "float8" multiplies in 8 bits within `tails` (needs bfloat16 and torchao).
            sigma_rounding: "exact", or "released": int(1000 sigma) / 1000 as G2RPO's released code has it.
            weights: put onto the base's transformer, in order, before anything else (see models/weights.py).
            gradient_checkpointing: recompute blocks in the backward pass: less memory, a forward more.
            compiled: forwards without gradient run through torch.compile, and on a GPU the VAE's decoder.
            mesh: parameters that are trained are sharded over it (see distributed.shard).

        Raises:
            ValueError: not a FLUX model, or a setting outside its range.
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
        # Set either way: a float32 policy after a tf32 one would else run in tf32.
        torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
        if device.type == "cuda":
            # cuDNN's attention backward crashes on few, small heads in bfloat16 (H100, torch 2.11).
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
            module = make_network(configs["transformer"], fill_at_random, device, training, tuple(weights))
            vae: Any = random_vae(configs["vae"], device, vae_dtype)
            text = RandomText(configs, device=device, precision=precision, length=max_sequence_length)
        else:
            folder = flux_folder(name)
            # Before 24 GB are read.
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
        """Of the model's files.

        Raises:
            ValueError: random weights, which have none.
        """
        if self._folder is None:
            raise ValueError("this model has random weights and no files: there is nothing to export")
        return self._folder

    @contextmanager
    def resident(self) -> Iterator[None]:
        """While it lasts, forwards (without gradient) communicate nothing between processes.

        Adapters over a bfloat16 base are held in bfloat16 too: no cast at each use, as autocast would do.
        They are not merged into the base, and the float32 ones come back unchanged. So are all weights under
        float8 tails, which are made from bfloat16 ones.
        """
        with resident(self.module):
            in_half = self._autocast and (self._frozen_base or self._float8_tails)
            if not in_half or self._rolling:
                yield
                return
            trained = {p: p.data for p in self.module.parameters() if p.requires_grad}
            try:
                self._rolling = True
                for parameter, value in trained.items():
                    parameter.data = value.to(self.compute_dtype)
                yield
            finally:
                for parameter, value in trained.items():
                    parameter.data = value
                self._rolling = False

    @contextmanager
    def tails(self) -> Iterator[None]:
        """Within `resident`: forwards whose result only a reward sees, in 8 bits if so asked for."""
        with float8_linears(blocks_of(self.module) if self._float8_tails else ()):
            yield

    @property
    def conditions(self) -> dict[str, Any]:
        """The arguments of `load` under which other weights draw the same way as these."""
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
        """Key of the embedding cache: what `encode` depends on beside the prompt."""
        return self.text.identity

    def encode(self, prompts: list[str]) -> Conditioning:
        """CLIP's pooled and T5's padded token embeddings, on the policy's device."""
        return self.text.encode(prompts)

    def velocity(self, x: Tensor, sigma: Tensor, cond: Conditioning) -> Tensor:
        """The network's noise - image [N, L, C] in float32; differentiable. See `Policy.velocity`.

        Raises:
            ValueError: shapes that do not belong together.
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
        without = self._forward(x, sigma, negative)
        return without + self.true_cfg * (velocity - without)

    @property
    def negative(self) -> Conditioning:
        """The empty prompt [1], for classifier-free guidance; encoded once."""
        if self._negative is None:
            self._negative = self.encode([""])
        return self._negative

    def set_negative(self, cond: Conditioning) -> None:
        """Gives the empty prompt's embedding [1], so that no encoder need be loaded for it."""
        self._negative = cond

    def _forward(self, x: Tensor, sigma: Tensor, cond: Conditioning) -> Tensor:
        autocast = self._autocast and not self._rolling
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
        """Without gradient cuDNN's attention, 1.7 times as fast as flash attention on an H200."""
        if torch.is_grad_enabled() or self.device.type != "cuda":
            return nullcontext()
        backends = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
        return sdpa_kernel([*backends, SDPBackend.MATH], set_priority=True)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Latents [N, L, C] -> images [N, 3, H, W], float32 in [0, 1]."""
        config = self.vae.config
        z = (unpack(latents) / config.scaling_factor + config.shift_factor).to(self.vae.dtype)
        out = self.vae.decode(z, return_dict=False)[0] if self._decoder is None else self._decoded(z)
        return (out.float() / 2 + 0.5).clamp(0, 1)

    def _decoded(self, z: Tensor) -> Tensor:
        """Through the compiled decoder, always as many at once; what is too few is filled up and cut off."""
        parts = []
        for part in z.split(COMPILED_DECODE):
            filled = part[torch.arange(COMPILED_DECODE, device=z.device).clamp(max=len(part) - 1)]
            filled = filled.contiguous(memory_format=torch.channels_last)
            parts.append(self._decoder(filled)[: len(part)])
        return torch.cat(parts)

    def _network_time(self, sigma: Tensor) -> Tensor:
        """1000 sigma in float32, truncated where the released code truncates it."""
        timestep = 1000 * sigma.float()
        return timestep.trunc() if self.sigma_rounding == "released" else timestep

    def _float32_time(self, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        # args: timestep, (guidance,) pooled. Untouched when someone else calls the network.
        if self._timestep is None:
            return args
        if len(args) == 2:
            return self._timestep, args[1]
        return self._timestep, torch.full_like(self._timestep, 1000 * self.guidance), args[2]

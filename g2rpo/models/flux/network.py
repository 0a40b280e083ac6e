"""Construction of the velocity network: built without storage, sharded, then filled tensor by tensor.

    meta device  ->  (fully_shard)  ->  storage on the device  ->  each tensor, or its rows, from the file

A process therefore holds at most one tensor of FLUX.1's 24 GB on the host. On the device it holds its shard
(if all weights are trained on several processes) or one copy in the compute dtype (under adapters).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from g2rpo.models.flux.weights import add_lora, check_weights, load_weights, lora_layers
from g2rpo.models.loading.reading import local_rows, read_weights, weight_files
from g2rpo.runtime.random import key_seed
from g2rpo.runtime.sharding import local, shard

Fill = Callable[[nn.Module], None]


@dataclass(frozen=True)
class Training:
    """Options of how the network is stored, computed and trained.

    Attributes:
        dtype: dtype of the forwards.
        lora_rank, lora_alpha, lora_targets: arguments of `add_lora`; rank 0 trains all weights.
        base_dtype: storage of a frozen base: "compute" (as `dtype`) or "float8".
        gradient_checkpointing: whether blocks are recomputed in the backward pass.
        compiled: whether forwards without gradient use torch.compile, block by block.
        mesh: device mesh over which parameters are sharded; None: one process.
    """

    dtype: torch.dtype = torch.float32
    lora_rank: int = 0
    lora_alpha: float | None = None
    lora_targets: tuple[str, ...] | None = None
    base_dtype: str = "compute"
    gradient_checkpointing: bool = False
    compiled: bool = False
    mesh: DeviceMesh | None = None

    @property
    def master_dtype(self) -> torch.dtype:
        """Dtype of trained weights: float32, or float64 if the forwards are in float64."""
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def autocast(self) -> bool:
        """Whether autocast runs bfloat16 forwards over float32 weights.

        Sharded weights do not need it, because they are gathered in bfloat16.
        """
        sharded = self.mesh is not None and not self.lora_rank
        return self.dtype == torch.bfloat16 and not sharded


def make_network(
    config: Mapping[str, Any],
    fill: Fill,
    device: torch.device,
    training: Training,
    weights: tuple[Path, ...] = (),
) -> Any:
    """Creates a FluxTransformer2DModel that is ready to train, in evaluation mode.

    Args:
        config: configuration of the transformer.
        fill: sets the parameters, plain tensors or DTensors, to the values of the base.
        device: device of the parameters.
        training: how the network is stored, computed and trained.
        weights: weights that are applied to the base in order (models/flux/weights.py).

    Raises:
        ValueError: as `meta_network`, or a file of the base is damaged.
    """
    module = meta_network(config, training, weights)
    frozen = training.lora_rank > 0
    if frozen and training.base_dtype == "float8":
        module.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=training.dtype)
    if training.mesh is not None and not frozen:
        _shard(module, training)
    module.to_empty(device=device)
    fill(module)
    for path in weights:
        load_weights(module, path)
    if frozen:
        targets, master = training.lora_targets, training.master_dtype
        add_lora(module, training.lora_rank, training.lora_alpha, targets, master)
        if training.mesh is not None:
            _shard(module, training)
    if training.gradient_checkpointing:
        module.enable_gradient_checkpointing()
    if training.compiled:
        compile_blocks(module)
    return module


def meta_network(config: Mapping[str, Any], training: Training, weights: tuple[Path, ...] = ()) -> Any:
    """Creates the network on the meta device and checks, before any weight is read, that it can be trained.

    Arguments are those of `make_network`.

    Raises:
        ValueError: `weights` do not fit, a LoRA among them cannot be added, or lora_targets match nothing.
    """
    from diffusers import FluxTransformer2DModel

    frozen = training.lora_rank > 0
    with torch.device("meta"):
        module: Any = FluxTransformer2DModel.from_config(dict(config)).eval()
    if buffers := [name for name, _ in module.named_buffers()]:
        raise ValueError(f"this transformer has buffers ({buffers[0]}, …), which no weight file fills")
    if frozen:
        lora_layers(module, training.lora_targets)
    loras = [path for path in weights if check_weights(module, path)]
    if loras and frozen and training.base_dtype == "float8":
        raise ValueError(
            f"{loras[0]} is a LoRA, which cannot be added into a base of base_dtype='float8'; "
            "use base_dtype=compute"
        )
    if loras and not frozen and training.mesh is not None:
        raise ValueError(
            f"{loras[0]} is a LoRA, which cannot be added into weights that several processes share; "
            "export it once with its base (g2rpo export --layout diffusers) and train that folder"
        )
    # A LoRA among the weights is added to the base in float32; bfloat16 would round most of it away.
    dtype = training.dtype if frozen and not loras else training.master_dtype
    nn.Module.to(module, dtype)  # diffusers' own `to` warns of float32 layers even if there are none
    return module


def blocks_of(module: Any) -> list[nn.Module]:
    """Returns the repeated blocks of a FLUX transformer, in order."""
    return list(itertools.chain(module.transformer_blocks, module.single_transformer_blocks))


def _shard(module: Any, training: Training) -> None:
    assert training.mesh is not None
    frozen = {p for p in module.parameters() if not p.requires_grad}
    full_bf16 = not training.lora_rank and training.dtype != training.master_dtype
    shard(
        module,
        blocks_of(module),
        training.mesh,
        param_dtype=training.dtype if full_bf16 else None,
        reduce_dtype=training.master_dtype if full_bf16 else None,
        ignored=frozen or None,
    )


def compile_blocks(module: Any) -> None:
    """Compiles each block's forwards without gradient with torch.compile; those with gradient stay eager.

    Hooks, such as FSDP's, remain outside the graphs. Blocks of the same class share a graph.
    """
    for block in blocks_of(module):
        block.forward = _compiled_without_grad(block.forward)


def _compiled_without_grad(eager: Callable[..., Any]) -> Callable[..., Any]:
    compiled = torch.compile(eager, fullgraph=True)

    def forward(*args: Any, **kwargs: Any) -> Any:
        return (eager if torch.is_grad_enabled() else compiled)(*args, **kwargs)

    return forward


# ---- filling


def fill_from_folder(folder: Path) -> Fill:
    """Returns a function that reads the parameters, or this process's rows of them, from diffusers' files."""

    def fill(module: nn.Module) -> None:
        read_weights(module, weight_files(folder), folder)

    return fill


@torch.no_grad()
def fill_randomly(module: nn.Module) -> None:
    """Sets random weights with the scale of a trained network.

    Matrices are standard normal over the square root of the number of inputs, norms are 1 and biases are 0.
    The values do not depend on the number of processes, but on the type of device.
    """
    for name, parameter in module.named_parameters():
        if parameter.ndim < 2:
            local(parameter).fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        generator = torch.Generator(parameter.device).manual_seed(key_seed(0, name))
        noise = torch.randn(parameter.shape, generator=generator, device=parameter.device)
        first, last = local_rows(parameter)
        local(parameter).copy_(noise[first:last] / parameter.shape[1] ** 0.5)

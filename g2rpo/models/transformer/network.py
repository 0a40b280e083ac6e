"""Construction of the velocity network: built without storage, sharded, then filled tensor by tensor.

    meta device  ->  (fully_shard)  ->  storage on the device  ->  each tensor, or its rows, from the file

A process therefore holds at most one tensor of the network on the host. On the device it holds its shard (if
all weights are trained on several processes) or one copy in the compute dtype (under adapters, or if nothing
is trained).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from g2rpo.models.loading.precision import DTYPES
from g2rpo.models.loading.reading import local_rows, read_weights, weight_files
from g2rpo.models.options import PolicyOptions
from g2rpo.models.transformer.architecture import Architecture
from g2rpo.models.transformer.weights import add_lora, check_weights, load_weights, lora_layers
from g2rpo.runtime.progress import phase
from g2rpo.runtime.random import key_seed
from g2rpo.runtime.sharding import local, shard

MOST_GRAPHS = 32
"""Largest number of graphs that torch may compile of a class of blocks."""

Fill = Callable[[nn.Module], None]


@dataclass(frozen=True)
class Training:
    """How the network is stored, computed and trained.

    Attributes:
        options: options of the policy.
        mesh: device mesh over which parameters are sharded; None: one process.
    """

    options: PolicyOptions = field(default_factory=PolicyOptions)
    mesh: DeviceMesh | None = None

    @property
    def frozen(self) -> bool:
        """Whether adapters are trained over a frozen base."""
        return self.options.lora_rank > 0

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the forwards."""
        return DTYPES[self.options.precision]

    @property
    def master_dtype(self) -> torch.dtype:
        """Dtype of trained weights: float32, or float64 if the forwards are in float64."""
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def autocast(self) -> bool:
        """Whether autocast runs bfloat16 forwards over float32 weights.

        Sharded weights do not need it, because they are gathered in bfloat16, nor do weights that are only
        sampled, which are bfloat16.
        """
        sharded = self.mesh is not None and not self.frozen
        return self.dtype == torch.bfloat16 and not sharded and not self.only_sampled

    @property
    def only_sampled(self) -> bool:
        """Whether all weights are stored in the dtype of the forwards, because none is trained."""
        return not self.options.trainable and not self.frozen


def make_network(
    architecture: Architecture,
    config: Mapping[str, Any],
    fill: Fill,
    device: torch.device,
    training: Training,
) -> Any:
    """Creates a network that is ready to train or, with trainable=False, to sample; in evaluation mode.

    Args:
        architecture: class of the network.
        config: its configuration.
        fill: sets the parameters, plain tensors or DTensors, to the values of the base.
        device: device of the parameters.
        training: how the network is stored, computed and trained; its `weights` are applied to the base.

    Raises:
        ValueError: as `meta_network`, or a file of the base is damaged.
    """
    options, frozen = training.options, training.frozen
    module = meta_network(architecture, config, training)
    if frozen and options.base_dtype == "float8":
        module.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=training.dtype)
    if training.mesh is not None and not frozen:
        _shard(architecture, module, training)
    module.to_empty(device=device)
    if architecture.restore is not None:
        architecture.restore(module, device)
    fill(module)
    for path in options.weights:
        load_weights(architecture, module, path)
    if training.only_sampled:
        for parameter in module.parameters():  # float32 where LoRAs were added
            parameter.data = parameter.data.to(training.dtype)
    if frozen:
        add_lora(
            architecture,
            module,
            options.lora_rank,
            options.lora_alpha,
            options.lora_targets,
            training.master_dtype,
        )
        if training.autocast:
            keep_input_dtypes(module)
        if training.mesh is not None:
            _shard(architecture, module, training)
    if options.gradient_checkpointing:
        module.enable_gradient_checkpointing()
    if options.compile_blocks:
        compile_blocks(architecture, module)
    return module


def keep_input_dtypes(module: nn.Module) -> None:
    """Makes adapters take their inputs as they are; autocast casts what their products need.

    PEFT casts a layer's bfloat16 input to the float32 of its adapters, and autocast casts it back: two passes
    over the activations, and a second copy of them for the backward pass, with the same values.
    """
    for layer in module.modules():
        if hasattr(layer, "lora_A"):
            layer.cast_input_dtype_enabled = False  # type: ignore[assignment]


def meta_network(architecture: Architecture, config: Mapping[str, Any], training: Training) -> Any:
    """Creates the network on the meta device and checks, before any weight is read, that it can be trained.

    Arguments are those of `make_network`.

    Raises:
        ValueError: the weights of the options do not fit, a LoRA among them cannot be added, or lora_targets
            match nothing.
    """
    options, frozen = training.options, training.frozen
    module: Any = architecture.on_meta_device(config)
    buffers = [name for name, _ in module.named_buffers()]
    if buffers and architecture.restore is None:
        raise ValueError(f"this transformer has buffers ({buffers[0]}, …), which no weight file fills")
    if frozen:
        lora_layers(architecture, module, options.lora_targets)
    loras = [path for path in options.weights if check_weights(architecture, module, path)]
    if loras and frozen and options.base_dtype == "float8":
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
    in_compute_dtype = (frozen or training.only_sampled) and not loras
    dtype = training.dtype if in_compute_dtype else training.master_dtype
    nn.Module.to(module, dtype)  # diffusers' own `to` warns of float32 layers even if there are none
    return module


def _shard(architecture: Architecture, module: Any, training: Training) -> None:
    assert training.mesh is not None
    frozen = {p for p in module.parameters() if not p.requires_grad}
    full_bf16 = not training.frozen and training.dtype != training.master_dtype
    shard(
        module,
        architecture.blocks_of(module),
        training.mesh,
        param_dtype=training.dtype if full_bf16 else None,
        reduce_dtype=training.master_dtype if full_bf16 else None,
        ignored=frozen or None,
    )


def compile_blocks(architecture: Architecture, module: Any) -> None:
    """Compiles each block's forwards without gradient with torch.compile; those with gradient stay eager.

    Hooks, such as FSDP's, remain outside the graphs. Blocks of the same class share a graph.
    """
    # Batch size 1, larger ones, masks, text lengths and 8-bit weights have graphs of their own, in two kinds
    # (inputs of the first block are views); beyond the limit, torch would raise an error.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MOST_GRAPHS)
    for block in architecture.blocks_of(module):
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
    parameters = dict(module.named_parameters())
    with phase("random weights", len(parameters), "tensors") as filling:
        for name, parameter in parameters.items():
            filling.add()
            if parameter.ndim < 2:
                local(parameter).fill_(0.0 if name.endswith("bias") else 1.0)
                continue
            generator = torch.Generator(parameter.device).manual_seed(key_seed(0, name))
            noise = torch.randn(parameter.shape, generator=generator, device=parameter.device)
            first, last = local_rows(parameter)
            local(parameter).copy_(noise[first:last] / parameter.shape[1] ** 0.5)

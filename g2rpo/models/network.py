"""The velocity network: built without storage, sharded, then filled from files piece by piece.

    meta device  ->  (fully_shard)  ->  storage on the device  ->  each tensor, or its rows, from the file

So no process holds more of FLUX.1's 24 GB on the host than one tensor, and more of it on the device than its
share (where all weights are trained on several processes) or one copy in the compute dtype (under adapters).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from g2rpo.distributed import key_seed, local, shard
from g2rpo.models.files import read_json
from g2rpo.models.weights import add_lora, load_weights, lora_layers

Fill = Callable[[nn.Module], None]


@dataclass(frozen=True)
class Training:
    """How the network is held and trained.

    Attributes:
        dtype: of the forwards.
        lora_rank, lora_alpha, lora_targets: of adapters; rank 0 trains all weights.
        base_dtype: in which a frozen base is stored, "compute" or "float8".
        gradient_checkpointing: recompute blocks in the backward pass.
        compiled: forwards without gradient run through torch.compile, block by block.
        mesh: what parameters are sharded over; None = one process.
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
        """Of weights that are trained: float32, or float64 where the forwards are."""
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def autocast(self) -> bool:
        """bfloat16 forwards over float32 weights. Sharded ones are gathered in bfloat16 and need none."""
        sharded = self.mesh is not None and not self.lora_rank
        return self.dtype == torch.bfloat16 and not sharded


def make_network(
    config: Mapping[str, Any],
    fill: Fill,
    device: torch.device,
    training: Training,
    weights: tuple[Path, ...] = (),
) -> Any:
    """A FluxTransformer2DModel, ready to train, in evaluation mode.

    Args:
        config: of the transformer.
        fill: puts the base's values into its parameters, whole ones or DTensors.
        weights: put onto the base, in order (models/weights.py).

    Raises:
        ValueError: weights that do not fit, or that cannot be read shard by shard; lora_targets that match
            nothing, before any weight is read.
    """
    from diffusers import FluxTransformer2DModel

    frozen = training.lora_rank > 0
    # A given LoRA is added into the base in float32; bfloat16 would round most of it away.
    dtype = training.dtype if frozen and not weights else training.master_dtype
    with torch.device("meta"):
        module: Any = FluxTransformer2DModel.from_config(dict(config)).eval()
    nn.Module.to(module, dtype)  # diffusers' own warns of layers to keep in float32 even where there are none
    if buffers := [name for name, _ in module.named_buffers()]:
        raise ValueError(f"this transformer has buffers ({buffers[0]}, …), which no weight file fills")
    if frozen:
        lora_layers(module, training.lora_targets)  # a misspelt one shows before 24 GB are read
    quantised = frozen and training.base_dtype == "float8"
    if quantised:
        if weights:
            raise ValueError("base_dtype='float8' holds the base alone: it takes no weights on top")
        module.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=training.dtype)
    if training.mesh is not None and not frozen:
        if weights:
            raise ValueError(
                f"{weights[0]}: weights on top of a base cannot be read by several processes; "
                "export them once with their base (g2rpo export --layout diffusers) and train that folder"
            )
        _shard(module, training)
    module.to_empty(device=device)
    fill(module)
    added = [load_weights(module, path) for path in weights]  # which of them were LoRAs
    if added and not any(added) and frozen:
        nn.Module.to(module, training.dtype)
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


def blocks_of(module: Any) -> list[nn.Module]:
    """The repeated blocks of a FLUX transformer, in order."""
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
    """Forwards without gradient of each block go through torch.compile; with gradient they stay eager.

    Hooks, such as FSDP's, stay outside the graphs. Blocks of one kind share a graph.
    """
    for block in blocks_of(module):
        block.forward = _compiled_without_grad(block.forward)


def _compiled_without_grad(eager: Callable[..., Any]) -> Callable[..., Any]:
    compiled = torch.compile(eager, fullgraph=True)

    def forward(*args: Any, **kwargs: Any) -> Any:
        return (eager if torch.is_grad_enabled() else compiled)(*args, **kwargs)

    return forward


# ---- filling


def weight_files(folder: Path) -> dict[str, Path]:
    """Parameter name -> safetensors file, of a folder that diffusers wrote, in one file or several.

    Raises:
        ValueError: no such files, or one of them missing or damaged.
    """
    from safetensors import SafetensorError, safe_open

    name = "diffusion_pytorch_model.safetensors"
    index = folder / f"{name}.index.json"
    if index.is_file():
        files = {key: folder / str(file) for key, file in read_json(index)["weight_map"].items()}
        if missing := sorted({file for file in files.values() if not file.is_file()}):
            raise ValueError(f"{index} names {missing[0].name}, which is not there; fetch the model again")
        return files
    if not (folder / name).is_file():
        raise ValueError(f"{folder} holds no {name} (nor an index of several); fetch the model again")
    try:
        with safe_open(folder / name, framework="pt") as file:
            return dict.fromkeys(file.keys(), folder / name)
    except SafetensorError as error:
        raise ValueError(f"{folder / name} is damaged ({error}); fetch the model again") from error


def fill_from_folder(folder: Path) -> Fill:
    """Reads the parameters from diffusers' files: of a sharded one, the rows that live here."""

    def fill(module: nn.Module) -> None:
        read_weights(module, weight_files(folder), folder)

    return fill


@torch.no_grad()
def read_weights(module: nn.Module, files: Mapping[str, Path], where: Path) -> None:
    """Copies each parameter of `module` from its file, and its rows alone where it is sharded.

    Raises:
        ValueError: names or shapes that differ, or a damaged file.
    """
    from safetensors import SafetensorError, safe_open

    parameters = dict(module.named_parameters())
    problems = [f"{name} missing" for name in parameters.keys() - files.keys()]
    problems += [f"{name} unknown" for name in files.keys() - parameters.keys()]
    if not problems:
        for path in dict.fromkeys(files.values()):
            try:
                with safe_open(path, framework="pt") as file:
                    for name in (name for name in files if files[name] == path):
                        problems += _read_one(file.get_slice(name), name, parameters[name])
            except SafetensorError as error:
                raise ValueError(f"{path} is damaged ({error}); fetch the model again") from error
    if problems:
        shown = "; ".join(sorted(problems)[:3])
        raise ValueError(f"{where} does not fit its config.json ({len(problems)} differences: {shown}, …)")


def _read_one(stored: Any, name: str, parameter: Tensor) -> list[str]:
    """Fills one parameter; says what is wrong, if anything."""
    shape = tuple(stored.get_shape())
    if shape != tuple(parameter.shape):
        return [f"{name} has shape {shape}, not {tuple(parameter.shape)}"]
    first, last = local_rows(parameter)
    if first < last:
        local(parameter).copy_(stored[first:last])
    return []


def local_rows(parameter: Tensor) -> tuple[int, int]:
    """First and last (exclusive) row of a parameter that this process holds."""
    if not isinstance(parameter, DTensor):
        return 0, parameter.shape[0]
    shape, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    return offset[0], offset[0] + shape[0]


@torch.no_grad()
def fill_at_random(module: nn.Module) -> None:
    """Weights of a trained network's size: normal over the root of the inputs, norms 1, biases 0.

    The same on any number of processes (on one kind of device).
    """
    for name, parameter in module.named_parameters():
        if parameter.ndim < 2:
            local(parameter).fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        generator = torch.Generator(parameter.device).manual_seed(key_seed(0, name))
        drawn = torch.randn(parameter.shape, generator=generator, device=parameter.device)
        first, last = local_rows(parameter)
        local(parameter).copy_(drawn[first:last] / parameter.shape[1] ** 0.5)

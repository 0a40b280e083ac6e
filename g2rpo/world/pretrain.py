"""Trains the embedded models from scratch: `python -m g2rpo.world.pretrain STAGE --out DIR --seconds N`.

The stages, in order, are vae and clip (which need no other), flow (needs vae), distill (needs flow),
preference (needs clip and vae), and judge, which evaluates the flow model again. Each stage reads and writes
diffusers or transformers folders in DIR, so it can be continued later: `flow` starts from existing weights
with a new warm-up.
"""

import argparse
import copy
import json
import time
from pathlib import Path
from typing import Any

import torch

from g2rpo.models import tiny
from g2rpo.world import contrast, flow, networks, preference, vae
from g2rpo.world.training import Pool, make_pool

MODEL, CLIP, PREFERENCE = tiny.FOLDER, "tiny_clip", "tiny_preference"


def _load(kind: Any, folder: Path, device: torch.device) -> Any:
    return kind.from_pretrained(folder, torch_dtype=torch.float32).to(device)


def load_vae(out: Path, device: torch.device) -> Any:
    """Loads the AutoencoderKL of the folder `out`, in float32."""
    return _load(tiny.networks().network_class("vae"), out / MODEL / "vae", device).eval()


def load_clip(out: Path, name: str, device: torch.device) -> Any:
    """Loads the CLIPModel `name` of the folder `out`, in float32."""
    from transformers import CLIPModel

    return _load(CLIPModel, out / name, device)


def load_flow(out: Path, device: torch.device) -> flow.FlowModel:
    """Loads the transformer and the text encoders of the folder `out`, in float32."""
    kinds, folder = tiny.networks().network_class, out / MODEL
    parts = ("transformer", "text_encoder", "text_encoder_2")
    return flow.FlowModel(*(_load(kinds(part), folder / part, device) for part in parts))


def fresh_flow(device: torch.device) -> flow.FlowModel:
    """Creates untrained networks."""
    parts = (networks.transformer(), networks.text_encoder(), networks.text_encoder_2())
    return flow.FlowModel(*(part.to(device) for part in parts))


def save(module: Any, folder: Path) -> None:
    """Saves a copy of the module in bfloat16, which is half the size and how models are usually stored."""
    copy.deepcopy(module).to(torch.bfloat16).save_pretrained(folder)


def save_pipeline(out: Path, model: flow.FlowModel, autoencoder: Any) -> None:
    """Saves the complete pipeline in diffusers layout, with model_index.json, in bfloat16."""
    pipeline = tiny.networks().pipeline(
        scheduler=networks.scheduler(),
        vae=copy.deepcopy(autoencoder).to(torch.bfloat16),
        text_encoder=copy.deepcopy(model.text_encoder).to(torch.bfloat16),
        tokenizer=networks.tokenizer(),
        text_encoder_2=copy.deepcopy(model.text_encoder_2).to(torch.bfloat16),
        tokenizer_2=networks.tokenizer(),
        transformer=copy.deepcopy(model.transformer).to(torch.bfloat16),
    )
    for part in (pipeline.vae, pipeline.transformer):
        part.register_to_config(_name_or_path=MODEL)  # instead of a path on the machine that trained it
    pipeline.save_pretrained(out / MODEL)
    # transformers loads in the data type of the config, diffusers in float32; all parts must load in the
    # same.
    for name in ("text_encoder", "text_encoder_2"):
        path = out / MODEL / name / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"dtype": "float32"}, indent=2) + "\n")


def _vae_stage(
    out: Path, device: torch.device, data: Pool, held_out: Pool, options: dict[str, Any]
) -> dict[str, float]:
    model = networks.vae().to(device)
    vae.train_vae(model, data, **options)
    save(model, out / MODEL / "vae")
    return vae.evaluate_vae(load_vae(out, device), held_out)


def _clip_stage(
    out: Path, device: torch.device, data: Pool, held_out: Pool, options: dict[str, Any]
) -> dict[str, float]:
    model = networks.clip().to(device)
    contrast.train_clip(model, data, **options)
    save(model, out / CLIP)
    networks.tokenizer().save_pretrained(out / CLIP)
    return contrast.evaluate_clip(load_clip(out, CLIP, device), held_out)


def _preference_stage(
    out: Path, device: torch.device, data: Pool, held_out: Pool, options: dict[str, Any]
) -> dict[str, float]:
    model = load_clip(out, CLIP, device)
    preference.train_preference(model, data, load_vae(out, device), **options)
    save(model, out / PREFERENCE)
    networks.tokenizer().save_pretrained(out / PREFERENCE)
    return preference.evaluate_preference(load_clip(out, PREFERENCE, device), held_out)


def _flow_stages(
    stage: str, out: Path, device: torch.device, data: Pool, options: dict[str, Any], *, compiled: bool
) -> None:
    """Trains the flow model, or distills its guidance, and saves the pipeline."""
    autoencoder = load_vae(out, device)
    latents = vae.encode(autoencoder, data.pixels).to(torch.bfloat16)
    options.setdefault("lr", 1e-3 if stage == "flow" else 3e-4)
    if stage == "distill":
        teacher, model = load_flow(out, device), load_flow(out, device)
        flow.distill_guidance(model, teacher, latents, data.scenes, **options)
    else:
        fresh = not (out / MODEL / "transformer").exists()
        model = fresh_flow(device) if fresh else load_flow(out, device)
        if compiled:
            model.transformer.compile_repeated_blocks(fullgraph=True)
        flow.train_flow(model, latents, data.scenes, **options)
    save_pipeline(out, model, autoencoder)


STAGES = {"vae": _vae_stage, "clip": _clip_stage, "preference": _preference_stage}
OFFSETS = {"vae": 1, "clip": 2, "preference": 3, "flow": 4, "distill": 4}
"""Offset of a stage's seed, so that each stage has its own scenes."""


def run(
    stage: str,
    out: Path,
    *,
    seconds: float,
    lr: float | None,
    scenes: int,
    seed: int,
    batch: int | None,
    part: int,
    compiled: bool,
) -> None:
    """Runs a stage, evaluates its model on held-out scenes and adds the result to OUT/pretrain.json.

    Args:
        stage: vae, clip, preference, flow, distill or judge.
        out: folder of the models.
        seconds: duration of the training; evaluation is not included.
        lr, batch: peak learning rate and batch size; None is the default of the stage.
        scenes: number of training scenes.
        part: for flow and distill, a number that selects other training scenes.
        compiled: whether to compile the blocks of the transformer.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(seed)
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)  # its backward crashes at tiny head counts in bf16
        torch.set_float32_matmul_precision("high")
    start = time.perf_counter()

    def pool(num: int, offset: int, **split: Any) -> Pool:
        return make_pool(num, torch.Generator(device).manual_seed(seed * 1000 + offset), **split)

    held_out = pool(min(2048, scenes), 999, held_out=True, two_groups=0.5)
    options: dict[str, Any] = {"seconds": seconds, "seed": seed}
    options |= ({"lr": lr} if lr else {}) | ({"batch": batch} if batch else {})
    if stage in STAGES:
        report = STAGES[stage](out, device, pool(scenes, OFFSETS[stage]), held_out, options)
    else:
        if stage != "judge":
            _flow_stages(stage, out, device, pool(scenes, OFFSETS[stage] + part), options, compiled=compiled)
        report = evaluate_flow(out, device, held_out, cfg=stage == "flow")
    report["seconds_in_all"] = time.perf_counter() - start
    print(stage, json.dumps({k: round(v, 4) for k, v in report.items()}), flush=True)
    path = out / "pretrain.json"
    earlier = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(earlier | {stage: report}, indent=1))


def evaluate_flow(out: Path, device: torch.device, held_out: Pool, *, cfg: bool) -> dict[str, float]:
    """Evaluates the flow model at several guidance scales; `cfg` is as for `flow.sample`."""
    model, autoencoder = load_flow(out, device), load_vae(out, device)
    scores: dict[str, float] = {}
    for guidance in (1.0, 2.0, 3.5) if cfg else (1.0, 2.0, 3.5, 5.0):
        result = flow.evaluate_flow(model, autoencoder, held_out.scenes, guidance=guidance, cfg=cfg)
        print(f"guidance {guidance}", json.dumps({k: round(v, 3) for k, v in result.items()}), flush=True)
        scores |= {f"{name}@{guidance}": value for name, value in result.items()}
    return scores


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stage", choices=["vae", "clip", "flow", "distill", "preference", "judge"])
    parser.add_argument("--out", type=Path, required=True, help="folder of the models")
    parser.add_argument("--seconds", type=float, default=120, help="duration of the training")
    parser.add_argument("--lr", type=float, help="peak learning rate; default: that of the stage")
    parser.add_argument("--scenes", type=int, default=400_000, help="number of training scenes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, help="images per step; default: that of the stage")
    parser.add_argument("--part", type=int, default=0, help="flow, distill: selects other training scenes")
    parser.add_argument("--compiled", action="store_true", help="compile the blocks of the transformer")
    arguments = vars(parser.parse_args())
    run(arguments.pop("stage"), arguments.pop("out"), **arguments)


if __name__ == "__main__":
    main()

"""Make the embedded models from nothing: `python -m g2rpo.world.pretrain STAGE --out DIR --seconds N`.

Stages, in order: vae, clip (both need nothing), flow (needs the vae), distill, preference (needs clip and
vae), judge (scores the flow model again). Each reads and writes diffusers / transformers folders in DIR, so a
stage can be given more time later: `flow` starts from the weights that it finds, with its own warm-up.
"""

import argparse
import copy
import json
import time
from pathlib import Path
from typing import Any

import torch

from g2rpo.world import contrast, flow, networks, preference, vae
from g2rpo.world.training import Pool, make_pool

MODEL, CLIP, PREFERENCE = "tiny_flux", "tiny_clip", "tiny_preference"


def _load(kind: Any, folder: Path, device: torch.device) -> Any:
    return kind.from_pretrained(folder, torch_dtype=torch.float32).to(device)


def load_vae(out: Path, device: torch.device) -> Any:
    from diffusers import AutoencoderKL

    return _load(AutoencoderKL, out / MODEL / "vae", device).eval()


def load_clip(out: Path, name: str, device: torch.device) -> Any:
    from transformers import CLIPModel

    return _load(CLIPModel, out / name, device)


def load_flow(out: Path, device: torch.device) -> flow.FlowModel:
    from diffusers import FluxTransformer2DModel
    from transformers import CLIPTextModel, T5EncoderModel

    return flow.FlowModel(
        _load(FluxTransformer2DModel, out / MODEL / "transformer", device),
        _load(CLIPTextModel, out / MODEL / "text_encoder", device),
        _load(T5EncoderModel, out / MODEL / "text_encoder_2", device),
    )


def fresh_flow(device: torch.device) -> flow.FlowModel:
    """Untrained networks."""
    parts = (networks.transformer(), networks.text_encoder(), networks.text_encoder_2())
    return flow.FlowModel(*(part.to(device) for part in parts))


def save(module: Any, folder: Path) -> None:
    """bfloat16 safetensors: half the size, and FLUX's own storage type."""
    copy.deepcopy(module).to(torch.bfloat16).save_pretrained(folder)


def save_pipeline(out: Path, model: flow.FlowModel, autoencoder: Any) -> None:
    """The whole folder in diffusers layout, model_index.json included."""
    from diffusers import FluxPipeline

    pipeline = FluxPipeline(
        scheduler=networks.scheduler(),
        vae=copy.deepcopy(autoencoder).to(torch.bfloat16),
        text_encoder=copy.deepcopy(model.text_encoder).to(torch.bfloat16),
        tokenizer=networks.tokenizer(),
        text_encoder_2=copy.deepcopy(model.text_encoder_2).to(torch.bfloat16),
        tokenizer_2=networks.tokenizer(),
        transformer=copy.deepcopy(model.transformer).to(torch.bfloat16),
    )
    for part in (pipeline.vae, pipeline.transformer):
        part.register_to_config(_name_or_path=MODEL)  # not the folder of the machine that made it
    pipeline.save_pretrained(out / MODEL)
    # transformers loads in the dtype that a config names, diffusers in float32: all parts must say the same.
    for name in ("text_encoder", "text_encoder_2"):
        path = out / MODEL / name / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"dtype": "float32"}, indent=2) + "\n")


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
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(seed)
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)  # its backward crashes at tiny head counts in bf16
        torch.set_float32_matmul_precision("high")
    begin = time.perf_counter()

    def pool(num: int, offset: int, **how: Any) -> Pool:
        return make_pool(num, torch.Generator(device).manual_seed(seed * 1000 + offset), **how)

    held_out = pool(min(2048, scenes), 999, held_out=True, two_groups=0.5)
    options: dict[str, Any] = {"seconds": seconds, "seed": seed}
    options |= ({"lr": lr} if lr else {}) | ({"batch": batch} if batch else {})
    model: Any
    if stage == "vae":
        model = networks.vae().to(device)
        vae.train_vae(model, pool(scenes, 1), **options)
        save(model, out / MODEL / "vae")
        report = vae.judge_vae(load_vae(out, device), held_out)
    elif stage == "clip":
        model = networks.clip().to(device)
        contrast.train_clip(model, pool(scenes, 2), **options)
        save(model, out / CLIP)
        networks.tokenizer().save_pretrained(out / CLIP)
        report = contrast.judge_clip(load_clip(out, CLIP, device), held_out)
    elif stage == "preference":
        model = load_clip(out, CLIP, device)
        preference.train_preference(model, pool(scenes, 3), load_vae(out, device), **options)
        save(model, out / PREFERENCE)
        networks.tokenizer().save_pretrained(out / PREFERENCE)
        report = preference.judge_preference(load_clip(out, PREFERENCE, device), held_out)
    elif stage in ("flow", "distill"):
        autoencoder = load_vae(out, device)
        data = pool(scenes, 4 + part)
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
        report = judge_flow(out, device, held_out, cfg=stage == "flow")
    else:
        report = judge_flow(out, device, held_out, cfg=False)
    report["seconds_in_all"] = time.perf_counter() - begin
    print(stage, json.dumps({k: round(v, 4) for k, v in report.items()}), flush=True)
    path = out / "pretrain.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(known | {stage: report}, indent=1))


def judge_flow(out: Path, device: torch.device, held_out: Pool, *, cfg: bool) -> dict[str, float]:
    model, autoencoder = load_flow(out, device), load_vae(out, device)
    scores: dict[str, float] = {}
    for guidance in (1.0, 2.0, 3.5) if cfg else (1.0, 2.0, 3.5, 5.0):
        result = flow.judge_flow(model, autoencoder, held_out.scenes, guidance=guidance, cfg=cfg)
        print(f"guidance {guidance}", json.dumps({k: round(v, 3) for k, v in result.items()}), flush=True)
        scores |= {f"{name}@{guidance}": value for name, value in result.items()}
    return scores


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stage", choices=["vae", "clip", "flow", "distill", "preference", "judge"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--lr", type=float)
    parser.add_argument("--scenes", type=int, default=400_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--part", type=int, default=0, help="flow, distill: another part draws other scenes")
    parser.add_argument("--compiled", action="store_true", help="compile the transformer's blocks")
    given = vars(parser.parse_args())
    run(given.pop("stage"), given.pop("out"), **given)


if __name__ == "__main__":
    main()

"""The Python API: it does what the commands do, and no module hides a function."""

import importlib
import pkgutil

import pytest
from support.random_flux import save_random_flux

import g2rpo
from g2rpo.config.load import load_settings
from g2rpo.costs.estimate import plan_here
from g2rpo.training.run_prompts import RunPrompts


def test_no_module_has_the_name_of_a_function():
    modules = {module.name for module in pkgutil.iter_modules(g2rpo.__path__)}
    assert not modules & set(g2rpo.__all__)  # importing the module would replace the function
    for name in modules - {"__main__"}:
        importlib.import_module(f"g2rpo.{name}")
    assert all(callable(getattr(g2rpo, name)) for name in g2rpo.__all__ if name != "__version__")


def test_plan_is_the_commands():
    costs = g2rpo.plan("flux_lora_1gpu", prompts="world:train", gpu="H200", memory_gb=141, num_processes=1)
    settings = load_settings("flux_lora_1gpu", {"prompts": "world:train"})
    texts = len(RunPrompts.of(settings).texts)
    assert costs == plan_here(settings, gpu="H200", memory_gb=141, num_texts=texts)
    assert f"embeddings of {texts:,} prompts" in costs.disk
    assert costs.forwards["total"] > 1000 and costs.seconds["rollout"] > 1
    with pytest.raises(ValueError, match="the table of measured times contains only"):
        g2rpo.plan(gpu="abacus")


def test_evaluate_draws_scores_and_compares(tmp_path):
    folder = save_random_flux(tmp_path / "flux")
    prompts = ["a red circle", "a blue square"]
    done = g2rpo.evaluate(
        [folder, str(folder)],
        prompts,
        ["colourfulness"],
        [1, 2],
        limit=2,
        labels=["a", "b"],
        out=tmp_path / "out",
        device="cpu",
        batch=2,
    )
    assert set(done.means) == {(n, label, "colourfulness") for n in (1, 2) for label in "ab"}
    assert all(d.mean == 0 for d in done.differences.values()) and len(done.differences) == 2
    assert len(list((tmp_path / "out" / "a" / "2").glob("*.png"))) == 2
    for wrong, message in (([], "no prompts"), (["a", " "], "prompt 2: empty prompt")):
        with pytest.raises(ValueError, match=message):
            g2rpo.evaluate([folder], wrong, ["colourfulness"], out=tmp_path / "never")
    assert not (tmp_path / "never").exists()

"""Float8 tails: the layers that they change, those that they do not, and their use only for scored images."""

import pytest
import torch
from support import policies

from g2rpo.config.settings import Settings
from g2rpo.flow.schedule import shifted_sigmas
from g2rpo.models.flux.network import FLUX
from g2rpo.models.loading.low_precision import eligible_linears, float8_linears
from g2rpo.rollouts.explore import explore
from g2rpo.rollouts.rules import EveryStep, Singular, Window


def load(**changes):
    return policies.load("random:tiny", **{"precision": "bfloat16", "tails_precision": "float8", **changes})


def explored(policy, plan=None, **options):
    plan = plan or Singular((0, 2), (1, 2)).plan(6, 0, 0)
    cond = policy.encode(["a", "b"])
    given = {"group_size": 3, "diffusion": "flow", "eta": 0.7, "seed": 0, "iteration": 0}
    with policy.resident():
        return explore(
            policy, plan, shifted_sigmas(plan.num_steps), cond, prompt_indices=[0, 1], **given, **options
        )


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_weights_come_back(lora_rank):
    policy = load(lora_rank=lora_rank)
    blocks = FLUX.blocks_of(policy.module)
    before = {
        name: (parameter, parameter.data.clone()) for name, parameter in policy.module.named_parameters()
    }
    with policy.resident(), torch.no_grad():
        x, sigma = torch.randn(2, *policy.latent_shape), torch.tensor([0.9, 0.3])
        cond = policy.encode(["a", "b"])
        plain = policy.velocity(x, sigma, cond)
        with policy.tails():
            low = policy.velocity(x, sigma, cond)
            kinds = {type(m.weight).__name__ for block in blocks for m in eligible_linears(block)}
            assert kinds == {"Float8Tensor"}
        torch.testing.assert_close(policy.velocity(x, sigma, cond), plain, rtol=0, atol=0)
    for name, parameter in policy.module.named_parameters():
        kept, value = before[name]
        assert parameter is kept and parameter.dtype == value.dtype and torch.equal(parameter.data, value)
    off = (low - plain).norm() / plain.norm()
    assert 1e-3 < off < 0.1, "8 bits round to 1/16, bfloat16 to 1/256"


def test_which_linears():
    policy = load(lora_rank=4)
    for block in FLUX.blocks_of(policy.module):
        names = {id(module): name for name, module in block.named_modules()}
        chosen = [names[id(module)] for module in eligible_linears(block)]
        assert chosen and not any("norm" in name or "lora" in name for name in chosen)
        assert any("attn" in name for name in chosen)
        assert any("ff" in name or "mlp" in name for name in chosen)


def test_weights_come_back_after_an_error():
    policy = load()
    weights = [m.weight for block in FLUX.blocks_of(policy.module) for m in eligible_linears(block)]
    with pytest.raises(RuntimeError, match="torn"), float8_linears(FLUX.blocks_of(policy.module)):
        raise RuntimeError("torn")
    after = [m.weight for block in FLUX.blocks_of(policy.module) for m in eligible_linears(block)]
    assert all(a is b for a, b in zip(weights, after, strict=True))


def test_only_tails_are_in_eight_bits():
    policy = load()
    plain, low = explored(policy), explored(policy, tails=policy.tails)
    for name in ("x", "x_next", "velocity", "log_prob", "anchor_latents"):
        assert torch.equal(getattr(plain, name), getattr(low, name)), name
    off = (low.latents - plain.latents).norm() / plain.latents.norm()
    assert 1e-4 < off < 0.1 and plain.nfe == low.nfe


@pytest.mark.parametrize(
    "plan", [EveryStep().plan(5, 0, 0), Window(width=2).plan(6, 0, 0)], ids=["all", "window"]
)
def test_noisy_steps_of_a_path_keep_their_precision(plan):
    policy = load()
    plain, low = explored(policy, plan), explored(policy, plan, tails=policy.tails)
    for name in ("x", "x_next", "log_prob"):
        assert torch.equal(getattr(plain, name), getattr(low, name)), name
    assert not torch.equal(plain.latents, low.latents)


def test_without_the_setting_tails_are_as_the_rest():
    policy = load(tails_precision="compute")
    assert torch.equal(explored(policy).latents, explored(policy, tails=policy.tails).latents)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"precision": "float32"}, "needs precision=bfloat16"),
        ({"precision": "bfloat16", "base_dtype": "float8", "lora_rank": 4}, "base_dtype=compute, got"),
    ],
)
def test_settings_that_float8_tails_reject(settings, message):
    with pytest.raises(ValueError, match=message):
        Settings(tails_precision="float8", **settings)
    with pytest.raises(ValueError, match=message):
        policies.load("random:tiny", tails_precision="float8", **settings)


def test_without_torchao(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install torchao"):
        Settings(tails_precision="float8", precision="bfloat16")


@pytest.mark.gpu
def test_a_compiled_rollout_in_eight_bits_never_waits():
    policy = load(device="cuda", compile_blocks=True)
    eager = explored(load(device="cuda", tails_precision="compute"))
    for _ in range(2):  # the first call also compiles and quantises
        explored(policy, tails=policy.tails, rollout_batch=4)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    cond, plan = policy.encode(["a", "b"]), Singular((0, 2), (1, 2)).plan(6, 0, 0)
    with policy.resident():
        torch.cuda.set_sync_debug_mode("error")
        try:
            low = explore(
                policy,
                plan,
                shifted_sigmas(6),
                cond,
                group_size=3,
                diffusion="flow",
                eta=0.7,
                seed=0,
                iteration=0,
                prompt_indices=[0, 1],
                rollout_batch=4,
                tails=policy.tails,
            )
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs > 0
    assert (low.latents - eager.latents).norm() / eager.latents.norm() < 0.1
    images = policy.decode(low.latents.flatten(0, 2))
    plain = load(device="cuda", tails_precision="compute").decode(low.latents.flatten(0, 2))
    assert (images - plain).abs().max() < 0.1 and (images - plain).abs().mean() < 0.005
    print(f"{graphs} graphs")

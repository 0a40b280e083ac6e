"""Compiled blocks: a fixed number of graphs, the same numbers as eager, and no gradients through them."""

import functools

import pytest
import torch
from support.policies import load


@pytest.mark.parametrize("lora_rank", [pytest.param(0, marks=pytest.mark.long), 4])
def test_no_batch_size_compiles_anew(lora_rank, monkeypatch):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    torch._dynamo.reset()
    compiled = load("random:tiny", compile_blocks=True, gradient_checkpointing=True, lora_rank=lora_rank)
    eager = load("random:tiny", lora_rank=lora_rank)
    seen = []
    for n in (1, 4, 3, 2, 7):
        x, sigma = torch.randn(n, *eager.latent_shape), torch.rand(n)
        cond = eager.encode([str(i) for i in range(n)])
        with torch.no_grad():
            torch.testing.assert_close(compiled.velocity(x, sigma, cond), eager.velocity(x, sigma, cond))
        seen.append(len(graphs))
        velocity = compiled.velocity(x, sigma, cond)
        assert velocity.requires_grad and len(graphs) == seen[-1]
    # Blocks of a class share a graph; the second batch size compiles a general one, later sizes none.
    assert seen[0] <= 4 and seen[1] <= 8 and len(set(seen[1:])) == 1

"""The order of a plan's forwards: waves over a prefix tree.

A path from the anchor to an image is a chain of positions that begins with the noise steps. Chains of one
branch with a common prefix share its state, so a prefix is a node, evaluated once per group member:

    k = 1, strides 1 and 2:     1 ~ 2 - 3 - 4 - 5 - ...       ~ noise step, velocity known from the anchor
                                        \\
                                          5 - 7 - ...          2 and 3 are evaluated once for both

A branch without noise steps starts from the initial noise, whose velocity is known like an anchor's.

Wave d holds the nodes at depth d of *all* branches; they share batches, because the policy takes one sigma
per sample. The tree is computed from the plan alone, before the first forward.
"""

from __future__ import annotations

from dataclasses import dataclass

from g2rpo.rollouts.plan import Plan


@dataclass(frozen=True)
class Edge:
    """One denoising step that starts at a node.

    Attributes:
        node: index of the starting node in its wave.
        position, next_position: positions of the noise levels before and after the step.
        noise: index on the rollout's axis K if it is a noise step, else None.
        image: index of the distinct image at which the step ends, or None if it ends at the next node of the
            next wave.
    """

    node: int
    position: int
    next_position: int
    noise: int | None
    image: int | None


@dataclass(frozen=True)
class Wave:
    """Nodes of one depth, and the steps that leave them, in the order of the next wave's nodes.

    Attributes:
        positions: position of each node.
        parts: "anchor", "sde" or "tails": the part as which each node's evaluation is counted.
        edges: the steps, at least one per node.
    """

    positions: tuple[int, ...]
    parts: tuple[str, ...]
    edges: tuple[Edge, ...]


@dataclass(frozen=True)
class Tree:
    """All waves of a plan; the nodes of the first wave are anchor states, which are already evaluated.

    Attributes:
        waves: in order; the k-th node of a wave is the end of the previous wave's k-th edge without an image.
        image_of_tail: [branches][J], index of the distinct image at which each tail ends.
        num_images: number of distinct images per member.
    """

    waves: tuple[Wave, ...]
    image_of_tail: tuple[tuple[int, ...], ...]
    num_images: int

    @property
    def first_tail_wave(self) -> int:
        """Index of the first wave from which all forwards are counted as tails."""
        before = [n for n, wave in enumerate(self.waves) if set(wave.parts) != {"tails"}]
        return 1 + max(before)


def make_tree(plan: Plan) -> Tree:
    """Builds the waves of a plan and numbers its distinct images."""
    first_noise: list[int] = []
    chains: dict[tuple[int, tuple[int, ...]], int] = {}
    image_of_tail: list[tuple[int, ...]] = []
    for b, branch in enumerate(plan.branches):
        first_noise.append(sum(len(before.noise_steps) for before in plan.branches[:b]))
        ends = [(b, (*branch.noise_steps, *positions)) for positions in branch.tails]
        for end in ends:
            chains.setdefault(end, len(chains))
        image_of_tail.append(tuple(chains[end] for end in ends))

    waves = []
    nodes = list(dict.fromkeys((b, chain[:1]) for b, chain in chains))
    while nodes:
        index = {node: n for n, node in enumerate(nodes)}
        depth = len(nodes[0][1])
        steps = dict.fromkeys((b, chain[: depth + 1]) for b, chain in chains if len(chain) > depth)
        edges = []
        for b, chain in steps:
            is_noise = depth <= len(plan.branches[b].noise_steps)
            edges.append(
                Edge(
                    node=index[b, chain[:-1]],
                    position=chain[-2],
                    next_position=chain[-1],
                    noise=first_noise[b] + depth - 1 if is_noise else None,
                    image=chains.get((b, chain)),
                )
            )
        parts = tuple(_part(depth, len(plan.branches[b].noise_steps)) for b, _ in nodes)
        waves.append(Wave(tuple(chain[-1] for _, chain in nodes), parts, tuple(edges)))
        nodes = [step for step in steps if step not in chains]
    return Tree(tuple(waves), tuple(image_of_tail), len(chains))


def _part(depth: int, num_noise_steps: int) -> str:
    if depth == 1:
        return "anchor"
    return "sde" if depth <= num_noise_steps else "tails"

"""The forwards of a plan in the order in which they are run: waves over a prefix tree.

A way from the anchor to an image is a chain of positions, noise steps first. Chains of one branch that
agree so far are in the same state, so a chain's prefix is a node, evaluated once per group member:

    k = 1, strides 1 and 2:     1 ~ 2 - 3 - 4 - 5 - ...       ~ noisy step, velocity known from the anchor
                                        \\
                                          5 - 7 - ...          2 and 3 are evaluated once for both

Wave d holds the nodes at depth d of *all* branches: the policy takes one sigma per sample, so they share
its batches. All of this is known from the plan, before the first forward.
"""

from __future__ import annotations

from dataclasses import dataclass

from g2rpo.rollouts.plan import Plan


@dataclass(frozen=True)
class Edge:
    """One step out of a node.

    Attributes:
        node: where it starts, an index into its wave.
        position, next_position: levels it goes between.
        noise: its index on the rollout's axis K if it is a noisy step, else None.
        image: the distinct image that it ends at, or None: it ends at the next wave's next node.
    """

    node: int
    position: int
    next_position: int
    noise: int | None
    image: int | None


@dataclass(frozen=True)
class Wave:
    """Nodes of one depth, and the steps out of them in the order of the next wave's nodes.

    Attributes:
        positions: of the nodes.
        parts: "anchor", "sde" or "tails": what each node's evaluation counts as.
        edges: at least one per node.
    """

    positions: tuple[int, ...]
    parts: tuple[str, ...]
    edges: tuple[Edge, ...]


@dataclass(frozen=True)
class Tree:
    """All waves of a plan; the first one's nodes are anchor states, evaluated already.

    Attributes:
        waves: in order; the k-th node of a wave is the target of the k-th imageless edge before it.
        images: [branches][J], which distinct image each tail ends at.
        num_images: distinct images per member.
    """

    waves: tuple[Wave, ...]
    images: tuple[tuple[int, ...], ...]
    num_images: int

    @property
    def first_of_tails(self) -> int:
        """Number of the wave from which on all forwards count as tails."""
        before = [n for n, wave in enumerate(self.waves) if set(wave.parts) != {"tails"}]
        return 1 + max(before)


def make_tree(plan: Plan) -> Tree:
    """Waves and images of a plan."""
    first_noise: list[int] = []
    chains: dict[tuple[int, tuple[int, ...]], int] = {}
    images: list[tuple[int, ...]] = []
    for b, branch in enumerate(plan.branches):
        first_noise.append(sum(len(before.noise_steps) for before in plan.branches[:b]))
        ends = [(b, (*branch.noise_steps, *positions)) for positions in branch.tails]
        for end in ends:
            chains.setdefault(end, len(chains))
        images.append(tuple(chains[end] for end in ends))

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
    return Tree(tuple(waves), tuple(images), len(chains))


def _part(depth: int, num_noise_steps: int) -> str:
    if depth == 1:
        return "anchor"
    return "sde" if depth <= num_noise_steps else "tails"

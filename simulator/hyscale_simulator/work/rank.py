"""What one rank sees of a scenario: its tokens, keys, heads and columns, for one microbatch."""

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property

from hyscale_simulator.layout import Plan
from hyscale_simulator.scenario import Routing, Scenario

__all__ = ["Rank", "expert_imbalance"]


@dataclass(frozen=True)
class Rank:
    """Sizes for one rank of any stage.

    Where ranks differ (keys under a contiguous split, tokens of the experts), the slowest and the mean are
    given; ranks meet in every layer, so the slowest sets the pace.
    """

    scenario: Scenario
    cut: Plan

    @cached_property
    def tokens(self) -> int:
        """Tokens of a microbatch on this context rank."""
        batch = self.scenario.batch
        return batch.sequences_per_microbatch * batch.sequence_tokens // self.cut.context

    @cached_property
    def rows(self) -> int:
        """Tokens in norms, residuals and router: divided over tensor ranks if sequence parallel."""
        if self.scenario.layout.sequence_parallel:
            return self.tokens // self.cut.tensor
        return self.tokens

    @property
    def sequence_parallel(self) -> bool:
        """Whether norms and residuals are split over tensor ranks."""
        return self.scenario.layout.sequence_parallel and self.cut.tensor > 1

    @cached_property
    def keys_mean(self) -> int:
        """Mean keys a query sees, over all ranks: half the sequence."""
        return max(self.scenario.batch.sequence_tokens // 2, 1)

    @cached_property
    def keys_seen(self) -> int:
        """Mean keys that a query's indexer chooses from."""
        indexer = self.scenario.model_description.indexer
        return max(self.keys_mean // (indexer.key_ratio if indexer is not None else 1), 1)

    @cached_property
    def keys_slowest(self) -> int:
        """Mean keys a query of the busiest rank sees.

        Zig-zag: the same for all.  Contiguous: the last of P ranks sees (2P - 1) / P times the mean
        (sum the causal pairs of the last 1/P of the rows; Megatron-LM issue 6058 reports the effect).
        """
        if self.scenario.layout.context_split == "zigzag":
            return self.keys_mean
        ranks = self.cut.context
        return self.scenario.batch.sequence_tokens * (2 * ranks - 1) // (2 * ranks)

    @property
    def linear_dtype(self) -> str:
        """Operand type of the linear layers."""
        return self.scenario.precision.linear

    @cached_property
    def imbalance(self) -> float:
        """Tokens of the busiest expert rank over the mean."""
        experts = self.scenario.model_description.experts
        if experts is None:
            return 1.0
        return expert_imbalance(self.scenario.routing, experts.experts, self.cut.expert)


def expert_imbalance(routing: Routing, experts: int, ranks: int) -> float:
    """Load of the busiest of ``ranks`` expert ranks over the mean.

    Balanced: 1.  Power law: the i-th busiest expert gets a share proportional to i^-exponent, and experts
    are dealt to ranks in boustrophedon order (the usual greedy placement).  Counts: as numbered, in blocks.
    """
    if routing.distribution == "balanced" or ranks == 1:
        return 1.0
    loads: defaultdict[int, float] = defaultdict(float)
    per_rank = experts // ranks
    if routing.distribution == "counts":
        for expert, count in enumerate(routing.counts):
            loads[expert // per_rank] += count
    else:
        for position in range(experts):
            turn, at = divmod(position, ranks)
            share = (position + 1.0) ** -routing.exponent
            loads[at if turn % 2 == 0 else ranks - 1 - at] += share
    return max(loads.values()) * ranks / sum(loads.values())

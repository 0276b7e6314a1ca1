"""What a streamed gradient is divided by, when the size of the mini-batch is only known after its last micro-batch."""

import math


class StreamedCounts:
    """Counts of one mini-batch on one rank, added up micro-batch by micro-batch.

    The gradient can be divided once, at the end, only where all terms of the loss are counted alike, or in a fixed
    ratio (actions of D tokens against actions). Each micro-batch's loss is therefore divided by the ratios alone.
    """

    def __init__(self) -> None:
        self.policy = 0.0
        self._ratios: dict[str, float] | None = None

    def add(self, counts: dict[str, float]) -> dict[str, float]:
        """Divisors of this micro-batch's terms: 1 for the policy, for another term its count per policy element.

        Raises:
            ValueError: a term's ratio differs from the earlier micro-batches'.
        """
        policy = counts["policy"]
        self.policy += policy
        if policy == 0:  # padding, or groups without spread: no term weighs anything
            return {f"{name}_count": 1.0 for name in counts}
        ratios = {name: count / policy for name, count in counts.items()}
        if self._ratios is None:
            self._ratios = ratios
        for name, ratio in ratios.items():
            if not math.isclose(ratio, self._ratios[name], rel_tol=1e-6):
                raise ValueError(
                    f"streaming: the loss counts {ratio:g} {name} elements a policy element in this micro-batch and "
                    f"{self._ratios[name]:g} in earlier ones, so the terms cannot be divided together; give "
                    "vla3.algorithm.reward_type, logprob_type and entropy_type one level, or turn off "
                    "vla3.stages.streaming.enabled"
                )
        return {f"{name}_count": ratio for name, ratio in ratios.items()}

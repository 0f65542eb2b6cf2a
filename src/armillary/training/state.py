"""What a run is at a moment, beside its tensors: the part of a checkpoint that is plain numbers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from armillary.foundation.errors import Problem, UserError


@dataclass(kw_only=True, slots=True)
class Position:
    """How far a run has come."""

    step: int = 0
    """Optimizer steps finished."""
    tokens_total: int = 0
    """Valid tokens trained on."""
    cursor: int = 0
    """Global position of the next training sample."""
    looked_at: int = 0
    """Step of the newest look at held-out text; one that a stop cut short does not count."""
    data_fingerprint: str = ""
    """SHA-256 over what the cursor counts; a cursor means nothing for other data."""

    def scalars(self) -> dict[str, Any]:
        """As JSON, for the checkpoint."""
        return asdict(self)

    @classmethod
    def from_scalars(cls, scalars: dict[str, Any], *, data_fingerprint: str, path: str) -> Position:
        """The position of a checkpoint, for a run over the data of `data_fingerprint`.

        Raises:
            UserError: the checkpoint counts over other data: other documents, tokenizer, packing,
                sequence length, seed or mixture.
        """
        position = cls(**scalars)
        if position.data_fingerprint != data_fingerprint:
            raise UserError(
                Problem(
                    f"{path} was trained on other data: its fingerprint is"
                    f" {position.data_fingerprint[:12]}, this recipe's is {data_fingerprint[:12]}",
                    allowed="the same corpus, tokenizer, packing, seq_len, seed and mixture",
                    fix="undo the change, or begin a new run with --run DIR",
                )
            )
        return position

"""From a recipe to its model."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from armillary.models.decoder import Decoder
    from armillary.recipe.recipe import Recipe


def build_model(recipe: Recipe) -> Decoder:
    """The whole model, with what its tuning freezes and adds, on the current default device.

    `torch.device("meta")` touches no memory.

    Raises:
        UserError: a pattern of the tuning matches nothing, or nothing would be trained.
    """
    model = recipe.model.build()
    recipe.tuning.apply(model)
    return model

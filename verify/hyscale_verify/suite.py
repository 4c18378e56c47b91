"""The whole suite: properties and planted bugs of selection, of replay, and of the indexer's gradients."""

from hyscale_verify import properties as selection
from hyscale_verify.lifecycles import catalogue as replay_bugs
from hyscale_verify.lifecycles import properties as replay
from hyscale_verify.mutants import catalogue as selection_bugs
from hyscale_verify.mutants.catalogue import Mutant
from hyscale_verify.properties import Property

PROPERTIES: dict[str, Property] = {
    **selection.PROPERTIES,
    **{each.name: each for each in replay.PROPERTIES},
}

MUTANTS: tuple[Mutant, ...] = (*selection_bugs.MUTANTS, *replay_bugs.MUTANTS)

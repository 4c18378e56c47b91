"""The whole suite: properties and planted bugs of selection, of replay and the indexer, and of attention."""

from dataclasses import dataclass

from hyscale_verify import properties as selection
from hyscale_verify.attention import catalogue as attention_bugs
from hyscale_verify.attention import properties as attention
from hyscale_verify.lifecycles import catalogue as replay_bugs
from hyscale_verify.lifecycles import properties as replay
from hyscale_verify.mutants import catalogue as selection_bugs
from hyscale_verify.mutants.catalogue import Mutant
from hyscale_verify.properties import Property


@dataclass(frozen=True)
class Part:
    """Properties, and the planted bugs that they are tried on."""

    properties: tuple[Property, ...]
    mutants: tuple[Mutant, ...]


PARTS: tuple[Part, ...] = (
    Part(tuple(selection.PROPERTIES.values()), selection_bugs.MUTANTS),
    Part(replay.PROPERTIES, replay_bugs.MUTANTS),
    Part(attention.PROPERTIES, attention_bugs.MUTANTS),
)

PROPERTIES: dict[str, Property] = {each.name: each for part in PARTS for each in part.properties}

MUTANTS: tuple[Mutant, ...] = tuple(each for part in PARTS for each in part.mutants)

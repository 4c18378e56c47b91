"""Every promise of the selection contract as a property that can be falsified."""

from hyscale_verify.properties import form, relations, repetition, selection
from hyscale_verify.properties.base import FalsifiedError, InapplicableError, Property, Trial

__all__ = ["PROPERTIES", "FalsifiedError", "InapplicableError", "Property", "Trial"]

PROPERTIES: dict[str, Property] = {
    each.name: each for module in (selection, form, relations, repetition) for each in module.PROPERTIES
}

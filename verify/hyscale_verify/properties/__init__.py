"""Every promise of the selection contract as a property that can be falsified."""

from hyscale_verify.properties import (
    boundary,
    companions,
    form,
    integration,
    internals,
    relations,
    repetition,
    selection,
)
from hyscale_verify.properties.base import FalsifiedError, InapplicableError, Property, Trial

__all__ = ["PROPERTIES", "FalsifiedError", "InapplicableError", "Property", "Trial"]

MODULES = (selection, form, relations, repetition, internals, integration, boundary, companions)
PROPERTIES: dict[str, Property] = {each.name: each for module in MODULES for each in module.PROPERTIES}

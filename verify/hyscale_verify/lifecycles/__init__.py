"""Lives of records: what replay and the indexer's gradients promise, a stateful machine, planted bugs."""

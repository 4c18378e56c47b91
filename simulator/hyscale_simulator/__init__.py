"""SimPy model of a GPU cluster: predicts a training step from kernel profiles and explains it."""

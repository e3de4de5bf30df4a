"""Sharing of a model among ranks: process groups, the device mesh, and what is applied to the model
in which order."""

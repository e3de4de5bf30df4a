"""Measures of a model on held-out data: loss, and the answers to SQL questions."""

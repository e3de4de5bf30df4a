"""How ranks share a model: process groups, the device mesh, and what is applied to the model in which order."""

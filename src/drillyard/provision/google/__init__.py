"""What Google Cloud itself says about a project: whether a cluster can be made, what is left."""

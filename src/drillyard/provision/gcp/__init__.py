"""What clusters on Google Cloud share, whether of GKE or of virtual machines."""

"""What custom jobs of Vertex AI need beside themselves: bucket, account, network, images."""

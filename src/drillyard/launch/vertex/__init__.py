"""Vertex AI custom jobs: the request, its rules, the service, what is in the bucket."""
